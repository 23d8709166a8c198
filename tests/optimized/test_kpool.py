"""The indexer's kernels in the interpreter: the reference's selections to the last id, ties and tails included; its caches."""

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity import limits, metrics
from parity.buffers import same_bits
from reference import kpool as reference
from reference.mla_cache import Sequences, ring_rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kpool

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

NAN = float("nan")
DIM = 24


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(pages: int, count: int = 1) -> Tensor:
    return torch.randperm(pages * count, generator=torch.Generator().manual_seed(1)).int().view(count, pages)


def selected(score: Tensor, lengths: list[int], **more: Any) -> None:
    """Both selections of these lengths, to the last id."""
    blocks = more.pop("blocks", table(-(-score.shape[1] // 16)))
    given = dict(owner=torch.zeros(len(lengths), dtype=torch.int32), position=torch.tensor(lengths).int() - 1, block_table=blocks, page=64)
    got, expected = (module.select(score, **{**given, **more}) for module in (kpool, reference))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("top", [1, 5, 64])
def test_selections_around_every_boundary(top: int) -> None:
    lengths = [0, 1, 3, 4, 5, 4 * top - 1, 4 * top, 4 * top + 3, 4 * top + 4, 4 * top + 5, 1023, 1024, 1087]
    selected(normal(len(lengths), 272), lengths, top=top)


def test_the_real_width() -> None:
    lengths = [2047, 2048, 2051, 2052, 2056, 8190]
    for kernel in ("triton", "flash_mla_sm90"):
        selected(normal(len(lengths), 2048), lengths, kernel=kernel)


def test_of_equal_scores_the_first_pools_win() -> None:
    """Known failure 32: plateaus of zeros of either sign, one score alone, scores of one FP16 value, NaN of either sign, infinities."""
    plateau = torch.zeros(1024)
    plateau[1::2] = -0.0
    plateau[torch.randperm(1024, generator=torch.Generator().manual_seed(2))[:20]] = torch.arange(1.0, 21)
    close = 1 + torch.randperm(1024, generator=torch.Generator().manual_seed(3)) * 2.0**-23
    wild = normal(1024) * 1e30
    wild[::7], wild[::11], wild[5] = torch.inf, -torch.inf, NAN
    wild.view(torch.int32)[1000] = -1  # NaN with its sign set
    rows = torch.stack([plateau, torch.zeros(1024), torch.full((1024,), -3.5), close, -close, wild])
    selected(rows, [4096] * 6, top=64)
    selected(rows, [4095, 4093, 3001, 4094, 1111, 4096], top=300)


def test_columns_that_are_no_candidates_are_not_used() -> None:
    """Known failure 26."""
    for poison in (NAN, 1e30):
        score = normal(2, 64)
        score[0, 9:], score[1, 1:] = poison, poison
        selected(score, [37, 6], top=4)


def test_pages_that_are_missing_and_tables_of_other_sequences() -> None:
    score, blocks = normal(3, 64), table(4, count=2)
    blocks[1, 2] = -1
    given = dict(owner=int32(1, 0, 1), position=int32(200, 255, 129), block_table=blocks, page=64, top=7)
    for x, y in zip(kpool.select(score, **given), reference.select(score, **given), strict=True):
        assert torch.equal(x, y)
    strided = torch.full((3, 90), NAN)
    strided[:, :64] = score
    assert torch.equal(kpool.select(strided[:, :64], **given)[0], kpool.select(score, **given)[0])


def scored(dtype: torch.dtype, heads: int = 5) -> dict[str, Tensor]:
    """Queries of two sequences over pages that are apart; keys that nobody sees are NaN."""
    blocks = table(4, count=2)
    wide = torch.full((8, 7, DIM + 8), NAN, dtype=dtype)
    keys = wide[:, :4, :DIM]
    owner, position = int32(0, 1, 1, 0, 0, 1), int32(0, 61, 17, 3, 31, -1)
    for n, last in ((0, 31), (1, 61)):
        for j in range((last + 1) // 4):
            keys[int(blocks[n, j // 4]), j % 4] = normal(DIM, seed=100 * n + j, dtype=dtype)
    return dict(
        index_q=normal(6, heads, DIM, seed=1, dtype=dtype), head_weight=normal(6, heads, seed=2, dtype=dtype), pool_keys=keys, owner=owner,
        position=position, block_table=blocks,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [1, 5, 32])
def test_scores_are_within_the_gate(dtype: torch.dtype, heads: int) -> None:
    given = scored(dtype, heads)
    got = kpool.scores(**given)
    single = reference.scores(**given)
    gold = reference.scores(**{**given, "index_q": given["index_q"].double(), "pool_keys": given["pool_keys"].double()})
    seen = gold > -torch.inf
    assert got.dtype == torch.float32 and int(seen.sum()) == sum((p + 1) // 4 for p in given["position"].tolist())
    sides = [x[seen][None, None] for x in (got, gold, gold, single)]
    m = metrics.moments(*sides, torch.float32)
    assert metrics.noise_ratio(m).within(limits.boundary(torch.float32))


def test_scores_keep_signs_and_drop_negative_heads() -> None:
    given = scored(torch.float32, 2) | {"position": int32(3, *[-1] * 5)}
    key = given["pool_keys"][int(given["block_table"][0, 0]), 0]
    key[:] = 0
    key[0] = DIM**0.5
    given["index_q"][0, :, 0] = torch.tensor([3.0, -5.0])
    for weights, score in (([1.0, 1.0], 3.0), ([-2.0, 1.0], -6.0)):
        given["head_weight"][0] = torch.tensor(weights)
        torch.testing.assert_close(kpool.scores(**given)[0, 0], torch.tensor(score))


def both_caches(dtype: torch.dtype, drafts: int, **more: Any) -> list[dict[str, Tensor]]:
    """Two sets of caches of NaN, with gaps after pages and slots."""
    ring = more.get("ring", ring_rows(drafts))
    return [
        dict(
            pool_keys=torch.full((18, 3, DIM), NAN, dtype=dtype)[:, :2],
            ring=torch.full((4, ring + 2, 2 * DIM), NAN, dtype=dtype)[:3, :ring],
        )
        for _ in range(2)
    ]  # fmt: skip


def written(caches: list[dict[str, Tensor]], raw: Tensor, rows: Sequences) -> None:
    """The same call on both; the ring to the bit, keys but for the rounding of their last place."""
    ape = normal(4, DIM, seed=9)
    for module, given in zip((kpool, reference), caches, strict=True):
        module.cache(raw[:, :DIM], raw[:, DIM:], ape=ape, **given, sequences=rows)
    assert same_bits(caches[0]["ring"], caches[1]["ring"])
    keys = [given["pool_keys"] for given in caches]
    torch.testing.assert_close(*keys, equal_nan=True)
    assert torch.equal(keys[0].isnan(), keys[1].isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cuts", [[1] * 13, [5, 9, 2], [7, 12], [3, 1, 6, 20], [2, 30], [0, 4, 0, 9]], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_of_any_length_leave_the_references_caches(dtype: torch.dtype, cuts: list[int], reverse: bool) -> None:
    """In either order of programs: a piece longer than the ring writes over rows that its own first pool reads."""
    caches, start, blocks = both_caches(dtype, 0, ring=4 if cuts[0] != 1 else 8), 0, table(6)
    raw = normal(sum(cuts), 2 * DIM, dtype=dtype)
    for count in cuts:
        with interpreter.program_order(reverse=reverse):
            written(caches, raw[start : start + count], Sequences(int32(2), int32(start), int32(0, count), blocks))
        start += count


def test_batches_padding_and_rejected_drafts() -> None:
    caches, blocks = both_caches(torch.bfloat16, 3), table(6, count=3)
    starts = [0, 0, 0]
    for step in range(8):
        raw = normal(12, 2 * DIM, seed=step, dtype=torch.bfloat16)
        rows = Sequences(int32(1, -1 if step % 2 else 2, 0), int32(*starts), int32(0, 4, 8, 12), blocks)
        written(caches, raw, rows)
        starts = [start + (step + n) % 4 + 1 if n != 1 or step % 2 == 0 else start for n, start in enumerate(starts)]


def test_the_signatures_are_the_references_without_points() -> None:
    for name, more in (("scores", set()), ("select", set()), ("cache", {"places"})):
        ours, theirs = (inspect.signature(inspect.unwrap(getattr(module, name))).parameters for module in (kpool, reference))
        assert list(ours) == [key for key in theirs if key != "at"] + sorted(more)


def test_other_dtypes_are_refused() -> None:
    given = scored(torch.bfloat16)
    for changed, message in (
        ({"index_q": given["index_q"].float()}, "index_q: expected the dtype of pool_keys, torch.bfloat16, got torch.float32; "),
        ({"head_weight": given["head_weight"].double()}, "head_weight: expected dtype bfloat16, float16 or float32, got torch.float64; "),
    ):
        with pytest.raises(TypeError) as error:
            kpool.scores(**{**given, **changed})
        assert str(error.value).startswith(message)
    rows = dict(owner=int32(0), position=int32(3), block_table=int32(0)[None], page=8)
    with pytest.raises(TypeError, match=r"score: expected dtype float32, got torch\.float64; "):
        kpool.select(torch.zeros(1, 2).double(), **rows)
