"""Raw keys of the open pool and the keys of complete ones: however a sequence is cut, whatever was rejected."""

import pytest
import torch
from torch import Tensor

from reference import kpool
from reference.mla_cache import Sequences, ring_rows
from tests.reference.test_kda import int32
from tests.reference.test_kda_verify import NAN
from tests.reference.test_kpool import normal, table

DIM, PAGE, BLOCKS = 6, 8, 6


def pools(slots: int = 3, ring: int = 8) -> dict[str, Tensor]:
    """Caches of NaN: whatever is read before it was written shows."""
    return dict(
        pool_keys=torch.full((3 * BLOCKS, PAGE // 4, DIM), NAN, dtype=torch.float64),
        ring=torch.full((slots, ring, 2 * DIM), NAN, dtype=torch.float64),
    )  # fmt: skip


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    raw = normal(count, 2 * DIM, seed=seed)
    return raw[:, :DIM], raw[:, DIM:]


APE = normal(4, DIM, seed=9)


def keys_of(raw: tuple[Tensor, Tensor]) -> Tensor:
    """Every complete pool of one sequence, at once."""
    key, gate = (x[: len(x) // 4 * 4].unflatten(0, (-1, 4)) for x in raw)
    return kpool.pool_keys(key, gate, ape=APE)


def stored(pool_keys: Tensor, blocks: Tensor, count: int) -> Tensor:
    """The keys of a sequence's first pools, read through its table."""
    return pool_keys[blocks.long()].flatten(0, 1)[:count]


def write(
    cache: dict[str, Tensor], raw: tuple[Tensor, Tensor], slots: list[int], starts: list[int], ends: list[int], blocks: Tensor
) -> None:
    rows = Sequences(int32(*slots), int32(*starts), int32(*ends), blocks)
    kpool.cache(*raw, ape=APE, **cache, sequences=rows)


@pytest.mark.parametrize("cuts", [[21], [1] * 21, [2, 5, 1, 13], [3, 1, 4, 4, 9], [0, 7, 0, 14], [20, 1]], ids=str)
def test_any_pieces_give_the_pools_of_one_piece(cuts: list[int]) -> None:
    cache, raw, blocks, start = pools(), tokens(21), table(BLOCKS), 0
    for count in cuts:
        part = tuple(x[start : start + count] for x in raw)
        write(cache, part, [2], [start], [0, count], blocks)
        start += count
    assert torch.equal(stored(cache["pool_keys"], blocks[0], 5), keys_of(raw))
    for p in range(21 - 8, 21):
        assert torch.equal(cache["ring"][2, p % 8], torch.cat([x[p] for x in raw]))


def test_sequences_of_a_batch_form_no_pool_together() -> None:
    """Known failure 29: A ends with three tokens of a pool, B begins beside it."""
    cache, blocks = pools(), table(BLOCKS, count=2)
    a, b = tokens(7), tokens(5, seed=1)
    packed = tuple(torch.cat(pair) for pair in zip(a, b, strict=True))
    write(cache, packed, [0, 1], [0, 0], [0, 7, 12], blocks)
    for n, raw in enumerate((a, b)):
        assert torch.equal(stored(cache["pool_keys"], blocks[n], 1), keys_of(raw))
        assert stored(cache["pool_keys"], blocks[n], 2)[1].isnan().all()


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_rejected_drafts_leave_no_trace(drafts: int) -> None:
    """Every count of accepted tokens at every offset in a pool; rejected ones are NaN, and complete pools of NaN."""
    width, good = 1 + drafts, tokens(40)
    for first in range(4):
        for accepted in range(1, width + 1):
            cache, blocks, start = pools(ring=ring_rows(drafts)), table(BLOCKS), first
            write(cache, tuple(x[:first] for x in good), [0], [0], [0, first], blocks)
            while start + width <= 40:
                step = tuple(x[start : start + width].clone() for x in good)
                for x in step:
                    x[accepted:] = NAN
                write(cache, step, [0], [start], [0, width], blocks)
                start += accepted
            assert torch.equal(stored(cache["pool_keys"], blocks[0], start // 4), keys_of(good)[: start // 4])


def test_ring_sizes_are_those_of_the_model() -> None:
    assert [ring_rows(drafts) for drafts in (0, 1, 3, 4, 5, 7, 12, 13)] == [4, 8, 8, 8, 16, 16, 16, 32]
    assert all(ring_rows(drafts) >= 4 + drafts for drafts in range(64))


def test_nothing_but_the_named_rows_changes() -> None:
    """Known failure 28: gaps between pages and between slots hold NaN; padding and other slots keep theirs."""
    wide_keys, wide_ring = torch.full((18, 3, DIM), 7.0).double(), torch.full((4, 10, 2 * DIM), 7.0).double()
    cache = dict(pool_keys=wide_keys[:, :2], ring=wide_ring[:3, :8])
    blocks, raw = table(BLOCKS, count=3), tokens(10)
    write(cache, raw, [1, -1, 5], [0, 3, 0], [0, 6, 8, 10], blocks)
    keys = torch.full((18, 3), False)
    keys[int(blocks[0, 0]), 0] = True
    assert torch.equal((wide_keys != 7).any(-1), keys)
    ring = torch.full((4, 10), False)
    ring[1, :6] = True
    assert torch.equal((wide_ring != 7).any(-1), ring)


def test_a_cast_of_the_pools_is_all_that_rounds() -> None:
    cache = {name: x.bfloat16() for name, x in pools().items()}
    raw, blocks = tuple(x.bfloat16() for x in tokens(9)), table(BLOCKS)
    write(cache, raw, [0], [0], [0, 9], blocks)
    wide = kpool.pool_keys(*(x[:8].unflatten(0, (-1, 4)).float() for x in raw), ape=APE.float())
    torch.testing.assert_close(stored(cache["pool_keys"], blocks[0], 2).float(), wide.bfloat16().float())


@pytest.mark.parametrize(
    ("starts", "ends", "blocks", "message"),
    [
        ([4], [0, 48], [[0, 1, 2, 3, 4, 5]], "block_table: expected at least 7 blocks of 8 tokens for the 52 of sequence 0, got 6"),
        ([0], [0, 4], [[18, 1, 2, 3, 4, 5]], r"block_table: expected pages in 0\.\.17, got 18 for sequence 0"),
        ([0], [0, 9], [[0, -1, 2, 3, 4, 5]], r"block_table: expected pages in 0\.\.17, got -1 for sequence 0"),
        ([0], [0, 9], [[3, 3, 2, 3, 4, 5]], "block_table: expected pages of its own where tokens are written, got 3 of sequence 0 twice"),
        ([-1], [0, 4], [[0, 1, 2, 3, 4, 5]], "starts: expected positions of 0 and more, got -1"),
        ([0], [0, 5], [[0, 1, 2, 3, 4, 5]], "cu_seqlens: expected offsets that rise from 0 to"),
    ],
)  # fmt: skip
def test_what_has_no_place_is_refused_before_anything_is_touched(starts: list[int], ends: list[int], blocks: list, message: str) -> None:
    cache, count = pools(), ends[-1] - (ends[-1] == 5)
    with pytest.raises(ValueError, match=message):
        write(cache, tokens(count), [0], starts, ends, torch.tensor(blocks, dtype=torch.int32))
    assert all(x.isnan().all() for x in cache.values())


def test_pages_may_be_shared_where_nobody_writes() -> None:
    """A prefix of 8 tokens in common; then a page of their own each."""
    cache, raw = pools(), tokens(8)
    write(cache, raw, [0], [0], [0, 8], int32(4, 1)[None])
    blocks = torch.tensor([[4, 1], [4, 2]], dtype=torch.int32)
    more = tokens(8, seed=1)
    write(cache, more, [0, 1], [8, 8], [0, 4, 8], blocks)
    for n in range(2):
        mine = tuple(torch.cat([x, y[4 * n : 4 * n + 4]]) for x, y in zip(raw, more, strict=True))
        assert torch.equal(stored(cache["pool_keys"], blocks[n], 3), keys_of(mine))
