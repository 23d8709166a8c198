"""The gate over commit, against decoding the accepted drafts, and over the offsets of a forward, to the bit."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import registry
from optimized.implementation import Implementation
from optimized.peers import eager_verify
from parity import exactly, gate, sweep
from parity.case import Case
from parity.problem import Problem
from parity.record import Row
from reference import kda_offsets, kda_verify
from reference.kda_replay import Replay
from reference.points import rounding
from tests.candidates import EAGER, nudge

CASE = Problem("kda.commit", "tiny", batch=3, drafts=2, steps=3)
OFFSETS = Problem("kda.verify_offsets", batch=5, drafts=3, steps=4)


def judged(candidate: Callable[..., Any], case: Problem = CASE) -> Row:
    supports = lambda work: (True, "given")  # noqa: E731
    return gate.judge(case, Implementation(case.op, "given", "tests.candidates:healthy", EAGER, (), supports, function=candidate))


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("op", ["kda.commit", "kda.verify_offsets"])
def test_what_is_registered_passes_and_is_proved(op: str, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    entry = registry.find(op, name)
    row = gate.judge(Problem(op, "tiny", heads=1, batch=2, drafts=2, steps=2), entry)
    assert (row["verdict"], row["reason"]) == ("PASS", "")
    assert {kernel["name"] for kernel in row["path"]["kernels"]} == set(entry.kernels)
    assert row["invariants"]["repeated"] and row["invariants"]["empty_batch"]


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("drafts", [1, 7])
def test_a_healthy_commit_passes_at_every_count_of_drafts(drafts: int, state: str) -> None:
    row = judged(eager_verify.commit, Problem("kda.commit", "tiny", drafts=drafts, state_dtype=state, steps=2))
    assert (row["verdict"], row["reason"]) == ("PASS", "")


def test_a_case_commits_none_some_and_all_drafts_of_poisoned_caches() -> None:
    case = Case(Problem("kda.commit", "tiny", batch=16, drafts=3))
    tokens = case.inputs(1).tokens
    assert set(tokens.length) == {0, 1, 2, 3} and tokens.length == tokens.replayed == tokens.stored
    assert tokens.offsets[-1] == 0  # no row of output


def counting(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def candidate(state: Tensor, window: Tensor, *, replay: Replay, accepted: Tensor, **x: Any) -> None:
        for cache in (replay.qkv, replay.f, replay.beta):  # what lies past the pending drafts, as a fault would find it
            cache.nan_to_num_(0.25)
        eager_verify.commit(state, window, replay=replay, accepted=change(accepted).clamp(0, 1 + replay.drafts).int(), **x)

    return candidate


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda accepted: accepted - 1, "one draft too few replayed"),
        (torch.ones_like, "(no draft replayed|one draft too few replayed)"),
    ],
)
def test_a_wrong_count_fails_and_is_named(change: Callable[[Tensor], Tensor], cause: str) -> None:
    row = judged(counting(change))
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and (first["step"], first["tensor"]) == (1, "state"), row["reason"]
    assert re.fullmatch(cause, first["cause"]), first["cause"]


def test_a_draft_too_many_fails() -> None:
    assert judged(counting(lambda accepted: accepted + 1))["verdict"] == "FAIL"


def test_reading_past_the_pending_drafts_fails() -> None:
    """Not by their count, but multiplied by zero."""

    def candidate(state: Tensor, window: Tensor, *, replay: Replay, slots: Tensor, **x: Any) -> None:
        live = slots[(slots >= 0) & (slots < len(state))].long()
        eager_verify.commit(state, window, replay=replay, slots=slots, **x)
        state[live] += 0 * replay.qkv[live].float().flatten(1).sum(1)[:, None, None, None]

    assert judged(candidate)["verdict"] == "FAIL"


def test_a_sequence_without_pending_drafts_stays_to_the_bit() -> None:
    def candidate(state: Tensor, window: Tensor, *, slots: Tensor, accepted: Tensor, **x: Any) -> None:
        eager_verify.commit(state, window, slots=slots, accepted=accepted, **x)
        for slot in slots[(accepted < 2) & (slots >= 0) & (slots < len(state))].tolist():
            window[slot, 0, 0] += 1

    row = judged(candidate, Problem("kda.commit", "tiny", batch=6, drafts=1, steps=2))
    assert row["verdict"] == "FAIL" and not row["invariants"]["window_exact"]


def test_a_commit_that_touches_another_slot_fails() -> None:
    def candidate(state: Tensor, window: Tensor, *, slots: Tensor, **x: Any) -> None:
        eager_verify.commit(state, window, slots=slots, **x)
        nudge(state.nan_to_num_(0.0), next(slot for slot in range(len(state)) if slot not in slots.tolist()))

    row = judged(candidate)
    assert row["verdict"] == "FAIL" and not row["invariants"]["untouched_slots"]


def test_the_reference_of_commit_as_candidate_is_compared_with_itself() -> None:
    row = judged(lambda state, window, **x: kda_verify.commit(state, window, **x, at=rounding(EAGER.resolve(window.dtype))))
    assert row["verdict"] == "INCONCLUSIVE" and row["reason"].startswith("same path")


def shifted_end(accepted: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    pending, ends = kda_offsets.offsets(accepted, drafts)
    if len(accepted):
        ends[-1] -= pending[-1]
    return pending, ends


def golden_not_counted(accepted: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    return kda_offsets.offsets((accepted + 1).clamp(max=1 + drafts), drafts)


@pytest.mark.parametrize(("candidate", "step", "tensor"), [(shifted_end, 2, "cu_seqlens"), (golden_not_counted, 3, "pending")])
def test_wrong_offsets_fail_at_their_first_number(candidate: Any, step: int, tensor: str) -> None:
    row = judged(candidate, OFFSETS)
    first = row["first_divergence"]
    assert row["verdict"] == "FAIL" and (first["step"], first["tensor"]) == (step, tensor)
    right = dict(zip(exactly.NAMES, exactly.expected(exactly.counts(OFFSETS, step).tolist(), 3), strict=True))[tensor]
    assert first["gold"] == right[first["sequence"]] != first["candidate"]


def test_offsets_that_change_their_input_or_have_another_form_fail() -> None:
    def spoils(accepted: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
        found = kda_offsets.offsets(accepted.clone(), drafts)
        accepted.zero_()
        return found

    assert "inputs_unmodified" in judged(spoils, OFFSETS)["reason"]
    row = judged(lambda accepted, drafts: kda_offsets.offsets(accepted, drafts)[0], OFFSETS)
    assert row["verdict"] == "FAIL" and "expected (pending, cu_seqlens)" in row["reason"]


def test_offsets_are_swept_over_requests_and_drafts_alone() -> None:
    options = sweep.Options(("kda.verify_offsets",), heads=(2, 4), batch=(1, 7), drafts=(1, 3), dtype=("bf16", "fp32"))
    assert [(p.batch, p.drafts) for p in sweep.problems(options)] == [(1, 1), (1, 3), (7, 1), (7, 3)]
