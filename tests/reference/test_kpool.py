"""The k-pool indexer against brute force with Python's integers: every length around every boundary, ties, tails, block tables."""

import pytest
import torch
from torch import Tensor

from reference import kpool
from reference.mla_cache import page_rows
from tests.reference.test_kda import int32
from tests.reference.test_kda_verify import NAN

LENGTHS = tuple(range(1, 2101))
PAGE = 64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table(pages: int, count: int = 1, seed: int = 1) -> Tensor:
    """Block tables of `count` sequences over pages in random order."""
    order = torch.randperm(pages * count, generator=torch.Generator().manual_seed(seed)).int()
    return order.view(count, pages)


def expected_rows(score: list[float], length: int, blocks: list[int], page: int, top: int = 512) -> set[int]:
    """Spec, appendix B: in Python, one row."""
    pools = length // 4
    best = sorted(range(pools), key=lambda j: (-score[j], j))[:top]
    members = [4 * j + i for j in best for i in range(4)] + list(range(4 * pools, length))
    return {blocks[p // page] * page + p % page for p in members}


def chosen(ids: Tensor, counts: Tensor) -> list[set[int]]:
    """The ids of each row as sets; they are a prefix, distinct, and -1 follows."""
    sets = []
    for row, count in zip(ids.tolist(), counts.tolist(), strict=True):
        assert len(set(row[:count])) == count and min(row[:count], default=0) >= 0 and set(row[count:]) <= {-1}
        sets.append(set(row[:count]))
    return sets


def select(score: Tensor, lengths: list[int], blocks: Tensor, page: int = PAGE, **more: object) -> tuple[Tensor, Tensor]:
    """`kpool.select` for rows of one sequence each as long as it says."""
    owner = torch.zeros(len(lengths), dtype=torch.int32)
    position = torch.tensor(lengths, dtype=torch.int32) - 1
    return kpool.select(score, owner=owner, position=position, block_table=blocks, page=page, **more)


def test_every_length_to_2100_selects_what_brute_force_does() -> None:
    blocks = table(33)
    for some in (LENGTHS[i : i + 300] for i in range(0, 2100, 300)):
        score = normal(len(some), 33 * PAGE // 4, seed=some[0])
        ids, counts = select(score, list(some), blocks)
        assert ids.shape == (len(some), 2051) and ids.dtype == counts.dtype == torch.int32
        assert counts.tolist() == [4 * min(512, n // 4) + n % 4 for n in some]
        rows = [expected_rows(s, n, blocks[0].tolist(), PAGE) for s, n in zip(score.tolist(), some, strict=True)]
        assert chosen(ids, counts) == rows


@pytest.mark.parametrize("length", [8189, 8190, 8191, 8192, 131069, 131072])
def test_long_contexts_select_what_brute_force_does(length: int) -> None:
    blocks = table(-(-length // PAGE))
    score = normal(1, blocks.shape[1] * PAGE // 4, seed=length)
    rows = expected_rows(score[0].tolist(), length, blocks[0].tolist(), PAGE)
    assert chosen(*select(score, [length], blocks)) == [rows]
    assert len(rows) == 2048 + length % 4


@pytest.mark.parametrize(
    ("length", "attended"),
    [(1, 1), (3, 3), (4, 4), (5, 5), (2047, 2047), (2048, 2048), (2049, 2049), (2051, 2051), (2052, 2048), (2055, 2051), (2056, 2048)],
)
def test_counts_are_those_of_the_table_of_the_model(length: int, attended: int) -> None:
    _, counts = select(normal(1, 528), [length], table(33))
    assert counts.tolist() == [attended]


def test_a_row_is_dense_up_to_2051_whatever_the_scores() -> None:
    blocks = torch.arange(33, dtype=torch.int32)[None]
    for length in (1, 2048, 2051):
        assert chosen(*select(normal(1, 528), [length], blocks)) == [set(range(length))]


def test_of_equal_scores_the_first_pools_win() -> None:
    """Known failure 32: a plateau of exact zeros, of either sign, behind 100 positive scores; all equal; one FP16 value."""
    length = 4 * 8320
    blocks = torch.arange(length // PAGE, dtype=torch.int32)[None]
    plateau = torch.zeros(8320)
    plateau[1::2] = -0.0
    high = torch.randperm(8320, generator=torch.Generator().manual_seed(2))[:100]
    plateau[high] = torch.arange(1.0, 101)
    close = torch.zeros(8320) - 1
    close[torch.randperm(4096, generator=torch.Generator().manual_seed(3))] = 1 + torch.arange(4096) * 2.0**-23
    score = torch.stack([plateau, torch.zeros(8320), torch.full((8320,), -3.5), close])
    sets = chosen(*select(score, [length] * 4, blocks))
    first = [j for j in range(8320) if plateau[j] == 0][:412]
    pools = [{*high.tolist(), *first}, set(range(512)), set(range(512)), set(close.topk(512).indices.tolist())]
    assert sets == [{4 * j + i for j in row for i in range(4)} for row in pools]


def test_selected_pools_ascend_and_the_tail_follows_them() -> None:
    """Known failure 27: the tail stands directly after the pools, not at a fixed column."""
    ids, counts = select(torch.tensor([[5.0, 1.0, 7.0, 9.0]]), [15], torch.tensor([[0]], dtype=torch.int32), page=16, top=2)
    assert ids[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14] and counts.tolist() == [11]
    ids, counts = select(torch.tensor([[5.0, 1.0, 7.0, 9.0]]), [7], torch.tensor([[0]], dtype=torch.int32), page=16, top=2)
    assert ids[0].tolist() == [*range(7), -1, -1, -1, -1] and counts.tolist() == [7]


def test_the_width_is_that_of_the_kernel_and_no_pool_is_cut() -> None:
    for kernel, width in (("flash_mla_sm90", 2176), ("triton", 2051), ("reference", 2051)):
        ids, counts = select(normal(1, 2048), [8191], table(128), kernel=kernel)
        assert ids.shape == (1, width) and counts.tolist() == [2051]


def test_columns_that_are_no_candidates_are_not_used() -> None:
    """Known failure 26: what a scoring kernel left behind a short row's pools."""
    blocks = table(4)
    for poison in (NAN, 1e30, torch.inf):
        score = normal(1, 64)
        score[:, 1:] = poison
        assert chosen(*select(score, [6], blocks, top=8)) == [{int(blocks[0, 0]) * PAGE + i for i in range(6)}]


def test_padding_selects_nothing_and_a_position_without_a_page_has_no_id() -> None:
    blocks = torch.tensor([[3, -1]], dtype=torch.int32)
    owner = torch.zeros(2, dtype=torch.int32)
    ids, counts = kpool.select(torch.zeros(2, 4), owner=owner, position=int32(-1, 9), block_table=blocks, page=8, top=4)
    assert counts.tolist() == [0, 10] and set(ids[0].tolist()) == {-1}
    assert ids[1].tolist() == [*range(24, 32), -1, -1, *[-1] * 9]


def test_rows_go_through_the_block_table_of_their_own_sequence() -> None:
    blocks = table(8, count=2)
    score = normal(4, 128)
    owner, position = int32(1, 0, 1, 0), int32(99, 50, 3, 480)
    ids, counts = kpool.select(score, owner=owner, position=position, block_table=blocks, page=PAGE, top=16)
    rows = [
        expected_rows(s, p + 1, blocks[o].tolist(), PAGE, 16)
        for s, o, p in zip(score.tolist(), owner.tolist(), position.tolist(), strict=True)
    ]
    assert chosen(ids, counts) == rows


def test_4096_positions_reach_4096_rows() -> None:
    """Known failure 28: block ids in one unit and pages in another fell into 864 slots."""
    position = torch.arange(4096, dtype=torch.int32)
    rows = page_rows(table(64), torch.zeros(4096, dtype=torch.int32), position, PAGE)
    assert len(set(rows.tolist())) == 4096 and 0 <= int(rows.min()) and int(rows.max()) < 4096


def test_pool_anchors() -> None:
    keys, gates = [[1, -1], [2, 0], [0, 3], [-1, 1]], [[0, 1], [1, 0], [0.5, -0.5], [0, 0]]
    ape = [[0.1, 0], [0, 0.2], [-0.1, 0], [0, -0.2]]
    key = kpool.pool_keys(*(torch.tensor(x, dtype=torch.float64) for x in (keys, gates)), ape=torch.tensor(ape, dtype=torch.float64))
    assert torch.round(key, decimals=8).tolist() == [0.87751245, -0.01490399]


def scored(tokens: int = 6, heads: int = 3, dim: int = 8) -> dict:
    blocks = table(4, count=2)
    return dict(
        index_q=normal(tokens, heads, dim, seed=1), head_weight=normal(tokens, heads, seed=2), pool_keys=normal(8, 4, dim, seed=3),
        owner=int32(0, 1, 1, 0, 0, 1)[:tokens], position=int32(0, 63, 17, 3, 31, -1)[:tokens], block_table=blocks,
    )  # fmt: skip


def test_scores_are_relu_by_head_and_signed_weights() -> None:
    given = scored()
    got = kpool.scores(**given)
    for t, (n, p) in enumerate(zip(given["owner"].tolist(), given["position"].tolist(), strict=True)):
        for j in range(16):
            if 4 * j + 3 > p:
                assert got[t, j] == -torch.inf
                continue
            key = given["pool_keys"][int(given["block_table"][n, j // 4]), j % 4]
            dots = (given["index_q"][t] @ key / 8**0.5).clamp(min=0)
            torch.testing.assert_close(got[t, j], (dots * given["head_weight"][t]).sum())


def test_a_head_below_zero_says_nothing() -> None:
    """Known failure 29: heads +3 and -5; the weights keep their signs."""
    given = scored(1, 2, 1) | {"position": int32(3), "pool_keys": torch.ones(8, 4, 1).double()}
    given["index_q"] = torch.tensor([[[3.0], [-5.0]]]).double()
    for weights, score in (([1.0, 1.0], 3.0), ([-2.0, 1.0], -6.0)):
        assert kpool.scores(**{**given, "head_weight": torch.tensor([weights]).double()})[0, 0] == score


def test_pools_that_a_row_does_not_see_are_not_read() -> None:
    """By its last token, not its first: trap 25."""
    given = scored()
    expected = kpool.scores(**given)
    by_token = {name: given[name] for name in ("index_q", "head_weight", "owner", "position")}
    for t, (n, p) in enumerate(zip(given["owner"].tolist(), given["position"].tolist(), strict=True)):
        keys = torch.full_like(given["pool_keys"], NAN)
        for j in range((p + 1) // 4):
            page = int(given["block_table"][n, j // 4])
            keys[page, j % 4] = given["pool_keys"][page, j % 4]
        alone = {name: x[t : t + 1] for name, x in by_token.items()}
        got = kpool.scores(**alone, pool_keys=keys, block_table=given["block_table"])
        torch.testing.assert_close(got, expected[t : t + 1])
