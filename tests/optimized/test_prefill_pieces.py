"""A prompt in pieces, and a prompt whose later tokens change: every place in a prompt, one sequence of one launch for each."""

from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity.buffers import same_bits
from reference import kda
from tests.optimized.prompts import ACTIVATIONS, POOLS, Prompt, away, copied, prompt

pytest.importorskip("triton")

from optimized import kda_prefill

if not interpreter.active():
    pytest.skip("needs TRITON_INTERPRET=1 before the first import of triton", allow_module_level=True)

TOKENS = 70
SPLITS = range(TOKENS + 1)
LONGEST, CHUNK = 130, 16
EDGES = (16, 17, 33, 64, 65, 128, 129)  # lengths of prompts that are run from their beginning


def packed(given: Prompt, parts: list[slice], **changed: Any) -> Prompt:
    """A call on parts of one sequence, each a sequence of its own with a slot of its own."""
    rows = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    ends = torch.tensor([0, *(part.stop - part.start for part in parts)]).cumsum(0).to(torch.int32)
    own = {name: given[name][rows] for name in ACTIVATIONS}
    return given | own | {"cu_seqlens": ends, "slots": torch.arange(len(parts), dtype=torch.int32)} | changed


def test_a_prompt_split_anywhere_leaves_what_one_piece_leaves() -> None:
    """Both pieces within the gate, and the state as near to the truth as that of one piece."""
    whole = prompt([TOKENS], heads=1, pool=1, key_dim=8, value_dim=4)
    pieces = whole | {name: whole[name].repeat(len(SPLITS), *[1] * (whole[name].ndim - 1)) for name in POOLS}
    for parts in ([slice(0, split) for split in SPLITS], [slice(split, TOKENS) for split in SPLITS]):
        assert away(kda_prefill.prefill, packed(pieces, parts), kda_prefill.CONTRACT) <= 1

    one, exact = copied(whole), copied(whole, torch.float64)
    kda_prefill.prefill(**one)
    kda.prefill(**exact)
    healthy = (one["state"].double() - exact["state"]).norm()
    for split in SPLITS:
        assert (pieces["state"][split].double() - exact["state"][0]).norm() <= 2 * healthy, split
        assert same_bits(pieces["window"][split], one["window"][0]), split


def by_chunks(given: Prompt) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The output of a prompt run a chunk at a time, and its state and window before each chunk."""
    carried, outs, states, windows = copied(given), [], [], []
    for first in range(0, LONGEST, CHUNK):
        states.append(carried["state"].clone())
        windows.append(carried["window"].clone())
        part = slice(first, min(first + CHUNK, LONGEST))
        outs.append(kda_prefill.prefill(**packed(carried, [part])))
    return torch.cat(outs), states, windows


@pytest.mark.parametrize(("lower_bound", "most"), [(-5.0, LONGEST), (None, 2 * CHUNK + 1)])
def test_a_changed_token_changes_no_earlier_output_at_any_length(lower_bound: float | None, most: int) -> None:
    """Prompts of every length, in one launch, whose last token is another: from the chunk it lies in, and some from the start."""
    given = prompt([LONGEST], heads=1, pool=1, key_dim=4, value_dim=2, lower_bound=lower_bound)
    out = kda_prefill.prefill(**copied(given))
    pieces, states, windows = by_chunks(given)
    assert same_bits(pieces, out)  # an FP32 state is carried to the bit

    parts = [slice((length - 1) // CHUNK * CHUNK, length) for length in range(1, most + 1)]
    parts += [slice(0, length) for length in EDGES if length <= most]
    pools = {
        "state": torch.cat([states[part.start // CHUNK] for part in parts]),
        "window": torch.cat([windows[part.start // CHUNK] for part in parts]),
    }
    call = packed(given | pools, parts)
    last = call["cu_seqlens"][1:].long() - 1
    for name in ACTIVATIONS:
        call[name][last] += 3
    changed = kda_prefill.prefill(**call)
    for part, rows in zip(parts, changed.split([part.stop - part.start for part in parts]), strict=True):
        assert same_bits(rows[:-1], out[part.start : part.stop - 1]), part
        assert not same_bits(rows[-1], out[part.stop - 1]), part
