"""The step gate over verify: what is replayed is judged from the raw inputs that the harness kept, never from the caches."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import registry
from optimized.implementation import Implementation
from optimized.peers import eager_verify
from parity import gate, sweep
from parity.case import Case
from parity.phases import accepted_counts
from parity.problem import Problem, parse
from parity.record import Row
from reference import kda, kda_verify
from reference.kda_replay import Replay
from reference.points import rounding
from tests.candidates import EAGER

CASE = Problem("kda.verify", "tiny", batch=3, drafts=2, steps=3)


def judged(candidate: Callable[..., Tensor], case: Problem = CASE) -> Row:
    supports = lambda work: (True, "given")  # noqa: E731
    return gate.judge(case, Implementation("kda.verify", "given", "tests.candidates:healthy", EAGER, (), supports, function=candidate))


def counting(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Torch's verify with its accepted counts changed, where something was accepted."""

    def candidate(q: Tensor, k: Tensor, *, accepted: Tensor, **x: Any) -> Tensor:
        width = len(q) // max(len(accepted), 1)
        return eager_verify.verify(q, k, accepted=torch.where(accepted > 0, change(accepted).clamp(1, max(width, 1)), accepted), **x)

    return candidate


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_healthy_verify_passes_at_every_count_of_drafts(drafts: int, dtype: str) -> None:
    row = gate.judge(Problem("kda.verify", "tiny", drafts=drafts, dtype=dtype, steps=4), registry.find("kda.verify", "torch"))
    assert (row["verdict"], row["reason"]) == ("PASS", "") and row["tokens"] == 2 * (1 + drafts)


def test_the_triton_kernel_passes_and_is_proved() -> None:
    pytest.importorskip("triton")
    row = gate.judge(Problem("kda.verify", "tiny", heads=1, batch=2, drafts=1, steps=3), registry.find("kda.verify", "triton"))
    assert (row["verdict"], row["reason"]) == ("PASS", "")
    assert row["path"]["kernels"] == [{"name": "kda_verify_kernel", "launches": 1}]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda accepted: accepted + 1, "one draft too many replayed"),
        (lambda accepted: accepted - 1, "one draft too few replayed"),
        (lambda accepted: torch.full_like(accepted, 9), "(every draft replayed, rejected ones too|one draft too many replayed)"),
        (torch.ones_like, "(no draft replayed|one draft too few replayed)"),
    ],
)
def test_a_wrong_replay_fails_at_the_second_step_and_is_named(change: Callable[[Tensor], Tensor], cause: str) -> None:
    row = judged(counting(change))
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and first["step"] == 2
    assert re.fullmatch(cause, first["cause"])


def test_a_state_stored_after_the_drafts_fails_at_the_first_step() -> None:
    def candidate(
        q: Tensor, k: Tensor, *, state: Tensor, window: Tensor, replay: Replay, slots: Tensor, accepted: Tensor, **x: Any
    ) -> Tensor:
        pools = dict(state=state, window=window, replay=replay, slots=slots)
        out = eager_verify.verify(q, k, **pools, accepted=accepted, **x)
        weights = {name: x[name] for name in ("conv_weight", "a_log", "dt_bias", "lower_bound")}
        kda_verify.commit(state, window, replay=replay, slots=slots, accepted=torch.full_like(accepted, 1 + replay.drafts), **weights)
        return out

    row = judged(candidate)
    assert row["verdict"] == "FAIL" and row["first_divergence"]["step"] == 1 and row["first_divergence"]["tensor"] == "state"


def test_a_rounded_token_is_named_with_its_place() -> None:
    """Beta rounded in the last draft of the second sequence: nothing but that row of the output is wrong."""

    def candidate(q: Tensor, k: Tensor, *, beta: Tensor, **x: Any) -> Tensor:
        out = eager_verify.verify(q, k, beta=beta, **x)
        if len(out):
            out[2 * 3 - 1] *= 1.0625
        return out

    row = judged(candidate)
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and [first[key] for key in ("step", "tensor", "sequence", "token")] == [1, "output", 1, 2]


def test_the_reference_of_verify_as_candidate_is_compared_with_itself() -> None:
    row = judged(lambda q, k, **x: kda_verify.verify(q, k, **x, at=rounding(EAGER.resolve(q.dtype))))
    assert row["verdict"] == "INCONCLUSIVE" and row["reason"].startswith("same path")


def test_counts_cover_all_that_a_sampler_may_accept_and_nothing_before_the_first_step() -> None:
    case = Case(Problem("kda.verify", "tiny", batch=16, drafts=3))
    assert accepted_counts(case, 1).tolist() == [0] * 16
    assert {int(count) for step in range(2, 6) for count in accepted_counts(case, step)} == {1, 2, 3, 4}


def test_tokens_of_a_verify_are_the_accepted_drafts_and_then_its_own() -> None:
    case = Case(CASE)
    before, inputs, pending = case.inputs(1), case.inputs(2), (accepted_counts(case, 2) - 1).tolist()
    tokens = inputs.tokens
    assert (
        tokens.replayed == tuple(pending)
        and tokens.length == tuple(p + 3 for p in pending)
        and tokens.stored == tuple(p + 1 for p in pending)
    )
    for sequence, count in enumerate(pending):
        old, new = (side.activations["k"].unflatten(0, (3, 3))[sequence] for side in (before, inputs))
        assert torch.equal(tokens.x["k"][sequence, : count + 3], torch.cat([old[1 : 1 + count], new]))
    padded = torch.arange(tokens.longest * 3).view(3, -1)
    assert tokens.packed(padded).tolist() == [int(padded[s, t]) for s in range(3) for t in range(pending[s], pending[s] + 3)]


def test_drafts_belong_to_verify() -> None:
    with pytest.raises(ValueError, match=r"drafts: kda\.decode takes none, got 2"):
        Problem("kda.decode", drafts=2)
    with pytest.raises(ValueError, match="drafts: expected 0 to 7, got 8"):
        parse("kda.verify:drafts=8")
    assert "drafts" not in str(Problem("kda.decode")) and parse("kda.verify").drafts == 3
    assert [
        task.problem.drafts
        for task in sweep.tasks(sweep.Options(("kda.verify",), drafts=(1, 2), regime=("slow",), state_dtype=("fp32",), impl=("torch",)))
    ] == [1, 2]


def test_a_sweep_of_all_operators_gives_each_what_it_takes() -> None:
    found = {(task.problem.op, task.problem.drafts, task.problem.tokens) for task in sweep.tasks(sweep.Options(drafts=(5,), tokens=(9,)))}
    assert found == {
        ("kda.decode", 0, 0), ("kda.prefill", 0, 9), ("kda.verify", 5, 0), ("kda.commit", 5, 0), ("kda.verify_offsets", 5, 0),
        ("kda.mixer", 5, 0), ("kda.mixer", 0, 9),
    }  # fmt: skip


def test_an_implementation_of_ones_own_is_of_one_operator() -> None:
    with pytest.raises(ValueError, match=r"^operator: tests.candidates:healthy implements one of kda.decode, .*, kda.mixer; name it"):
        sweep.tasks(sweep.Options(impl=("tests.candidates:healthy",)))


def test_decode_is_one_token_of_the_same_trajectory() -> None:
    inputs = Case(Problem("kda.decode", "tiny")).inputs(1)
    assert inputs.others == {} and inputs.tokens.length == (1, 1) and kda.decode is not kda_verify.verify
