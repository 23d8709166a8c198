"""The eager decode baseline: its slices of sequences are one calculation."""

import importlib.util

import pytest
import torch

from parity.buffers import same_bits

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized.peers import eager
from tests.optimized.test_kda_decode import cell


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_batch_in_slices_gives_the_bits_of_one_slice(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = (3, -1, 0, 2, 1)
    whole, sliced = cell(*slots, fresh=torch.tensor([0, 0, 1, 0, 0]).bool()), cell(*slots, fresh=torch.tensor([0, 0, 1, 0, 0]).bool())
    assert whole["state"][0].numel() * len(slots) <= eager.SLICE_ELEMENTS
    expected = eager.decode(**whole)
    monkeypatch.setattr(eager, "SLICE_ELEMENTS", sequences * whole["state"][0].numel())
    out = eager.decode(**sliced)
    assert same_bits(out, expected)
    assert all(same_bits(sliced[name], whole[name]) for name in ("state", "window"))
