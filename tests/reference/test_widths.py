"""Widths and head counts that each kernel takes."""

import pytest

from reference import widths

FLASH_MLA = ("flash_mla_sm90", "flash_mla_sm100_h128", "flash_mla_sm100_h64")


@pytest.mark.parametrize("kernel", FLASH_MLA)
@pytest.mark.parametrize(("rows", "aligned"), [(2051, 2176), (2048, 2048), (2049, 2176), (67, 128), (1, 128), (0, 0), (2176, 2176)])
def test_flash_mla_takes_multiples_of_128(kernel: str, rows: int, aligned: int) -> None:
    assert widths.align_width(rows, kernel) == aligned
    widths.check_width(aligned, kernel)


@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_the_others_take_any_width(kernel: str) -> None:
    assert [widths.align_width(rows, kernel) for rows in (1, 2051, 2112)] == [1, 2051, 2112]
    widths.check_width(2051, kernel)


@pytest.mark.parametrize("kernel", FLASH_MLA)
def test_2112_is_refused_by_name_with_the_rule(kernel: str) -> None:
    expected = (
        rf"^ids: expected a width that is a multiple of 128 for {kernel} \(.*blocks of .*\), got 2112; allocate align_width.*2176 here$"
    )
    with pytest.raises(ValueError, match=expected):
        widths.check_width(2112, kernel)


@pytest.mark.parametrize(
    ("kernel", "heads", "padded"),
    [
        ("flash_mla_sm90", 8, 64),
        ("flash_mla_sm90", 64, 64),
        ("flash_mla_sm90", 65, 128),
        ("flash_mla_sm100_h128", 16, 128),
        ("triton", 24, 24),
    ],
)
def test_heads_are_padded_for_flash_mla_only(kernel: str, heads: int, padded: int) -> None:
    assert widths.padded_heads(heads, kernel) == padded


@pytest.mark.parametrize(("kernel", "heads"), [("flash_mla_sm90", 129), ("flash_mla_sm100_h64", 96), ("triton", 129), ("triton", 0)])
def test_heads_that_no_kernel_serves_are_refused(kernel: str, heads: int) -> None:
    with pytest.raises(ValueError, match=rf"^q: expected 1 to \d+ heads for {kernel}, got {heads}; shard the heads"):
        widths.padded_heads(heads, kernel)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel: expected one of reference, triton, flash_mla_sm90, "):
        widths.align_width(2051, "sm90")
