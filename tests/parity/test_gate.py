"""The gate: which verdict, and what a row says about it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import registry
from optimized.implementation import Implementation
from optimized.peers import eager
from parity import gate, limits, trajectory
from parity.case import Case
from parity.problem import Problem
from parity.record import Row
from reference import kda
from tests import candidates
from tests.candidates import given

CASE = Problem("kda.decode", model="tiny", steps=3)


def judged(candidate: Any, case: Problem = CASE, **changed: Any) -> Row:
    return gate.judge(case, given(candidate, **changed))


def registered(name: str) -> Implementation:
    return registry.find("kda.decode", name)


def raises(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    raise RuntimeError("no tile of that size\nand a long story")


def not_finite_in_the_last_step(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    if candidates.call_on(x["state"]) == CASE.steps:
        out[1, -1] = torch.nan
    return out


def state_not_finite_in_the_last_step(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    if candidates.call_on(x["state"]) == CASE.steps:
        x["state"][x["slots"][1].long(), 1, 2, 3] = torch.inf
    return out


def answers_in_an_input_once() -> Any:
    """The observed call comes first, and nothing else looks at what it leaves."""
    calls: list[int] = []

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        out = eager.decode(q, k, **x)
        calls.append(1)
        return x["gate"].copy_(out) if len(calls) == 1 else out

    return candidate


def test_a_healthy_candidate_passes_and_its_gold_was_fp64() -> None:
    row = judged(candidates.healthy)
    assert (row["verdict"], row["reason"], row["first_divergence"]) == ("PASS", "", None)
    assert row["path"]["proved"] and row["path"]["oracle_dtype"] == "float64"
    assert row["output"]["worst_step_over"] < 1 and row["state"]["worst_step_over"] < 1
    assert [entry["step"] for entry in row["drift"]] == [1, 2, 3]


def test_eager_of_the_registry_is_proved_by_its_declared_operators() -> None:
    row = gate.judge(CASE, registered("torch"))
    assert row["verdict"] == "PASS" and {kernel["name"] for kernel in row["path"]["kernels"]} == set(registered("torch").kernels)


def test_the_reference_as_candidate_is_compared_with_itself() -> None:
    row = judged(kda.decode, Problem("kda.decode", model="tiny", steps=3, state_dtype="bf16"), contract=None)
    assert row["verdict"] == "INCONCLUSIVE" and row["reason"].startswith("same path: the candidate ran the reference")


def test_an_output_in_an_inputs_memory_proves_nothing() -> None:
    row = judged(answers_in_an_input_once())
    assert (row["verdict"], row["reason"]) == ("INCONCLUSIVE", "same path: the output is an input's memory")


def test_a_declared_kernel_that_was_not_seen_proves_nothing() -> None:
    row = judged(candidates.healthy, kernels=("aten::bmm", "grand_unified_kernel"))
    assert (row["verdict"], row["reason"]) == ("INCONCLUSIVE", "not proved: declared but not seen: grand_unified_kernel")
    assert not row["path"]["proved"]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_an_implementation_against_itself_is_inconclusive(name: str) -> None:
    pytest.importorskip("triton")
    row = gate.judge(Problem("kda.decode", model="tiny", heads=1, batch=1, steps=1), registered(name), registered(name))
    assert (row["verdict"], row["reason"]) == ("INCONCLUSIVE", f"same path: {name} compared with itself")


def test_another_callable_with_the_same_kernels_is_the_same_path() -> None:
    row = gate.judge(CASE, given(candidates.healthy, kernels=registered("torch").kernels), registered("torch"))
    assert row["verdict"] == "INCONCLUSIVE" and row["reason"].startswith("same path")


def test_the_same_callable_that_declares_nothing_is_the_same_path() -> None:
    row = gate.judge(CASE, given(candidates.healthy), given(candidates.healthy))
    assert row["verdict"] == "INCONCLUSIVE" and row["reason"].startswith("same path")


def test_a_named_reference_changes_the_drift_and_not_the_gate() -> None:
    alone, against = judged(candidates.healthy), gate.judge(CASE, given(candidates.healthy), registered("torch"))
    assert against["verdict"] == "PASS" and against["reference"] == "torch"
    assert against["state"] == alone["state"] and alone["drift"][-1]["state_rel_l2"] > 0 == against["drift"][-1]["state_rel_l2"]


def test_what_a_candidate_raises_is_a_failure_with_its_first_line() -> None:
    row = judged(raises)
    line = raises.__code__.co_firstlineno + 1
    assert (row["verdict"], row["reason"]) == ("FAIL", f"raised RuntimeError: no tile of that size (test_gate.py:{line})")


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda out: out[:, :-1], "[2, 31] torch.bfloat16"),
        (lambda out: out.unflatten(1, (2, 16)), "[2, 2, 16] torch.bfloat16"),
        (lambda out: out.float(), "[2, 32] torch.float32"),
        (lambda out: (out, None), "tuple"),
        (lambda out: None, "NoneType"),
    ],
)
def test_an_output_of_another_shape_dtype_or_type_fails(change: Any, got: str) -> None:
    row = judged(lambda q, k, **x: change(eager.decode(q, k, **x)))
    assert row["verdict"] == "FAIL"
    assert row["reason"].startswith(f"raised TypeError: output: expected [2, 32] torch.bfloat16, got {got}")


@pytest.mark.parametrize("empty", [{"batch": 0}, {"steps": 0}])
def test_nothing_compared_is_vacuous(empty: dict[str, int]) -> None:
    row = judged(raises, Problem(**{"op": "kda.decode", "model": "tiny"} | empty))
    assert row["verdict"] == "VACUOUS" and "nothing was compared" in row["reason"]


def test_what_does_not_run_here_is_skipped_with_its_reason() -> None:
    row = judged(raises, runs=False)
    assert (row["verdict"], row["reason"]) == ("SKIPPED", "not on this machine")


def test_a_failure_outranks_a_missing_proof() -> None:
    row = judged(candidates.no_update, contract=None, kernels=("grand_unified_kernel",))
    assert row["verdict"] == "FAIL" and "not proved" not in row["reason"] and not row["path"]["proved"]


@pytest.mark.parametrize(("candidate", "tensor"), [(not_finite_in_the_last_step, "output"), (state_not_finite_in_the_last_step, "state")])
def test_one_value_that_is_not_finite_fails_and_is_located(candidate: Any, tensor: str) -> None:
    row = judged(candidate)
    assert row["verdict"] == "FAIL" and f"{tensor} is inf times its limit" in row["reason"]
    first = row["first_divergence"]
    assert [first[key] for key in ("step", "tensor", "sequence", "head")] == [3, tensor, 1, 1]
    assert first["channel"] == ({"value": 15} if tensor == "output" else {"value": 2, "key": 3})
    assert not math.isfinite(first["candidate"]) and math.isfinite(first["gold"])


def test_a_gold_that_was_lowered_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = kda.rms_norm
    monkeypatch.setattr(kda, "rms_norm", lambda *x: exact(*x).float())
    row = judged(candidates.healthy)
    assert (row["verdict"], row["reason"]) == ("INCONCLUSIVE", "the gold passed through torch.float32")
    assert row["path"]["oracle_dtype"] == "float32"


def test_a_case_that_the_reference_gets_wrong_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONDITIONING", 0.0)
    row = judged(candidates.healthy)
    assert row["verdict"] == "INCONCLUSIVE" and "the contract's own reference is 0% wrong" in row["reason"]


def test_the_first_divergence_is_first_and_the_largest_stands_second() -> None:
    row = judged(candidates.small_then_large, Problem("kda.decode", model="tiny", steps=8), contract=None)
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and (first["step"], first["largest"]["step"]) == (3, 6)
    assert first["noise_ratio"] > first["limit"] and first["largest"]["over"] > 100 * first["noise_ratio"] / first["limit"]


def test_the_smallest_limit_that_would_have_passed_stands_beside_a_failure() -> None:
    row = judged(candidates.beta_bf16, contract=None)
    for name in ("output", "state"):
        told = row[name]
        assert told["would_pass"] == pytest.approx(told["worst_step_over"]) and told["would_pass"] > 10
        assert told["would_pass"] >= max(told["noise_ratio"] / told["limit"], told["noise_ratio_head"] / told["limit_head"])


def test_drift_is_injected_plus_propagated() -> None:
    case = Case(CASE)
    reference, one_step, pools = case.pools(), case.pools(), case.pools()
    free, index = reference.state[reference.index].float(), pools.index
    window = reference.window[reference.index].float()
    drift = judged(candidates.beta_bf16, contract=None)["drift"]
    for number in (1, 2, 3):
        x = case.inputs(number).tensors
        single = {name: value.float() for name, value in x.items()} | {"conv_weight": case.weights["conv_weight"].float()}
        mine = {name: value.double() for name, value in single.items()}
        slots = torch.arange(2, dtype=torch.int32)
        before = pools.state[index].double()
        trajectory.run(kda.decode, case, one_step, mine, state=before, window=pools.window[index].double(), slots=slots)
        trajectory.run(kda.decode, case, reference, single, state=free, window=window, slots=slots)
        trajectory.run(candidates.beta_bf16, case, pools, x)
        injected, propagated = pools.state[index].double() - before, before - free.double()
        scale = float(free.double().norm())
        assert drift[number - 1]["injected"] == pytest.approx(float(injected.norm()) / scale)
        assert drift[number - 1]["propagated"] == pytest.approx(float(propagated.norm()) / scale)
        assert drift[number - 1]["state_rel_l2"] == pytest.approx(float((injected + propagated).norm()) / scale)
    assert drift[0]["propagated"] < drift[0]["injected"] / 100 < drift[2]["propagated"]


def test_growth_slope_is_the_exponent_of_the_error() -> None:
    steps = range(1, 65)
    for exponent in (0.0, 0.5, 1.0):
        assert gate.growth_slope([(step, 1e-7 * step**exponent) for step in steps]) == pytest.approx(exponent)
    assert gate.growth_slope([(step, 1e-7 * step) for step in steps] + [(65, 0.0), (66, math.inf), (67, math.nan)]) == pytest.approx(1)
    assert gate.growth_slope([(1, 1.0), (2, 2.0)]) is None and gate.growth_slope([(step, 0.0) for step in steps]) is None
