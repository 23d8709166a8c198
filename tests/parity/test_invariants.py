"""Invariants: each is broken by a candidate whose numbers are right, and the verdict names it and nothing else."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
from optimized import registry
from optimized.peers import eager
from parity import gate, invariants
from parity.problem import Problem
from parity.record import Row
from tests.candidates import given, healthy, live, nudge

CASE = Problem("kda.decode", model="tiny", steps=2)
LAST_CALLS = {"untouched_slots", "gaps", "inputs_unmodified", "window_exact"}


def judged(candidate: Callable[..., Tensor], case: Problem = CASE) -> Row:
    return gate.judge(case, given(candidate))


def all_live(state: Tensor, slots: Tensor) -> bool:
    return len(live(state, slots)) == len(slots) > 0


def writes_a_slot_nobody_named(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    state, slots = x["state"], x["slots"]
    if all_live(state, slots):
        spare = next(slot for slot in range(len(state)) if slot not in slots.tolist())
        state[spare, 0, 0, 0] = 0
    return out


def writes_past_a_row(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    state = x["state"]
    if all_live(state, x["slots"]):
        state.as_strided((1,), (1,), state.storage_offset() + state[0].numel()).zero_()
    return out


def clamps_the_gate_in_place(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    x["gate"].clamp_(-1, 1)
    return eager.decode(q, k, **x)


def stores_a_zero_in_the_window(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    x["window"][live(x["state"], x["slots"]), -1, 0] = 0
    return out


def third_call_differs() -> Callable[..., Tensor]:
    """Observed, base run, then the repetition."""
    count = itertools.count(1)

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        out = eager.decode(q, k, **x)
        if next(count) == 3:
            nudge(x["state"], x["slots"][0].long())
        return out

    return candidate


def the_order_matters() -> Callable[..., Tensor]:
    seen: list[Tensor] = []

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        out = eager.decode(q, k, **x)
        seen[:] = seen or [x["slots"].clone()]
        if all_live(x["state"], x["slots"]) and torch.equal(x["slots"], seen[0].flip(0)):
            x["state"][x["slots"][0].long()] *= 1.1
        return out

    return candidate


def writes_a_slot_for_nobody(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    if not len(x["slots"]):
        x["state"][0, 0, 0, 0] = 0
    return eager.decode(q, k, **x)


def padded_rows_are_ones(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    slots = x["slots"]
    out[(slots < 0) | (slots >= len(x["state"]))] = 1
    return out


def adds_zero_times_everybody(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    return eager.decode(q, k, **x) + 0 * x["v"].sum(0)


def multiplies_fresh_by_zero(q: Tensor, k: Tensor, *, fresh: Tensor | None = None, **x: Any) -> Tensor:
    if fresh is not None:
        x["state"][x["slots"][fresh].long()] *= 0
        x["window"][x["slots"][fresh].long()] *= 0
    return eager.decode(q, k, **x)


def trusts_what_it_allocates(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    scratch = torch.empty(64, dtype=torch.int32)
    if all_live(x["state"], x["slots"]) and bool((scratch == torch.iinfo(torch.int32).max).all()):  # what poisoned allocations hold
        nudge(x["state"], x["slots"][0].long())
    return out


def last_program_wins() -> Callable[..., Tensor]:
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def write_own_number(cell):
        tl.store(cell, tl.program_id(0))

    write_own_number.fn.__globals__["tl"] = tl

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        out = eager.decode(q, k, **x)
        winner = torch.full((1,), -1, dtype=torch.int32)
        write_own_number[(2,)](winner)
        if winner.item() == 0 and all_live(x["state"], x["slots"]):
            nudge(x["state"], x["slots"][0].long())
        return out

    return candidate


BROKEN: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "untouched_slots": lambda: writes_a_slot_nobody_named,
    "gaps": lambda: writes_past_a_row,
    "inputs_unmodified": lambda: clamps_the_gate_in_place,
    "window_exact": lambda: stores_a_zero_in_the_window,
    "repeated": third_call_differs,
    "slot_permutation": the_order_matters,
    "padding": lambda: padded_rows_are_ones,
    "empty_batch": lambda: writes_a_slot_for_nobody,
    "neighbours": lambda: adds_zero_times_everybody,
    "fresh": lambda: multiplies_fresh_by_zero,
    "poisoned_allocations": lambda: trusts_what_it_allocates,
    "reversed_programs": last_program_wins,
}


def test_every_invariant_has_a_candidate_that_breaks_it() -> None:
    """Of those that need no GPU; a graph is broken in the tests of the GPU."""
    assert set(BROKEN) == set(invariants.CHECKS) - {"graph_replay"} | LAST_CALLS


@pytest.mark.parametrize("name", BROKEN)
def test_a_candidate_that_breaks_one_invariant_fails_by_that_name_alone(name: str) -> None:
    row = judged(BROKEN[name]())
    assert (row["verdict"], row["reason"]) == ("FAIL", f"invariants broken: {name}")
    assert [key for key, kept in row["invariants"].items() if not kept] == [name]


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["tiny", "kimi-linear-48b"])
def test_a_healthy_candidate_keeps_them_all(model: str, state_dtype: str) -> None:
    row = judged(healthy, Problem("kda.decode", model=model, steps=2, batch=3, state_dtype=state_dtype))
    assert row["verdict"] == "PASS", row["reason"]
    assert row["invariants"] == dict.fromkeys(row["invariants"], True) and set(row["invariants"]) == set(BROKEN)


def test_an_invariant_that_one_sequence_cannot_show_is_left_out() -> None:
    row = judged(healthy, Problem("kda.decode", model="tiny", steps=2, batch=1))
    assert row["verdict"] == "PASS", row["reason"]
    assert set(BROKEN) - set(row["invariants"]) == {"slot_permutation", "neighbours"}


def test_poisoned_allocations_leave_the_settings_of_torch_as_they_were() -> None:
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    assert judged(healthy)["verdict"] == "PASS"
    assert (torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory) == before


def test_a_stale_window_is_located_at_its_tap_and_channel() -> None:
    first = judged(stores_a_zero_in_the_window)["first_divergence"]
    assert (first["step"], first["tensor"], first["point"], first["channel"]) == (1, "window", "conv", {"tap": 2, "channel": 0})
    assert first["candidate"] == 0 and first["gold"] != 0


def clears_every_second_fresh_slot(q: Tensor, k: Tensor, *, fresh: Tensor | None = None, **x: Any) -> Tensor:
    if fresh is not None:
        fresh = fresh.clone()
        fresh[1::2] = False
    return eager.decode(q, k, fresh=fresh, **x)


def drops_all_after_a_padded_first(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    out = eager.decode(q, k, **x)
    return out * 0 if len(x["slots"]) and not 0 <= int(x["slots"][0]) < len(x["state"]) else out


def flattens_a_weight(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    x["norm_weight"].fill_(1)
    return eager.decode(q, k, **x)


@pytest.mark.parametrize(
    ("candidate", "name"),
    [(clears_every_second_fresh_slot, "fresh"), (drops_all_after_a_padded_first, "padding"), (flattens_a_weight, "inputs_unmodified")],
)
def test_every_sequence_and_every_argument_is_looked_at(candidate: Callable[..., Tensor], name: str) -> None:
    row = judged(candidate)
    assert row["verdict"] == "FAIL" and not row["invariants"][name]


@pytest.mark.gpu
def test_a_candidate_that_captures_its_warm_up_slots_breaks_a_replay() -> None:
    def remembers(q: Tensor, k: Tensor, *, slots: Tensor, **x: Any) -> Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        kept[:] = kept if capturing else [slots.clone()]
        return kernel(q, k, slots=kept[0] if capturing else slots, **x)

    kept: list[Tensor] = []
    kernel = registry.find("kda.decode", "triton").load()
    remembers.capturable = True  # type: ignore[attr-defined]
    row = parity.check("kda.decode:heads=2,batch=2,steps=1", remembers)
    assert row["invariants"]["graph_replay"] is False


def test_torch_operators_pass_where_a_row_ends_in_the_middle_of_a_vector() -> None:
    row = judged(healthy, Problem("kda.decode", model="tiny", heads=17, steps=1, regime="slow"))
    assert row["verdict"] == "PASS", row["reason"]
