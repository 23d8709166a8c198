"""The prefill kernels on a GPU: real shapes, every tile, graphs, repeats, offsets, memory that nobody has written."""

import pytest
import torch
from torch import Tensor

from optimized import kda_prefill, prefill_tiles
from optimized.arch import of_device
from parity.buffers import same_bits
from reference import kda, kda_chunk, validate
from reference.points import rounding
from tests.optimized.prompts import POOLS, Prompt, copied, int32, prompt, relative

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def on_gpu(lengths: list[int], slots: list[int] | None = None, **changed: object) -> Prompt:
    given = prompt(lengths, slots, **{"key_dim": 128, "value_dim": 128, **changed})  # type: ignore[arg-type]
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


def distances(given: Prompt, out: Tensor) -> tuple[float, float]:
    """Of the output to the recurrence and to the chunk form under the contract, both in FP64; the pools must be as they were."""
    exact, contract = copied(given, torch.float64), copied(given, torch.float64)
    return relative(out, kda.prefill(**exact)), relative(
        out, kda_chunk.prefill(**contract, at=rounding(kda_prefill.CONTRACT.resolve(given["q"].dtype)))
    )


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (128, 64), (100, 60)])
def test_the_contract_explains_the_distance_to_the_recurrence(
    key_dim: int, value_dim: int, dtype: torch.dtype, lower_bound: float | None
) -> None:
    given = on_gpu([130, 0, 1, 64], pool=6, heads=3, key_dim=key_dim, value_dim=value_dim, dtype=dtype, lower_bound=lower_bound)
    exact, contract = distances(given, kda_prefill.prefill(**copied(given)))
    assert exact < 16 * torch.finfo(dtype).eps + 1e-5
    if dtype != FP32:  # whose contract rounds nothing
        assert contract <= exact


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count(heads: int) -> None:
    given = on_gpu([70, 3], heads=heads)
    assert distances(given, kda_prefill.prefill(**copied(given)))[0] < 2e-2


def test_every_tile_of_the_table_and_its_repeats_give_the_same_bits() -> None:
    given, results = on_gpu([300, 17], heads=4) | {"fresh": None}, []
    for rule in prefill_tiles.PREFILL_TILES:
        if of_device("cuda") not in rule.archs:
            continue
        for _ in range(5):
            copy = copied(given)
            out = kda_prefill.launch(rule.tile, validate.kda_prefill(**copy), **copy)
            results.append([out, *(copy[name] for name in POOLS)])
    for result in results:
        assert relative(result[0], results[0][0]) < 2e-2
    assert all(same_bits(x, y) for x, y in zip(results[0], results[4], strict=True))


def test_a_captured_graph_follows_its_slots_and_lengths() -> None:
    given = on_gpu([40, 25], heads=4, pool=6)
    copy = copied(given)
    kda_prefill.prefill(**copied(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kda_prefill.prefill(**copy)
    for slots, ends in ((int32(3, 0), int32(0, 65, 65)), (int32(-1, 5), int32(0, 17, 65))):
        copy["slots"].copy_(slots), copy["cu_seqlens"].copy_(ends)
        for name in POOLS:
            copy[name].copy_(given[name])
        expected = copied(copy)
        graph.replay()
        assert same_bits(out, kda_prefill.prefill(**expected))
        assert all(same_bits(copy[name], expected[name]) for name in POOLS)


def test_slots_past_32_bits_are_addressed() -> None:
    given = on_gpu([20, 3, 1], [2047, 2048, 2049], pool=2050, heads=64, state_dtype=BF16) if torch.cuda.mem_get_info()[0] > 2**35 else None
    if given is None:
        pytest.skip("needs 32 GB of free memory")
    small = {**given, "slots": int32(0, 1, 2).cuda(), **{name: given[name][2047:].clone() for name in POOLS}}
    out, expected = kda_prefill.prefill(**given), kda_prefill.prefill(**small)
    assert same_bits(out, expected) and all(same_bits(given[name][2047:], small[name]) for name in POOLS)


def test_memory_that_nobody_has_written_is_not_read() -> None:
    given, results = on_gpu([70, 1], heads=4), []
    for byte in (0xFF, 0x00):
        blocks = [torch.full((2**22,), byte, dtype=torch.uint8, device="cuda") for _ in range(16)]
        del blocks
        results.append(kda_prefill.prefill(**copied(given)))
    assert same_bits(*results) and bool(results[0].isfinite().all())


def test_a_long_prompt_is_as_near_as_a_short_one() -> None:
    given = on_gpu([4096], heads=2)
    assert distances(given, kda_prefill.prefill(**copied(given)))[0] < 2e-2
