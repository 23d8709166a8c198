"""The offsets of a forward in one launch: the numbers of a formula of their own, and what is refused."""

from typing import Any

import pytest
import torch

from optimized import interpreter
from parity import exactly
from reference import kda_offsets
from tests.optimized.test_kda_decode import int32

pytest.importorskip("triton")

from optimized import kda_offsets as fused

if not interpreter.active():
    pytest.skip("needs TRITON_INTERPRET=1 before the first import of triton", allow_module_level=True)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("requests", [0, 1, 2, 255, 256, 257, 600])
def test_the_numbers_are_those_of_the_formula_and_of_the_reference(requests: int, drafts: int) -> None:
    accepted = torch.randint(0, 2 + drafts, (requests,), generator=torch.Generator().manual_seed(requests)).to(torch.int32)
    waits, starts = exactly.expected(accepted.tolist(), drafts)
    for offsets in (fused.offsets, kda_offsets.offsets):
        pending, cu_seqlens = offsets(accepted, drafts)
        assert (pending.tolist(), cu_seqlens.tolist()) == (waits, starts)
        assert pending.dtype == cu_seqlens.dtype == torch.int32


def test_the_formula_is_the_one_of_the_contract() -> None:
    """1+S rows a request; a request's new tokens begin where its pending drafts end; the last entry isn't shifted."""
    assert exactly.expected([3, 0, 1, 4], 3) == ([2, 0, 0, 3], [-2, 4, 8, 9, 16])


def test_counts_beyond_the_drafts_are_cut_as_in_the_reference() -> None:
    wild = int32(9, -3, 2)
    assert all(torch.equal(a, b) for a, b in zip(fused.offsets(wild, 2), kda_offsets.offsets(wild, 2), strict=True))


def test_one_launch_whatever_the_requests() -> None:
    for requests in (0, 300):
        with interpreter.launches() as seen:
            fused.offsets(torch.zeros(requests, dtype=torch.int32), 3)
        assert seen == {"kda_verify_offsets_kernel": 1}


@pytest.mark.parametrize("offsets", [fused.offsets, kda_offsets.offsets], ids=["triton", "reference"])
@pytest.mark.parametrize(
    ("accepted", "drafts", "says"),
    [
        (torch.zeros(3), 2, "accepted: expected dtype int32"),
        (torch.zeros(3, 1, dtype=torch.int32), 2, r"accepted: expected shape \[0\], got \[3, 1\]"),
        (torch.zeros(6, dtype=torch.int32)[::2], 2, "accepted: expected "),
        ([1, 2], 2, "accepted: expected a tensor"),
        (int32(1), -1, "drafts: expected a count of drafts, got -1"),
        (int32(1), 2.0, "drafts: expected a count of drafts, got 2.0"),
    ],
)
def test_what_is_no_count_is_refused(offsets: Any, accepted: Any, drafts: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        offsets(accepted, drafts)


def test_a_cpu_tensor_outside_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "active", lambda: False)
    with pytest.raises(ValueError, match="accepted: expected a CUDA tensor, got one on cpu"):
        fused.offsets(int32(1), 2)
