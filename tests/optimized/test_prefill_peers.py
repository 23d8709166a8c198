"""Peers of `kda.prefill`: their form on the CPU, their numbers on a GPU."""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import contracts, interpreter, registry
from optimized.peers import flash_kda
from parity import gate, limits, metrics
from parity.buffers import same_bits
from parity.case import Case
from parity.oracle import Oracle
from parity.problem import Problem
from reference import kda
from reference.points import Contract, rounding

if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs fla-core and triton", allow_module_level=True)

from optimized.peers import fla_prefill
from tests.optimized.prompts import POOLS, away, copied, prompt, relative

PEERS = pytest.mark.parametrize("peer", [fla_prefill.prefill, flash_kda.prefill], ids=["fla", "flash_kda"])
interpreted = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")
HAS_FLASH = importlib.util.find_spec("flash_kda") is not None


@PEERS
def test_the_signature_is_the_references_without_its_points(peer: Callable[..., Tensor]) -> None:
    expected = inspect.signature(inspect.unwrap(kda.prefill)).parameters
    assert inspect.signature(peer).parameters == {name: p for name, p in expected.items() if name != "at"}


def test_fla_refuses_cpu_tensors_outside_the_interpreter_before_any_pool_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt([3, 2])
    before = copied(given)
    monkeypatch.setattr(interpreter, "active", lambda: False)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got one on cpu"):
        fla_prefill.prefill(**given)
    assert all(same_bits(given[name], before[name]) for name in POOLS)


@pytest.mark.skipif(HAS_FLASH, reason="flash_kda is installed")
def test_flash_kda_says_what_to_install_before_any_pool_changes() -> None:
    given = prompt([3, 2], key_dim=128, value_dim=128)
    before = copied(given)
    with pytest.raises(ImportError, match="flash_kda: pip install tokenspeed-flashkda"):
        flash_kda.prefill(**given)
    assert all(same_bits(given[name], before[name]) for name in POOLS)
    runs, reason = flash_kda.supports(torch.bfloat16, 128, 128, -5.0)
    assert not runs and reason == "flash_kda not installed: pip install tokenspeed-flashkda fla-core"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ((torch.float16, 128, 128, -5.0), "takes bfloat16, not float16"),
        ((torch.bfloat16, 128, 64, -5.0), "takes K = V = 128, not 128 and 64"),
        ((torch.bfloat16, 128, 128, None), "bounded in [-5.0, 0), not softplus"),
        ((torch.bfloat16, 128, 128, -6.0), "bounded in [-5.0, 0), not -6.0"),
    ],
)
def test_flash_kda_refuses_what_its_kernels_cannot_do(
    monkeypatch: pytest.MonkeyPatch, problem: tuple[torch.dtype, int, int, float | None], reason: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    runs, why = flash_kda.supports(*problem)
    assert not runs and reason in why


@interpreted
@pytest.mark.parametrize(
    ("lengths", "dtype", "state_dtype", "lower_bound"),
    [
        ([70, 3], torch.bfloat16, torch.float32, -5.0),
        ([64, 0, 2], torch.float16, torch.bfloat16, None),
        ([17], torch.float32, torch.float32, -40.0),
        ([65, 1], torch.bfloat16, torch.bfloat16, None),
    ],
)
def test_flas_roundings_are_those_of_its_contract(
    lengths: list[int], dtype: torch.dtype, state_dtype: torch.dtype, lower_bound: float | None
) -> None:
    """Far below one limit: what is stored is rounded where the contract says, to the bit almost everywhere."""
    fresh = torch.tensor([len(lengths) > 1, *[False] * (len(lengths) - 1)])
    given = prompt(lengths, key_dim=32, dtype=dtype, state_dtype=state_dtype, lower_bound=lower_bound, fresh=fresh)
    assert away(fla_prefill.prefill, given, contracts.FLA_CHUNKS) <= 1 / 2


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "beta rounded": ("fused_beta_sigmoid", lambda own: lambda x: own(x).bfloat16().float()),
    "keys not normed": ("l2norm_fwd", lambda own: lambda x: (x, None)),
    "gate without its bound": ("chunk_kda_fwd", lambda own: lambda **x: own(**{**x, "lower_bound": None})),
    "a part of the carried state forgotten": (
        "chunk_kda_fwd",
        lambda own: lambda **x: own(**{**x, "initial_state": x["initial_state"] * 0.97}),
    ),
    "q scaled by K instead of its root": ("chunk_kda_fwd", lambda own: lambda **x: own(**{**x, "scale": x["scale"] ** 2})),
    "core rounded twice": ("rms_norm_gated", lambda own: lambda x, *rest, **more: own((x * 3).div(3), *rest, **more)),
}


@interpreted
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_flas_chain_is_beyond_the_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wrong = FAULTS[name]
    monkeypatch.setattr(fla_prefill, target, wrong(getattr(fla_prefill, target)))
    assert away(fla_prefill.prefill, prompt([40]), contracts.FLA_CHUNKS) > 2


@interpreted
def test_the_other_form_of_chunk_is_not_flas() -> None:
    """Its roundings at our places: beta in the inverse, q scaled before it rounds, 16 tokens at a time."""
    rounds = {point: dtype for point, dtype in contracts.FLA_CHUNKS.rounds.items() if point != "v_in"}
    ours = Contract(rounds=rounds, accumulate="mma_tf32")
    assert away(fla_prefill.prefill, prompt([40], key_dim=32), ours) > 2


@interpreted
def test_padding_of_fla_in_the_interpreter_changes_nothing() -> None:
    given = prompt([17, 3], [2, -1])
    before = copied(given)
    out = fla_prefill.prefill(**given)
    assert bool((out[17:] == 0).all())
    assert [slot for slot in range(4) if not same_bits(given["state"][slot], before["state"][slot])] == [2]


@interpreted
def test_the_gate_passes_fla_and_proves_its_kernels() -> None:
    row = gate.judge(Problem("kda.prefill", "tiny", heads=1, batch=1, tokens=3, steps=1), registry.find("kda.prefill", "fla"))
    assert (row["verdict"], row["reason"]) == ("PASS", "")
    assert {kernel["name"] for kernel in row["path"]["kernels"]} == set(registry.find("kda.prefill", "fla").kernels)


def test_on_tensor_cores_tf32_is_part_of_flas_noise() -> None:
    case = Case(Problem("kda.prefill", "tiny", batch=2, tokens=40))
    oracle, pools, tokens = Oracle(case, contracts.FLA_CHUNKS), case.pools(), case.inputs(1).tokens
    start = (tokens, pools.state[pools.index], pools.window[pools.index])
    gold = oracle.gold(*start)
    assert not oracle.tf32

    def within(noise: float) -> float:
        generator = torch.Generator().manual_seed(3)

        def at(name: str, x: Tensor) -> Tensor:
            if name in ("akk", "aqk", "inv"):
                x = x * (1 + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype))
            return rounding(oracle.roundings)(name, x)

        state = oracle.predict(*start, torch.float32, at).state
        m = metrics.moments(state, gold.state, gold.state, oracle.floor(*start, gold).state, torch.float32)
        return metrics.noise_ratio(m).over(limits.boundary(torch.float32))

    interpreted, loss = within(limits.TF32_NOISE), 64 * limits.TF32_NOISE
    oracle.tf32 = True
    on_a_device = within(limits.TF32_NOISE)
    assert on_a_device < 1 / 2 and interpreted > 4 * on_a_device and within(loss) > 1


def on_gpu(lengths: list[int], **changed: object) -> dict:
    given = prompt(lengths, heads=4, key_dim=128, value_dim=128, **changed)  # type: ignore[arg-type]
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.gpu
@PEERS
def test_a_peer_is_near_the_recurrence(peer: Callable[..., Tensor]) -> None:
    if peer is flash_kda.prefill and not HAS_FLASH:
        pytest.skip("needs flash_kda")
    given = on_gpu([130, 0, 1, 64], pool=6, fresh=torch.tensor([False, True, False, True]).cuda())
    exact = copied(given, torch.float64)
    expected, out = kda.prefill(**exact), peer(**given)
    live = given["slots"].long()
    assert relative(out, expected) < 2e-2 and relative(given["state"][live], exact["state"][live]) < 2e-2
    assert torch.equal(given["window"][live].double(), exact["window"][live])
    assert same_bits(given["state"][0], on_gpu([130, 0, 1, 64], pool=6)["state"][0])


@pytest.mark.gpu
def test_padding_of_a_peer_changes_nothing() -> None:
    given = on_gpu([17, 3])
    given["slots"][1] = -1
    before = copied(given)
    out = fla_prefill.prefill(**given)
    assert bool((out[17:] == 0).all())
    assert [slot for slot in range(4) if not same_bits(given["state"][slot], before["state"][slot])] == [3]
