"""The step gate over a mixer: healthy ones pass whatever their near ties did, a fault shows in the product that has it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import contracts, registry
from optimized.implementation import Implementation
from parity import drift, gate, limits, settle, sweep
from parity.case import Case
from parity.gate import Tally
from parity.mixer import oracle_of
from parity.problem import Problem, parse
from parity.record import Row
from parity.regimes import ADVERSARIAL_BETA
from parity.trajectory import FreeRun, walk
from reference import kda_mixer
from reference.kda import log_decay
from reference.kda_weights import NAMES, KdaWeights
from reference.points import Contract, tie_distance
from tests import mixers

GLM = "glm-5.3-flash"
FORMS = {"bounded": GLM, "softplus": "kimi-linear-48b"}


def judged(candidate: Callable[..., Tensor], case: Problem, contract: Contract = contracts.MIXER) -> Row:
    supports = lambda work: (True, "given")  # noqa: E731
    return gate.judge(case, Implementation("kda.mixer", "given", "tests.mixers:healthy", contract, (), supports, function=candidate))


def share(problem: Problem, call: Callable[..., Tensor], contract: Contract) -> tuple[float, float]:
    """Output and state over their limits, the worst of a trajectory; infinite where a window is beyond its own."""
    case = Case(problem)
    oracle, pools = oracle_of(case, contract, None), case.pools()
    tally = Tally(oracle, problem)
    tally.first = {}  # localising is not asked for
    for step in walk(case, call, oracle, pools, FreeRun(case, None)):
        tally.add(step, pools)
    row = tally.row()
    worst = [max(row[name]["worst_step_over"], row[name]["would_pass"]) for name in ("output", "state")]
    return (worst[0], worst[1]) if tally.window_exact else (torch.inf, torch.inf)


def wide(weights: KdaWeights) -> KdaWeights:
    return KdaWeights(**{name: getattr(weights, name).double() for name in NAMES})


def projected(model: str, regime: str, heads: int = 32) -> tuple[Case, dict[str, Tensor]]:
    """The cell's activations of 32 rows, from the layer as a candidate sees it."""
    case = Case(Problem("kda.mixer", model, heads=heads, batch=32, regime=regime))
    assert case.layer is not None
    return case, kda_mixer.project(case.inputs(1).tensors["hidden"].double(), wide(case.layer))


def decays(model: str, regime: str) -> Tensor:
    case, x = projected(model, regime)
    a_log, dt_bias = case.weights["a_log"].double(), case.weights["dt_bias"].double().view(32, -1)
    return log_decay(x["f"].unflatten(1, (32, -1)), a_log, dt_bias, case.kda.lower_bound).exp()


@pytest.mark.parametrize("form", FORMS)
def test_projections_of_random_have_28_percent_of_its_decays_above_998(form: str) -> None:
    assert 0.265 < float((decays(FORMS[form], "random") > 0.998).double().mean()) < 0.295


@pytest.mark.parametrize("form", FORMS)
def test_projections_of_slow_have_a_median_decay_of_99992(form: str) -> None:
    assert round(float(decays(FORMS[form], "slow").median()), 5) == 0.99992


def test_projections_have_the_spreads_that_a_cell_is_given() -> None:
    case, x = projected("tiny", "random", heads=32)
    cell = Case(Problem("kda.decode", "tiny", heads=32, batch=32))
    given = cell.inputs(1).tensors
    for side, f in ((case, x), (cell, given)):  # a head's rate divides its gate
        f["f"] = f["f"].double() * side.weights["a_log"].double().exp().repeat_interleave(case.kda.key_dim)
    for name, value in x.items():
        assert 0.9 < float(value.std() / given[name].float().std()) < 1.1, name
    assert case.layer is not None and case.layer.f_a_proj.shape == (case.kda.key_dim, 64)


def test_adversarial_has_the_four_betas_a_zero_row_and_a_key_that_never_changes() -> None:
    case, x = projected("tiny", "adversarial", heads=4)
    assert x["beta"].unique().tolist() == [float(torch.tensor(beta).bfloat16()) for beta in ADVERSARIAL_BETA]
    assert not x["q"][0].any() and bool((x["k"][:, : case.kda.key_dim] == 1).all())


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("regime", ["random", "slow"])
def test_the_eager_mixer_stays_inside_the_limits(regime: str, dtype: str, state: str) -> None:
    entry = registry.find("kda.mixer", "torch")
    for seed in range(10):
        output, state_over = share(Problem("kda.mixer", "tiny", 2, 2, dtype, state, regime, 2, seed=seed), entry.load(), entry.contract)
        assert max(output, state_over) < 0.6


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("regime", ["random", "slow"])
def test_sums_of_tensor_cores_are_healthy(regime: str, state: str) -> None:
    """Half an ulp lost in each of 256 steps: values turn to the other side of their tie in every head, and only that."""
    for seed in range(2):
        problem = Problem("kda.mixer", GLM, 2, 2, "bf16", state, regime, 2, seed=seed)
        assert max(share(problem, mixers.tensor_cores(1.0, seed), contracts.MIXER)) < 0.6


def test_without_reading_ties_off_the_step_they_are_taken_for_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("kda.mixer", GLM, 2, 2, steps=2, seed=1)
    monkeypatch.setattr(settle, "settle", lambda *given: settle.Settled({}, {}))
    assert share(problem, mixers.tensor_cores(1.0, 1), contracts.MIXER)[1] > 10


def test_a_tie_is_read_off_the_state_whichever_side_it_fell_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of f, the value nearest its tie is turned, and more values are taken for near: what is settled on is what was used."""
    problem = Problem("kda.mixer", "tiny", steps=1, seed=4)
    used: list[tuple[tuple[int, ...], float, float]] = []  # place, what it should round to, what it was rounded to
    found: list[settle.Settled] = []

    def turned(name: str, x: Tensor, contract: Callable[[str, Tensor], Tensor]) -> Tensor:
        y = contract(name, x)
        if name == "proj_f":
            place = tuple(int(i) for i in torch.unravel_index(tie_distance(x.double(), torch.bfloat16).argmin(), x.shape))
            right = float(y[place])
            y[place] = (2 * x[place] - y[place]).bfloat16()  # its mirror image at the value
            used.append((place, right, float(y[place])))
        return y

    monkeypatch.setattr(limits, "FLIP_NOISE", 512.0)
    inner = settle.settle
    monkeypatch.setattr(settle, "settle", lambda *given: found.append(inner(*given)) or found[-1])
    share(problem, mixers.through(turned), contracts.MIXER)
    (row, column), right, turned_to = used[0]
    assert right != turned_to == float(found[0].likely["proj_f"][row, 0, column])


@pytest.mark.parametrize("regime", ["random", "slow"])
@pytest.mark.parametrize("name", ["beta_bf16", "decay_bf16", "neighbours_bias", "swapped_gates", "neighbours_output", "stale_window"])
def test_a_fault_is_far_beyond_its_limit(name: str, regime: str) -> None:
    for seed in range(3):
        problem = Problem("kda.mixer", "tiny", 2, 2, regime=regime, steps=2, seed=seed)
        assert max(share(problem, mixers.FAULTS[name], contracts.MIXER)) > 10


@pytest.mark.parametrize("point", ["proj_qkv", "proj_f_a", "proj_f", "proj_b", "proj_g_a", "proj_g", "o_proj"])
def test_sums_kept_in_bf16_show_in_every_product(point: str) -> None:
    problem = Problem("kda.mixer", GLM, heads=2, batch=2, steps=4, seed=2)
    assert max(share(problem, mixers.FAULTS[f"bf16 sums of {point}"], contracts.MIXER)) > 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_our_mixer_passes_and_is_proved(dtype: str) -> None:
    pytest.importorskip("triton")
    row = gate.judge(Problem("kda.mixer", "tiny", heads=1, dtype=dtype, steps=2), registry.find("kda.mixer", "triton"))
    assert (row["verdict"], row["reason"]) == ("PASS", "")
    gemm = [] if dtype == "fp32" else [{"name": "linear_kernel", "launches": 3}]
    assert row["path"]["kernels"] == [{"name": "kda_decode_kernel", "launches": 1}, *gemm]


@pytest.mark.parametrize("name", ["fla", "torch"])
def test_peers_pass_and_are_proved(name: str) -> None:
    if name == "fla":
        pytest.importorskip("optimized.peers.fla", exc_type=ImportError)
    row = gate.judge(Problem("kda.mixer", "tiny", heads=1, steps=2), registry.find("kda.mixer", name))
    assert (row["verdict"], row["reason"]) == ("PASS", "") and row["invariants"]["window_projected"]


def test_the_reference_as_candidate_is_compared_with_itself() -> None:
    row = judged(mixers.healthy, Problem("kda.mixer", "tiny", steps=1))
    assert row["verdict"] == "INCONCLUSIVE" and row["reason"].startswith("same path: the candidate ran the reference (")


@pytest.mark.parametrize(
    ("name", "point", "cause"),
    [
        ("beta_bf16", "beta", "beta rounded to bf16"),
        ("decay_bf16", "decay", "decay rounded to bf16"),
        ("swapped_gates", "proj_f_a", "f_a and g_a swapped"),
        ("neighbours_output", "o_proj", "o_proj of the head before"),
    ],
)
def test_a_fault_is_named_with_its_point(name: str, point: str, cause: str) -> None:
    row = judged(mixers.FAULTS[name], Problem("kda.mixer", "tiny", heads=3, steps=2))
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and (first["step"], first["point"], first["cause"]) == (1, point, cause)


def test_a_stale_window_is_named_with_its_place() -> None:
    row = judged(mixers.stale_window, Problem("kda.mixer", "tiny", steps=2))
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and "window_projected" in row["reason"]
    assert [first[key] for key in ("step", "tensor", "sequence")] == [1, "window", 0] and first["channel"]["tap"] == 1


def test_an_output_has_no_heads_to_name() -> None:
    first = judged(mixers.neighbours_output, Problem("kda.mixer", "tiny", steps=1))["first_divergence"]
    assert first["tensor"] == "output" and first["head"] is None and set(first["channel"]) == {"hidden"}


def entry(rel_l2: float = 0.001, cosine: float = 0.999999, state: float = 0.001) -> dict[str, Any]:
    return {"rel_l2": rel_l2, "cosine": cosine, "state_rel_l2": state}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(dict(rel_l2=0.0068), "output rel L2"), (dict(cosine=0.99997), "output 1-cos"), (dict(state=0.0025), "state rel L2"),
     (dict(rel_l2=float("nan")), "output rel L2")],
)  # fmt: skip
def test_a_drift_beyond_its_absolute_limit_is_named(wrong: dict[str, float], named: str) -> None:
    problem = Problem("kda.mixer", heads=8)
    assert drift.beyond(drift.judged(problem, [entry(), entry()])) == []
    (said,) = drift.beyond(drift.judged(problem, [entry(**wrong), entry()]))
    assert said.startswith(f"{named} drifts to ")


def test_absolute_limits_hold_for_the_problems_they_were_stated_for() -> None:
    stated = Problem("kda.mixer", heads=8)
    others = [Problem("kda.mixer"), Problem("kda.decode", heads=8)]
    others += [parse(f"kda.mixer:heads=8,{x}") for x in ("regime=slow", "state-dtype=bf16", "dtype=fp32", "tokens=9", "drafts=1")]
    assert drift.limit(stated) is limits.MIXER_DRIFT and all(drift.limit(problem) is None for problem in others)
    far = [entry()] * limits.MIXER_DRIFT.steps + [entry(rel_l2=1.0)]
    assert drift.beyond(drift.judged(stated, far)) == []


def test_an_absolute_limit_fails_a_row_that_every_step_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("kda.mixer", "tiny", heads=8, steps=2)
    row = gate.judge(problem, registry.find("kda.mixer", "torch"))
    assert row["verdict"] == "PASS" and 0 < row["absolute"]["output rel L2"]["over"] < 1
    monkeypatch.setattr(limits, "MIXER_DRIFT", limits.DriftLimit(1e-9, 0.99998, 0.0024, 64, 8, "none at all"))
    row = gate.judge(problem, registry.find("kda.mixer", "torch"))
    assert row["verdict"] == "FAIL" and row["reason"].startswith("output rel L2 drifts to 0.00")


def test_drafts_verify_tokens_prefill_and_contexts_do_both() -> None:
    cases = ("kda.mixer:batch=3", "kda.mixer:batch=3,drafts=2", "kda.mixer:batch=3,tokens=9")
    assert [(p.rows, p.prefilled) for p in map(parse, cases)] == [
        (3, 0), (9, 0), (9, 3),
    ]  # fmt: skip
    mixed = parse("kda.mixer:batch=5,tokens=9,contexts=2,drafts=1")
    assert (mixed.rows, mixed.prefilled) == (9 + 3 * 2, 2) and parse(str(mixed)) == mixed
    for case, says in (
        ("kda.mixer:contexts=1", "contexts: expected none without tokens"),
        ("kda.decode:contexts=1", "contexts: expected none without tokens"),
        ("kda.mixer:batch=2,tokens=9,contexts=3", "contexts: expected at most the 2 sequences"),
        ("kda.mixer:tokens=9,drafts=1", "drafts: expected none where every sequence is a context"),
    ):
        with pytest.raises(ValueError, match=says):
            parse(case)


def test_a_sweep_decodes_unless_drafts_or_tokens_are_named() -> None:
    def runs(**given: tuple[int, ...]) -> list[tuple[int, int]]:
        options = sweep.Options(("kda.mixer",), regime=("slow",), state_dtype=("fp32",), impl=("torch",), **given)
        return [(task.problem.drafts, task.problem.tokens) for task in sweep.tasks(options)]

    assert runs() == [(0, 0)] and runs(drafts=(1, 3), tokens=(9,)) == [(1, 0), (3, 0), (0, 9)]
