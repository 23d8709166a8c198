"""The decode kernel on a GPU: real shapes, proof by launch hook, graphs, offsets, memory."""

import pytest
import torch

import parity
from optimized import kda_decode, registry, tiles
from optimized.arch import of_device
from parity import trajectory
from parity.buffers import same_bits
from parity.case import Case
from parity.problem import Problem
from reference import validate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["glm-5.3-flash", "kimi-linear-48b"])
@pytest.mark.parametrize("regime", ["random", "slow", "sharp", "spiky", "adversarial"])
def test_every_regime_passes_at_real_heads(regime: str, model: str, state: str) -> None:
    parity.assert_parity(f"kda.decode:model={model},heads=32,batch=5,regime={regime},state-dtype={state},steps=8", "triton")


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96])
def test_every_head_count_passes(heads: int) -> None:
    parity.assert_parity(f"kda.decode:heads={heads},batch=3,steps=4", "triton")


def test_a_passing_row_proves_its_kernel_its_graph_and_its_memory() -> None:
    row = parity.check("kda.decode:heads=64,batch=64,steps=2,state-dtype=bf16", "triton")
    assert row["verdict"] == "PASS" and row["arch"] == of_device("cuda")
    assert row["path"] == {"kernels": [{"name": "kda_decode_kernel", "launches": 1}], "proved": True, "oracle_dtype": "float64"}
    assert row["invariants"]["graph_replay"] and row["invariants"]["poisoned_allocations"]


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", ["triton", "fla", "torch"])
def test_the_gate_needs_less_than_six_pools(impl: str, state: str) -> None:
    row = parity.check(f"kda.decode:heads=64,batch=256,steps=2,state-dtype={state}", impl)
    assert row["verdict"] == "PASS", row["reason"]
    pools = row["memory"]["peak_bytes"] / row["memory"]["pools_bytes"]
    assert pools < 6


def test_slots_past_32_bits_are_addressed() -> None:
    case = Case(Problem("kda.decode", heads=64, batch=3, state_dtype="bf16", device="cuda"))
    small = case.pools()
    x = case.inputs(1).tensors
    expected = trajectory.run(registry.find("kda.decode", "triton").load(), case, small, x)
    state = torch.empty(2050, 64, 128, 128, dtype=torch.bfloat16, device="cuda")  # slot 2048 starts at element 2^31
    window = torch.empty(2050, 3, case.channels, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([2047, 2048, 2049], dtype=torch.int32, device="cuda")
    fresh = case.pools()
    state[slots.long()], window[slots.long()] = fresh.state[fresh.index], fresh.window[fresh.index]
    fresh.state, fresh.window, fresh.slots = state, window, slots
    out = trajectory.run(kda_decode.decode, case, fresh, x)
    assert same_bits(out, expected) and same_bits(state[slots.long()], small.state[small.index])


def test_every_tile_of_the_table_gives_the_same_state_within_the_gate() -> None:
    case = Case(Problem("kda.decode", heads=8, batch=4, device="cuda"))
    for rule in tiles.TILES:
        if of_device("cuda") not in rule.archs or rule.state_dtype != torch.float32:
            continue

        def launched(q: torch.Tensor, k: torch.Tensor, tile: tiles.Tile = rule.tile, **given: object) -> torch.Tensor:
            given.setdefault("fresh", None)
            return kda_decode.launch(tile, validate.kda_decode(q, k, **given), q, k, **given)  # type: ignore[arg-type]

        parity.assert_parity(str(case.problem), launched)
