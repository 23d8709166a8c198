"""How far healthy and wrong candidates are from the limits, over seeds: `pytest -s` shows the distributions.

A share is a noise ratio over its limit, the worst of every step, head and tensor; beyond 1 the gate fails.
"""

from collections.abc import Callable
from statistics import median

import pytest
from torch import Tensor

from optimized import registry
from parity.case import Case
from parity.gate import Tally
from parity.oracle import Oracle
from parity.problem import Problem
from parity.trajectory import FreeRun, walk
from reference.points import Contract
from tests import candidates

REGIMES = ("random", "slow")
STATES = ("fp32", "bf16")
SQUARE = "glm-5.3-flash"
EAGER_SEEDS, TRITON_SEEDS, WRONG_SEEDS = 200, 100, 12  # by regime
FAR = 10  # a wrong candidate is at least this many times beyond its limit


def share(problem: Problem, call: Callable[..., Tensor], contract: Contract | None) -> float:
    """The worst of a trajectory: tensors over their limits, at any one step or summed."""
    case = Case(problem)
    oracle, pools = Oracle(case, contract), case.pools()
    tally = Tally(oracle, problem)
    tally.first = {}  # localising is not asked for
    for step in walk(case, call, oracle, pools, FreeRun(case, None)):
        tally.add(step, pools)
    row = tally.row()
    totals = [row[name][ratio] / row[name][limit] for name in ("output", "state") for ratio, limit in RATIOS]
    return max([*tally.worst_step.values(), *totals])


RATIOS = (("noise_ratio", "limit"), ("noise_ratio_head", "limit_head"))


def shares(
    name: str, call: Callable[..., Tensor], contract: Contract | None, seeds: int, model: str, regime: str, state: str
) -> list[float]:
    """Sorted, and printed as min / median / max."""
    heads = 1 if model == SQUARE else 2
    cases = (Problem("kda.decode", model, heads=heads, state_dtype=state, regime=regime, steps=2, seed=seed) for seed in range(seeds))
    found = sorted(share(case, call, contract) for case in cases)
    print(f"{name:<18} {regime:<6} state {state}: {found[0]:.3g} / {median(found):.3g} / {found[-1]:.3g} of the limit, {seeds} seeds")
    return found


def all_of(name: str, seeds: int, regime: str, model: str = "tiny") -> list[list[float]]:
    """Shares for each state dtype; the seeds are split between them."""
    entry = registry.find("kda.decode", name)
    return [shares(name, entry.load(), entry.contract, seeds // 2, model, regime, state) for state in STATES]


@pytest.mark.parametrize("regime", REGIMES)
def test_eager_torch_stays_inside_the_limits(regime: str) -> None:
    for found in all_of("torch", EAGER_SEEDS, regime):
        assert 0 < found[-1] < 1


@pytest.mark.parametrize("regime", REGIMES)
def test_the_triton_kernel_stays_inside_the_limits(regime: str) -> None:
    pytest.importorskip("triton")
    for found in all_of("triton", TRITON_SEEDS, regime):
        assert 0 < found[-1] < 1


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("name", "model"),
    [("beta_bf16", "tiny"), ("decay_after_update", "tiny"), ("stale_slot", "tiny"), ("transposed_state", SQUARE), ("no_update", "tiny")],
)
def test_a_wrong_candidate_is_far_beyond_its_limit(name: str, model: str, regime: str, state: str) -> None:
    found = shares(name, getattr(candidates, name), None, WRONG_SEEDS, model, regime, state)
    assert found[0] > FAR


def test_a_gate_without_the_contract_takes_healthy_rounding_for_a_fault() -> None:
    """Why a candidate declares where it rounds: the same tensors, judged as if nothing may round."""
    (with_contract,), (without,) = (
        shares("healthy", candidates.healthy, contract, 1, "tiny", "random", "fp32") for contract in (candidates.EAGER, None)
    )
    assert with_contract < 1 < FAR < without
