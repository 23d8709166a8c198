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


def by_chunks(given: Prompt, length: int) -> tuple[Tensor, Prompt]:
    """The output of a prompt run a chunk at a time, and its pools as they are before each chunk, a slot for each."""
    carried, outs = copied(given), []
    pools: dict[str, list[Tensor]] = {name: [] for name in POOLS}
    for first in range(0, length, CHUNK):
        for name in POOLS:
            pools[name].append(carried[name].clone())
        outs.append(kda_prefill.prefill(**packed(carried, [slice(first, min(first + CHUNK, length))])))
    return torch.cat(outs), {name: torch.cat(found) for name, found in pools.items()}


def from_its_chunk(length: int) -> slice:
    """The end of a prompt, from the chunk that its last token lies in."""
    return slice(max(length - 1, 0) // CHUNK * CHUNK, length)


def test_a_prompt_split_anywhere_leaves_what_one_piece_leaves() -> None:
    """Both pieces within the gate, and the state as near to the truth as that of one piece.

    A chunk hands on an FP32 state to the bit, so the first pieces start from the chunk that they are cut in.
    """
    whole = prompt([TOKENS], heads=1, pool=1, key_dim=8, value_dim=4)
    one, exact = copied(whole), copied(whole, torch.float64)
    out = kda_prefill.prefill(**one)
    kda.prefill(**exact)
    by_chunk, pools = by_chunks(whole, TOKENS)
    assert same_bits(by_chunk, out)

    firsts = [from_its_chunk(split) for split in SPLITS]
    pieces = whole | {name: pool[[part.start // CHUNK for part in firsts]] for name, pool in pools.items()}
    for parts in (firsts, [slice(split, TOKENS) for split in SPLITS]):
        assert away(kda_prefill.prefill, packed(pieces, parts), kda_prefill.CONTRACT) <= 1
    healthy = (one["state"].double() - exact["state"]).norm()
    for split in SPLITS:
        assert (pieces["state"][split].double() - exact["state"][0]).norm() <= 2 * healthy, split
        assert same_bits(pieces["window"][split], one["window"][0]), split


@pytest.mark.parametrize(("lower_bound", "most"), [(-5.0, LONGEST), (None, 2 * CHUNK + 1)])
def test_a_changed_token_changes_no_earlier_output_at_any_length(lower_bound: float | None, most: int) -> None:
    """Prompts of every length, in one launch, whose last token is another: from the chunk it lies in, and some from the start."""
    given = prompt([LONGEST], heads=1, pool=1, key_dim=4, value_dim=2, lower_bound=lower_bound)
    out = kda_prefill.prefill(**copied(given))
    by_chunk, pools = by_chunks(given, LONGEST)
    assert same_bits(by_chunk, out)  # an FP32 state is handed on to the bit

    parts = [*map(from_its_chunk, range(1, most + 1)), *(slice(0, length) for length in EDGES if length <= most)]
    starts = [part.start // CHUNK for part in parts]
    call = packed(given | {name: pool[starts] for name, pool in pools.items()}, parts)
    last = call["cu_seqlens"][1:].long() - 1
    for name in ACTIVATIONS:
        call[name][last] += 3
    changed = kda_prefill.prefill(**call)
    for part, rows in zip(parts, changed.split([part.stop - part.start for part in parts]), strict=True):
        assert same_bits(rows[:-1], out[part.start : part.stop - 1]), part
        assert not same_bits(rows[-1], out[part.stop - 1]), part
