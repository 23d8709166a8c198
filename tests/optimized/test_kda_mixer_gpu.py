"""The fused mixer on a GPU: real shapes against the reference, graphs, streams, repeats."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import gemm_tiles, kda_mixer
from optimized.gemm_tiles import GemmTile, MixerPlan
from optimized.kda_fused import fuse
from parity import limits
from parity.buffers import same_bits
from reference import kda_mixer as reference
from reference.batch import Batch
from reference.kda_weights import KdaWeights

pytestmark = pytest.mark.gpu

HIDDEN = 4096
TILE = GemmTile(64, 16, 128, 2, 4, 3)
PLANS = {
    "library": MixerPlan(),
    "overlap": MixerPlan(overlap=True),
    "apart": MixerPlan(False, TILE, TILE, TILE, TILE, overlap=True),
    "merged": MixerPlan(True, TILE, None, TILE, TILE),
}


def case(tokens: int, heads: int, slots: int | None = None) -> dict[str, Any]:
    """Arguments of `run`, but the plan."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    width = heads * 128
    weights = KdaWeights(
        q_proj=linear(width, HIDDEN), k_proj=linear(width, HIDDEN), v_proj=linear(width, HIDDEN), b_proj=linear(heads, HIDDEN),
        f_a_proj=linear(128, HIDDEN), f_b_proj=linear(width, 128), g_a_proj=linear(128, HIDDEN), g_b_proj=linear(width, 128),
        q_conv1d=normal(width, 1, 4, scale=0.5), k_conv1d=normal(width, 1, 4, scale=0.5), v_conv1d=normal(width, 1, 4, scale=0.5),
        A_log=normal(heads, scale=0.3, dtype=torch.float32), dt_bias=normal(width, dtype=torch.float32), o_norm=normal(128),
        o_proj=linear(HIDDEN, width),
    )  # fmt: skip
    count = slots or tokens
    return dict(
        hidden=normal(tokens, HIDDEN), weights=fuse(weights), state=normal(count, heads, 128, 128, dtype=torch.float32),
        window=normal(count, 3, 3 * width), batch=Batch(torch.arange(count, device="cuda").flip(0)[:tokens].int()),
        lower_bound=-5.0, norm_eps=1e-5,
    )  # fmt: skip


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "state": given["state"].clone(), "window": given["window"].clone()}


@pytest.mark.parametrize("heads", [64, 32, 16, 8])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64])
def test_every_plan_lies_near_the_reference_and_repeats_to_the_bit(tokens: int, heads: int) -> None:
    given = case(tokens, heads)
    gold = copied(given)
    expected = reference.mixer(**{**gold, "weights": given["weights"].separate()}).float()
    chosen = gemm_tiles.plan("sm90", torch.bfloat16, tokens, given["weights"].wide.numel())
    for name, plan in {**PLANS, "table": chosen}.items():
        first, second = copied(given), copied(given)
        out = kda_mixer.run(plan, **first)
        assert (out.float() - expected).norm() < limits.OTHER_CONFIGURATION * expected.norm(), name
        assert (first["state"] - gold["state"]).norm() < limits.OTHER_CONFIGURATION * gold["state"].norm(), name
        assert same_bits(kda_mixer.run(plan, **second), out) and same_bits(first["state"], second["state"]), name
        assert not given["weights"].arrivals.any(), name


@pytest.mark.parametrize("name", ["library", "apart"])
def test_the_second_stream_changes_no_bit(name: str) -> None:
    given = case(16, 16)
    outs = [kda_mixer.run(replace(PLANS[name], overlap=overlap), **copied(given)) for overlap in (False, True)]
    assert same_bits(*outs)


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("plan", [*PLANS.values(), None], ids=[*PLANS, "table"])
def test_a_captured_graph_follows_its_inputs(plan: MixerPlan | None, tokens: int) -> None:
    """Three layers in one graph, each starting from the last one's output; slots and hidden change between replays.

    To the bit with our kernels; the library may take others under capture.
    """
    layers = [case(tokens, 16, slots=tokens + 3) for _ in range(3)]

    def forward(layers: list[dict[str, Any]], hidden: Tensor) -> Tensor:
        for given in layers:
            chosen = plan or gemm_tiles.plan("sm90", torch.bfloat16, tokens, given["weights"].wide.numel())
            hidden = kda_mixer.run(chosen, **{**given, "hidden": hidden})
        return hidden

    slots, hidden = layers[0]["batch"].slots, layers[0]["hidden"]
    for given in layers:
        given["batch"] = Batch(slots)
    slots.fill_(-1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward(layers, hidden)  # compiles; padding leaves the pools alone
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(layers, hidden)
    eager = [copied(given) for given in layers]
    for shift in (0, 3):
        slots.copy_(torch.arange(shift, shift + tokens, device="cuda"))
        hidden.copy_(torch.randn(tokens, HIDDEN, device="cuda"))
        graph.replay()
        expected = forward(eager, hidden)
        assert (out - expected).norm() < limits.OTHER_CONFIGURATION * expected.norm()
        if plan is not None and plan.wide is not None:
            assert same_bits(out, expected)
            assert all(same_bits(a[pool], b[pool]) for a, b in zip(layers, eager, strict=True) for pool in ("state", "window"))
