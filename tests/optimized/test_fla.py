"""FLA's chain as `kda.decode`: the reference's numbers under the declared roundings, and its rules for pools and padding."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter, registry
from reference import kda

if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs fla-core and triton", allow_module_level=True)

from optimized.peers import fla
from tests.optimized.test_kda_decode import away

CONTRACT = registry.find("kda.decode", "fla").contract
NAN = float("nan")
GAP = 7.0

interpreted = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")
compiled = pytest.mark.skipif(not torch.cuda.is_available() or interpreter.active(), reason="needs a CUDA device")
device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=[pytest.mark.gpu, compiled])]
)


def make_case(
    device: str,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    *,
    sequences: int = 4,
    slots: int = 6,
    heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 24,
    gap: int = 0,
) -> dict[str, Tensor]:
    """Arguments of `decode` but slots, fresh and the bound; activations are views of one projection, the window tap-innermost."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    qk, hv, row = heads * key_dim, heads * value_dim, heads * value_dim * key_dim
    sections = dict(q=qk, k=qk, v=hv, f=qk, beta=heads, gate=hv)
    wide = normal(sequences, sum(sections.values()), dtype=dtype)
    pool = torch.full((slots, row + gap), GAP, dtype=state_dtype, device=device)
    state = pool.as_strided((slots, heads, value_dim, key_dim), (row + gap, value_dim * key_dim, key_dim, 1))
    state.copy_(normal(*state.shape, scale=0.3))
    return dict(
        zip(sections, wide.split(list(sections.values()), dim=1), strict=True),
        conv_weight=normal(2 * qk + hv, 4, dtype=dtype, scale=0.5),
        a_log=normal(heads, scale=0.3),
        dt_bias=normal(qk, scale=0.3),
        norm_weight=normal(value_dim, dtype=dtype),
        state=state,
        window=normal(slots, 2 * qk + hv, 3, dtype=dtype).transpose(1, 2),
    )


def with_pools(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs over pools of its own, without gaps."""
    return {**case, "state": case["state"].clone(), "window": case["window"].clone()}


def int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_the_signature_is_the_references_without_at() -> None:
    expected = [x for x in inspect.signature(kda.decode).parameters.values() if x.name != "at"]
    assert list(inspect.signature(fla.decode).parameters.values()) == expected


def test_a_cpu_tensor_is_refused_outside_the_interpreter() -> None:
    code = (
        "import tests.optimized.test_fla as t; case = t.make_case('cpu'); before = case['state'].clone()\n"
        "try: t.fla.decode(**case, slots=t.int32([0, 1, 2, 3], 'cpu'), lower_bound=None)\n"
        "except ValueError as error: print(str(error).startswith('q: '), t.torch.equal(before, case['state']))"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    child = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert child.stdout.split() == ["True", "True"], child.stderr


@device
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_output_and_pools_follow_the_reference(
    device: str, dtype: torch.dtype, state_dtype: torch.dtype, lower_bound: float | None
) -> None:
    case = make_case(device, dtype, state_dtype)
    for _ in range(3):
        assert away(fla.decode, {**case, "slots": int32([5, 0, 3, 1], device), "lower_bound": lower_bound}, CONTRACT) <= 1


@device
def test_padding_reads_nothing_writes_nothing_and_returns_zeros(device: str) -> None:
    case = make_case(device, torch.bfloat16, sequences=5)
    for pool in (case["state"], case["window"]):
        pool[[1, 3, 4, 5]] = NAN
    for name in ("q", "f", "gate"):
        case[name][[0, 2, 4]] = NAN

    def padded(**given: Any) -> Tensor:
        out = fla.decode(**given)
        assert (out[[0, 2, 4]] == 0).all()
        return out

    assert away(padded, {**case, "slots": int32([-1, 2, 6, 0, -(2**31)], device), "lower_bound": -5.0}, CONTRACT) <= 1
    assert case["window"][[1, 3, 4, 5]].isnan().all()
    assert case["state"][[1, 3, 4, 5]].isnan().all()


@device
@pytest.mark.parametrize("slots", [[-1, -1, -1, -1], [6, 7, 8, 9]])
def test_a_batch_of_padding_leaves_the_pools_bitwise_as_they_were(device: str, slots: list[int]) -> None:
    case = make_case(device)
    before = with_pools(case)
    out = fla.decode(**case, slots=int32(slots, device), fresh=torch.ones(4, dtype=torch.bool, device=device), lower_bound=None)
    assert (out == 0).all()
    assert torch.equal(case["state"], before["state"]) and torch.equal(case["window"], before["window"])


@device
def test_a_fresh_sequence_starts_from_zero_whatever_its_slot_holds(device: str) -> None:
    case = make_case(device, torch.bfloat16)
    case["state"][4], case["window"][4] = NAN, NAN
    new = {"slots": int32([4, 1, -1, 0], device), "fresh": torch.tensor([True, False, True, False], device=device)}
    assert away(fla.decode, {**case, **new, "lower_bound": -5.0}, CONTRACT) <= 1


@device
def test_gaps_between_rows_and_slots_not_named_stay_bitwise(device: str) -> None:
    case = make_case(device, gap=5)
    before = with_pools(case)
    new = {"slots": int32([5, 0, -1, 2], device), "fresh": torch.tensor([True, False, False, False], device=device)}
    assert away(fla.decode, {**case, **new, "lower_bound": -5.0}, CONTRACT) <= 1
    row = case["state"][0].numel()
    gaps = case["state"].as_strided((5, 5), (row + 5, 1), row)
    assert (gaps == GAP).all()
    assert torch.equal(case["state"][[1, 3, 4]], before["state"][[1, 3, 4]])


@device
@pytest.mark.parametrize(("sequences", "slot_count", "slots"), [(0, 3, []), (2, 0, [0, -1]), (2, 1, [-1, 0])])
def test_an_empty_batch_an_empty_pool_and_a_single_slot_are_legal(device: str, sequences: int, slot_count: int, slots: list[int]) -> None:
    case = make_case(device, sequences=sequences, slots=slot_count)
    if slot_count == 1:
        case["state"] = case["state"].as_strided(case["state"].shape, (0, *case["state"].stride()[1:]))
    before = with_pools(case)
    assert away(fla.decode, {**case, "slots": int32(slots, device), "lower_bound": None}, CONTRACT) <= 1
    assert torch.equal(case["state"], before["state"]) is (slot_count != 1)


@interpreted
def test_flas_own_kernels_ran() -> None:
    with interpreter.launches() as seen:
        fla.decode(**make_case("cpu"), slots=int32([0, 1, 2, 3], "cpu"), lower_bound=-5.0)
    kernels = ("causal_conv1d_update_kernel", "fused_recurrent_kda_fwd_kernel", "layer_norm_gated_fwd_kernel")
    assert [seen[kernel] for kernel in kernels] == [3, 1, 1]


@pytest.mark.gpu
@compiled
def test_a_captured_graph_follows_the_slots_it_is_given() -> None:
    case = make_case("cuda", torch.bfloat16, heads=4, key_dim=128, value_dim=128)
    slots = int32([-1, -1, -1, -1], "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fla.decode(**case, slots=slots, lower_bound=-5.0)  # tunes; padding leaves the pools alone
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fla.decode(**case, slots=slots, lower_bound=-5.0)

    def replayed(**given: Any) -> Tensor:
        graph.replay()
        return out

    for named in ([3, 0, 5, 1], [1, -1, 0, 6]):
        slots.copy_(int32(named, "cuda"))
        assert away(replayed, {**case, "slots": slots, "lower_bound": -5.0}, CONTRACT) <= 1
