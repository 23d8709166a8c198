"""The sparse MLA kernels on a device at real shapes: within the gate, the same bits again, from a CUDA graph and in any batch."""

import importlib.util

import pytest
import torch

from parity.buffers import same_bits
from reference import fp8, mla
from reference import kpool as reference
from reference.mla_cache import MlaCache, Sequences, locate
from tests.optimized.attention import Core, away

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kpool, mla_attend, mla_store

pytestmark = pytest.mark.gpu

ROWS, CHANNELS, DEVICE = 16384, 512, "cuda"


def inputs(tokens: int, heads: int, width: int, form: str) -> Core:
    """Distinct rows for each query among -1, ids past the cache and counts of every kind."""
    generator = torch.Generator(DEVICE).manual_seed(tokens + heads)
    latent = torch.randn(ROWS, 1, CHANNELS, generator=generator, device=DEVICE)
    ids = torch.rand(tokens, ROWS, generator=generator, device=DEVICE).topk(width, dim=1).indices.int()
    ids[:, 100:140], ids[:, 7], ids[:, 2051:] = -1, 2147480000, -1
    counts = torch.full((tokens,), 2051, dtype=torch.int32, device=DEVICE)
    counts[1:3] = torch.tensor([5, 0], dtype=torch.int32)[: max(tokens - 1, 0)]
    rows = latent.bfloat16() if form == "plain" else fp8.quantize_rows(latent, reserved=form == "reserved")
    q = torch.randn(tokens, heads, CHANNELS, generator=generator, device=DEVICE).bfloat16()
    return dict(q=q, latent=rows, ids=ids, counts=counts, scale=1 / 16)


@pytest.mark.parametrize("form", ["plain", "scaled", "reserved"])
@pytest.mark.parametrize("heads", [8, 16, 24, 64, 128])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_real_shapes_are_within_the_gate(tokens: int, heads: int, form: str) -> None:
    assert away(mla_attend.attend, inputs(tokens, heads, 2176, form), mla_attend.CONTRACT) <= 1


@pytest.mark.parametrize("form", ["plain", "scaled"])
@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_again_and_from_a_graph_the_bits_are_the_same(tokens: int, form: str) -> None:
    given = inputs(tokens, 64, 2051, form)
    eager = mla_attend.attend(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mla_attend.attend(**given)
    for _ in range(3):
        graph.replay()
        assert all(same_bits(x, y) for x, y in zip(captured, eager, strict=True))


def test_selection_at_128k_is_the_references() -> None:
    page, length = 64, 131072
    generator = torch.Generator(DEVICE).manual_seed(0)
    blocks = torch.randperm(2 * length // page, generator=generator, device=DEVICE).int().view(2, -1)
    keys = torch.randn(2 * length // page, page // 4, 128, generator=generator, device=DEVICE).bfloat16()
    position = torch.tensor([length - 1, 70001, 2050, 3], dtype=torch.int32, device=DEVICE)
    owner = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    q = torch.randn(4, 32, 128, generator=generator, device=DEVICE).bfloat16()
    weight = torch.randn(4, 32, generator=generator, device=DEVICE)
    where = dict(owner=owner, position=position, block_table=blocks)
    score = kpool.scores(q, weight, pool_keys=keys, **where)
    expected = reference.scores(q, weight, pool_keys=keys, **where)
    seen = expected > -torch.inf
    torch.testing.assert_close(score[seen], expected[seen])
    for some in (score, torch.where(score > 5, score, 0.0), torch.zeros_like(score)):
        wide = torch.where(seen, some, 0.0)
        assert all(
            torch.equal(x, y)
            for x, y in zip(kpool.select(some, **where, page=page), reference.select(wide, **where, page=page), strict=True)
        )


@pytest.mark.parametrize("policy", ["fp32", "pow2"])
@pytest.mark.parametrize("reserved", [False, True])
def test_stored_bytes_and_cached_keys_are_the_references(reserved: bool, policy: fp8.Policy) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    blocks = torch.randperm(64, generator=generator, device=DEVICE).int().view(2, 32)
    slots, starts, ends = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([1, 0], [1002, 7], [0, 33, 70]))
    rows = Sequences(slots, starts, ends, blocks)
    raw, ape = torch.randn(70, 256, generator=generator, device=DEVICE).bfloat16(), torch.randn(4, 128, generator=generator, device=DEVICE)
    latent = torch.randn(70, CHANNELS, generator=generator, device=DEVICE).bfloat16()
    owner, position = locate(rows, 70, 2)
    made = []
    for index, store in ((kpool, mla_store), (reference, mla)):
        codes = torch.full((64, 64, fp8.row_bytes(CHANNELS, reserved)), 0xFF, dtype=torch.uint8, device=DEVICE)
        keys, ring = (torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((64, 16, 128), (2, 8, 256)))
        index.cache(raw[:, :128], raw[:, 128:], ape=ape, pool_keys=keys, ring=ring, sequences=rows)
        store.store(latent, cache=MlaCache(codes, keys, ring), owner=owner, position=position, block_table=blocks, policy=policy)
        made.append((codes, ring, keys))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    torch.testing.assert_close(made[0][2], made[1][2])
