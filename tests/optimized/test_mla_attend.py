"""The sparse attention core in the interpreter: every form of row, head count and tile within the gate; nothing else is read."""

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from optimized.mla_tiles import MlaTile
from parity.buffers import same_bits
from reference import fp8, mla, validate_mla
from tests.optimized.attention import NAN, core
from tests.optimized.attention import away as distance

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import mla_attend

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

FORMS = [("plain", 32), ("scaled", 128), ("scaled", 256), ("reserved", 128), ("static", 32)]
IDS = torch.stack([torch.randperm(48, generator=torch.Generator().manual_seed(n))[:37] for n in range(2)]).int()


def away(given: dict[str, Any], attend: Any = mla_attend.attend) -> float:
    return distance(attend, given, mla_attend.CONTRACT)


def with_tile(tile: MlaTile) -> Any:
    """`attend` with this tile."""

    def attend(q: Tensor, latent: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        sizes = validate_mla.attend(q, latent, **{"counts": None, "kv_scale": None, **given})
        return mla_attend.launch(tile, sizes, q, latent, **given)

    return attend


@pytest.mark.parametrize(("form", "channels"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_form_of_row_is_within_the_gate(form: str, channels: int, dtype: torch.dtype) -> None:
    assert away(core(IDS, form=form, channels=channels, dtype=dtype)) <= 1


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 17, 24, 64, 96, 128])
def test_native_head_counts(heads: int) -> None:
    assert away(core(IDS[:1], heads=heads)) <= 1


@pytest.mark.parametrize("splits", [1, 2, 5, 33])
@pytest.mark.parametrize("rows", [16, 32])
def test_every_split_is_within_the_gate(rows: int, splits: int) -> None:
    attend = with_tile(MlaTile(16, rows, splits, 4, 2, 16))
    assert away(core(IDS, heads=3), attend) <= 1
    ragged = core([[5, -1, 99, 40, *[-1] * 33], [-1] * 37, [*range(20), *[-1] * 17]], heads=3)
    assert away(ragged, attend) <= 1
    assert away(ragged | {"counts": torch.tensor([4, 9, 17], dtype=torch.int32)}, attend) <= 1


def test_splits_and_tiles_round_the_same_weights() -> None:
    """Weights are over powers of two: in FP32, where nothing but the order of sums is left, outputs differ by that alone."""
    given = core(IDS, heads=3)
    given["q"] *= 16
    outs = [with_tile(MlaTile(16, rows, splits, 4, 1))(**given)[0] for rows, splits in ((16, 1), (16, 3), (64, 1), (32, 2))]
    assert all(same_bits(out, outs[0]) for out in outs)


@pytest.mark.parametrize("form", ["plain", "scaled"])
def test_only_named_rows_are_read(form: str) -> None:
    """Known failure 34: -1, ids past the cache and a large positive id contribute nothing; one that stands thrice counts thrice."""
    ids = [[5, -1, 7, 48, 2147480000], [-(2**31), 3, 3, 3, 9], [-1, 48, -7, 1 << 30, -1]]
    assert away(core(ids, form=form, channels=128)) <= 1


@pytest.mark.parametrize("filler", [-1, 0, 2**31 - 1])
@pytest.mark.parametrize("count", [0, 1, 5, 37, 99, -3])
def test_columns_past_the_count_are_not_used(count: int, filler: int) -> None:
    """Known failures 31 and 33: they name rows of NaN."""
    ids = IDS[:1].clone()
    ids[0, max(count, 0) :] = filler
    given = core(ids, counts=torch.tensor([count], dtype=torch.int32))
    if filler == 0 and not (ids[0, : max(count, 0)] == 0).any():
        given["latent"][0, 0] = NAN
    assert away(given) <= 1


def test_rows_without_ids_are_zero_and_minus_infinity_whatever_the_query_holds() -> None:
    """Known failure 37."""
    for splits in (1, 3):
        given = core([[-1] * 37, [48] * 37])
        given["q"].fill_(NAN)
        out, lse = with_tile(MlaTile(16, 16, splits, 4, 1))(**given)
        assert not out.any() and (lse == -torch.inf).all()


def test_a_nan_that_is_named_is_seen() -> None:
    for splits in (1, 3):
        given = core(IDS)
        given["latent"].view(-1, 32)[IDS[0, 20].long()] = NAN
        out, _ = with_tile(MlaTile(16, 16, splits, 4, 1))(**given)
        assert out[0].isnan().all()


@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0, 1e4])
def test_small_and_large_logits(size: float) -> None:
    given = core(IDS, dtype=torch.float32)
    given["q"] *= size
    assert away(given) <= 1


@pytest.mark.parametrize("channels", [20, 40, 512])
def test_channels_that_are_no_power_of_two_read_nothing_beside_their_rows(channels: int) -> None:
    given = core(IDS[:1], channels=channels)
    for name in ("q", "latent"):
        beside = torch.full((*given[name].shape[:2], channels + 64), NAN, dtype=torch.bfloat16)
        beside[..., :channels] = given[name]
        given[name] = beside[..., :channels]
    assert away(given) <= 1


@pytest.mark.parametrize(("form", "channels"), FORMS)
def test_pages_apart_and_flat_caches(form: str, channels: int) -> None:
    """A gap of NaN after each page, and one row a page."""
    given = core(IDS, form=form, channels=channels)
    plain = mla_attend.attend(**given)
    latent = given["latent"].view(torch.uint8)
    far = torch.full((12, 7, latent.shape[2] + 16), 0xFF, dtype=torch.uint8)
    far[:, :4, : latent.shape[2]] = latent
    flat = latent.flatten(0, 1)[:, None]
    for other in (far[:, :4, : latent.shape[2]], flat):
        got = mla_attend.attend(**{**given, "latent": other.view(given["latent"].dtype)})
        assert all(same_bits(x, y) for x, y in zip(got, plain, strict=True))


def test_row_offsets_beyond_31_bits() -> None:
    """Known failure 16: page 2 starts at element 2^31 of memory that is touched nowhere else."""
    given = core([[8, 1, 5, 11, 10, 9]], pages=3)
    far = torch.empty(2**31 + 256, dtype=torch.bfloat16).as_strided((3, 4, 32), (2**30, 32, 1))
    far.copy_(given["latent"])
    assert away({**given, "latent": far}) <= 1


def test_strided_queries_and_ids() -> None:
    given = core(IDS, heads=3)
    wide = torch.full((2, 5, 80), NAN, dtype=torch.bfloat16)
    wide[:, 1:4, 16:48] = given["q"]
    ids = torch.full((2, 50), 7, dtype=torch.int32)
    ids[:, :37] = given["ids"]
    got = mla_attend.attend(**{**given, "q": wide[:, 1:4, 16:48], "ids": ids[:, :37]})
    assert all(same_bits(x, y) for x, y in zip(got, mla_attend.attend(**given), strict=True))


def test_the_order_of_programs_has_no_say() -> None:
    given, attend = core(IDS, heads=20), with_tile(MlaTile(16, 16, 3, 4, 1))
    with interpreter.program_order(reverse=True):
        got = attend(**given)
    assert all(same_bits(x, y) for x, y in zip(got, attend(**given), strict=True))


@pytest.mark.parametrize("given", [core(torch.zeros(0, 5, dtype=torch.int32)), core([[]]), core([[0, 1]], pages=0)], ids=["T", "W", "rows"])
def test_empty_calls(given: dict[str, Any]) -> None:
    out, lse = mla_attend.attend(**given)
    assert out.shape == given["q"].shape and not out.any() and (lse == -torch.inf).all()


def test_the_signature_is_the_references_without_its_points() -> None:
    expected = inspect.signature(inspect.unwrap(mla.attend)).parameters
    assert inspect.signature(mla_attend.attend).parameters == {k: p for k, p in expected.items() if k != "at"}


def test_what_the_kernel_cannot_read_is_refused() -> None:
    given = core(IDS, form="scaled", channels=128)
    odd = torch.zeros(12, 4, 133, dtype=torch.uint8)[..., :132]
    for changed, message in (
        ({"q": given["q"].double()}, "q: expected dtype bfloat16, float16 or float32, got torch.float64; "),
        ({"latent": torch.zeros(12, 4, 128)}, "latent: expected the dtype of q, torch.bfloat16, or FP8 rows, got torch.float32; "),
        ({"latent": odd}, "latent: expected rows at multiples of 4 bytes, got strides "),
        ({"q": given["q"].repeat(1, 65, 1)}, "q: expected 1 to 128 heads for triton, got 130; "),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            mla_attend.attend(**{**given, **changed})
        assert str(error.value).startswith(message)
    with pytest.raises(ValueError, match="latent: expected positive finite scales"):
        mla_attend.attend(**{**given, "latent": fp8.quantize_rows(torch.ones(12, 4, 128)).index_fill_(2, torch.arange(128, 132), 0)})
