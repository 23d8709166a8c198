"""The verify kernel on a GPU: real shapes, every pool dtype, offsets, graphs."""

import pytest
import torch
from torch import Tensor

from optimized import kda_verify
from parity import limits, metrics
from parity.buffers import same_bits
from reference import kda_verify as reference
from reference.kda_offsets import VerifyOffsets
from reference.kda_replay import Replay

pytestmark = pytest.mark.gpu

CACHES = ("qkv", "f", "beta")


def case(sequences: int, heads: int, drafts: int, state_dtype: torch.dtype, slots: int, key_dim: int = 128, value_dim: int = 128) -> dict:
    """Arguments of `verify` for the last slots of a pool, without counts; BF16 activations in one wide projection."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    qk, hv = heads * key_dim, heads * value_dim
    widths = dict(q=qk, k=qk, v=hv, f=qk, beta=heads, gate=hv)
    wide = normal(sequences * (1 + drafts), sum(widths.values()))
    state = torch.empty(slots, heads, value_dim, key_dim, dtype=state_dtype, device="cuda")
    window = torch.empty(slots, 3, 2 * qk + hv, dtype=torch.bfloat16, device="cuda")
    replay = Replay.empty(state, window, drafts)
    used = torch.arange(slots - sequences, slots, device="cuda")
    for pool in (state, window, replay.qkv, replay.f, replay.beta):
        pool[used] = normal(sequences, *pool.shape[1:], scale=0.5, dtype=pool.dtype)
    return dict(zip(widths, wide.split(list(widths.values()), dim=1), strict=True)) | dict(
        conv_weight=normal(2 * qk + hv, 4, scale=0.5), a_log=normal(heads, scale=0.3, dtype=torch.float32),
        dt_bias=normal(qk, dtype=torch.float32), norm_weight=normal(value_dim), state=state, window=window, replay=replay,
        slots=used.flip(0).int(), lower_bound=-5.0,
    )  # fmt: skip


def used_rows(given: dict, dtype: torch.dtype) -> dict:
    """The same call over pools that hold the used slots only, in another dtype."""
    index = given["slots"].long()
    new = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and name not in ("state", "window") else x
        for name, x in given.items()
    }
    new |= {name: given[name][index].to(dtype) for name in ("state", "window")}
    return new | dict(
        replay=Replay(*(getattr(given["replay"], name)[index].to(dtype) for name in CACHES)),
        slots=torch.arange(len(index), dtype=torch.int32, device="cuda"),
    )  # fmt: skip


def away(given: dict, counts: Tensor) -> float:
    """As `away` of `test_kda_verify`, of the used rows."""
    given, heads, index = given | {"accepted": counts}, given["beta"].shape[1], given["slots"].long()
    golds = [used_rows(given, dtype) for dtype in (torch.float64, torch.float32)]
    expected = [reference.verify(**x) for x in golds]
    out = kda_verify.verify(**given)
    assert torch.equal(given["window"][index].double(), golds[0]["window"])
    worst = 0.0
    for candidate, (gold, single) in (
        (out.unflatten(1, (heads, -1)), [y.unflatten(1, (heads, -1)) for y in expected]),
        (given["state"][index], [x["state"] for x in golds]),
    ):
        m = metrics.moments(candidate, gold, gold, single, candidate.dtype)
        worst = max(worst, metrics.noise_ratio(m).over(limits.boundary(candidate.dtype)))
    return worst


def cycled(sequences: int, drafts: int) -> Tensor:
    return (torch.arange(sequences, device="cuda") % (1 + drafts) + 1).int()


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "drafts"), [(64, 3), (16, 1), (8, 7), (12, 2)])
def test_three_rounds_are_within_the_gate(heads: int, drafts: int, state: torch.dtype) -> None:
    given = case(9, heads, drafts, state, 12)
    for step in range(3):
        assert away(given, cycled(9, drafts).roll(step)) <= 1


@pytest.mark.parametrize(("key_dim", "value_dim"), [(60, 100), (100, 40), (64, 128), (128, 64)])
def test_other_widths_are_within_the_gate(key_dim: int, value_dim: int) -> None:
    assert away(case(4, 4, 3, torch.float32, 6, key_dim, value_dim), cycled(4, 3)) <= 1


def test_slots_past_32_bits_are_addressed() -> None:
    """64 heads in BF16: slot 2048 starts at element 2^31."""
    assert away(case(3, 64, 2, torch.bfloat16, 2050), cycled(3, 2)) <= 1


def test_a_captured_graph_follows_slots_counts_and_inputs() -> None:
    """20: warmed up and captured with other slots and counts; offsets are captured with it."""
    given, counts = case(4, 8, 3, torch.float32, 9), torch.ones(9, dtype=torch.int32, device="cuda")
    slots, producer = given.pop("slots").clone(), VerifyOffsets(counts, [given["replay"]])

    def forward(call: dict) -> Tensor:
        producer.reset(slots, contexts=0, rows=16)
        return kda_verify.verify(**call, slots=slots, accepted=producer.accepted(), offsets=producer.get())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(given)
    for named, accepted in (([3, 4, 0, 7], [2, 3, 1, 4]), ([8, -1, 3, 4], [4, 0, 1, 2])):
        slots.copy_(torch.tensor(named, dtype=torch.int32))
        counts[slots.clamp(min=0).long()] = torch.tensor(accepted, dtype=torch.int32, device="cuda")
        given["q"].copy_(torch.randn_like(given["q"]))
        for pool in (given["state"], given["window"], *(getattr(given["replay"], name) for name in CACHES)):
            pool.copy_(torch.randn(pool.shape, device="cuda"))
        eager = given | {name: given[name].clone() for name in ("state", "window")}
        eager["replay"] = Replay(*(getattr(given["replay"], name).clone() for name in CACHES))
        expected = forward(eager)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, expected)
        assert all(same_bits(given[name], eager[name]) for name in ("state", "window"))


def test_repeated_launches_give_the_same_bits() -> None:
    given, counts = case(33, 16, 3, torch.float32, 40), cycled(33, 3)
    runs = []
    for _ in range(20):
        call = given | {name: given[name].clone() for name in ("state", "window")} | {"accepted": counts}
        call["replay"] = Replay(*(getattr(given["replay"], name).clone() for name in CACHES))
        runs.append([kda_verify.verify(**call), call["state"][7:], call["window"][7:]])
    assert all(same_bits(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))
