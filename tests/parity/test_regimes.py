"""Regimes: the two figures that the default ones are named by, measured on a case's own tensors, and seeds."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parity.buffers import same_bits
from parity.case import Case
from parity.problem import Problem
from parity.regimes import REGIMES
from reference.kda import log_decay

FORMS = {"bounded": "glm-5.3-flash", "softplus": "kimi-linear-48b"}
SMALL = Problem("kda.decode", model="tiny", steps=3)


def decays(model: str, regime: str, dtype: str = "fp32") -> Tensor:
    """exp(g) of 32 heads and 4 sequences over 8 steps, from the inputs as a candidate sees them."""
    case = Case(Problem("kda.decode", model, heads=32, batch=4, dtype=dtype, regime=regime))
    a_log, dt_bias = case.weights["a_log"], case.weights["dt_bias"].view(32, -1)
    f = torch.cat([case.inputs(step).tensors["f"] for step in range(1, 9)])
    return log_decay(f.double().unflatten(1, (32, -1)), a_log.double(), dt_bias.double(), case.kda.lower_bound).exp()


def tensors(problem: Problem, step: int = 1) -> dict[str, Tensor]:
    case = Case(problem)
    pools = case.pools()
    rows = {"state": pools.state[pools.index], "window": pools.window[pools.index], "slots": pools.slots}
    return case.weights | rows | case.inputs(step).tensors


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name in a if not same_bits(a[name].contiguous(), b[name].contiguous())}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_random_has_28_percent_of_its_decays_above_998(form: str, dtype: str) -> None:
    share = float((decays(FORMS[form], "random", dtype) > 0.998).double().mean())
    assert 0.265 < share < 0.295


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_slow_has_a_median_decay_of_99992(form: str, dtype: str) -> None:
    assert round(float(decays(FORMS[form], "slow", dtype).median()), 5) == 0.99992


@pytest.mark.parametrize("form", FORMS)
def test_every_regime_decays_between_zero_and_one(form: str) -> None:
    for regime in REGIMES:
        values = decays(FORMS[form], regime)
        assert bool(((values >= 0) & (values <= 1)).all()) and float(values.std()) > 0, regime


def test_sharp_is_near_the_bound() -> None:
    assert float(decays(FORMS["bounded"], "sharp").log().median()) < -4.9


def test_adversarial_has_the_four_betas_and_zero_and_collinear_keys() -> None:
    case = Case(Problem("kda.decode", model="tiny", heads=8, batch=16, dtype="fp32", regime="adversarial"))
    x = case.inputs(1).tensors
    beta = sorted(set(x["beta"].sigmoid().flatten().tolist()))
    assert len(beta) == 4
    assert beta[0] == 0 and beta[1] == pytest.approx(1e-8) and beta[2] == pytest.approx(1 - 2**-9) and beta[3] == 1
    assert not x["q"][0].any() and not x["k"][1, case.kda.key_dim :].any()
    first_head = x["k"][:, : case.kda.key_dim]
    assert bool((first_head == first_head[:, :1]).all())


def test_adversarial_betas_survive_the_activation_dtype() -> None:
    case = Case(Problem("kda.decode", model="tiny", heads=8, batch=16, dtype="bf16", regime="adversarial"))
    assert len(case.inputs(1).tensors["beta"].unique()) == 4


def test_spiky_carries_a_larger_state_and_positive_outliers() -> None:
    plain, spiky = (tensors(replace(SMALL, regime=regime, seed=3)) for regime in ("random", "spiky"))
    assert float(spiky["state"].std() / plain["state"].std()) == pytest.approx(100)
    assert float(spiky["v"].max()) > 2 * float(spiky["v"].min().abs())


def test_a_case_has_the_same_tensors_every_time() -> None:
    assert not differing(tensors(SMALL), tensors(SMALL))
    assert SMALL.seed == Problem("kda.decode", model="tiny", steps=3).seed == 2027583429


@pytest.mark.parametrize(
    "changed", [{"regime": "slow"}, {"dtype": "fp16"}, {"state_dtype": "bf16"}, {"heads": 3}, {"batch": 3}, {"model": "kimi-linear-48b"}]
)
def test_another_case_has_another_seed(changed: dict[str, str | int]) -> None:
    assert Problem(**{"op": "kda.decode", "model": "tiny", "steps": 3} | changed).seed != SMALL.seed


def test_another_seed_changes_every_tensor() -> None:
    before, after = tensors(SMALL), tensors(replace(SMALL, seed=SMALL.seed + 1))
    assert set(before) - differing(before, after) <= {"slots"}


def test_a_longer_run_starts_with_the_same_steps_and_steps_differ() -> None:
    longer = Problem("kda.decode", model="tiny", steps=64)
    for step in (1, 2, 3):
        assert not differing(tensors(SMALL, step), tensors(longer, step))
    assert differing(Case(SMALL).inputs(1).tensors, Case(SMALL).inputs(2).tensors) == {"q", "k", "v", "f", "beta", "gate"}


def test_slots_nobody_names_and_gaps_hold_nan() -> None:
    pools = Case(SMALL).pools()
    assert len(pools.spare()) and bool(pools.state[pools.spare()].isnan().all() & pools.window[pools.spare()].isnan().all())
    assert pools.state_rows.intact() and bool(pools.state[pools.index].isfinite().all())
    pools.state_rows.rows.as_strided((1,), (1,), pools.state_rows.rows.storage_offset() - 1).zero_()
    assert not pools.state_rows.intact()
