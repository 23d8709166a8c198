"""Near ties of a contract that rounds inside: a healthy flip is allowed for in its own head, and hides nothing elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import limits, ties
from parity.case import Call, Case
from parity.oracle import Oracle
from parity.problem import Problem
from parity.trajectory import FreeRun, walk
from reference import kda
from reference.points import KDA_CELL, Contract, rounding, tie_distance
from tests.candidates import EAGER, live
from tests.parity.test_noise import share

SQUARE = "glm-5.3-flash"
INTERIOR = [point for point in KDA_CELL[:-1] if point != "state"]


def flipping(point: str, which: Callable[[Tensor], Tensor], head: int) -> Callable[..., Tensor]:
    """The eager contract, with one value of a head in the first sequence rounded to the other side."""

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        heads, rounded = x["beta"].shape[1], rounding(EAGER.resolve(q.dtype))

        def at(name: str, value: Tensor) -> Tensor:
            near = rounded(name, value)
            if name != point:
                return near
            own = value.view(len(value), heads, -1)[0, head] if name == "core" else value[0, : value.shape[1] // 3].view(heads, -1)[head]
            flip = int(which(tie_distance(own, q.dtype) / own.abs()))
            place = near.view(len(value), heads, -1)[0, head] if name == "core" else near[0, : value.shape[1] // 3].view(heads, -1)[head]
            step = torch.finfo(q.dtype).eps * 2.0 ** torch.frexp(place[flip])[1].sub(1)
            place[flip] += step if own[flip] > place[flip] else -step
            return near

        return kda.decode(q, k, **x, at=at)

    return candidate


@pytest.mark.parametrize("point", ["conv", "core"])
def test_a_flip_far_from_a_tie_is_a_fault(point: str) -> None:
    """In BF16, where a head in two has no near tie; in FP16 almost every head has some, as large as this flip."""
    case = Problem("kda.decode", SQUARE, heads=2, batch=1, steps=6, seed=3)
    assert share(case, flipping(point, torch.argmax, head=1), EAGER) > 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("point", ["conv", "core"])
def test_a_flip_at_a_tie_is_healthy(point: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value counts as near: what one of them does, its head is allowed."""
    case = Problem("kda.decode", SQUARE, heads=2, batch=1, dtype=dtype, steps=1, seed=3)
    candidate = flipping(point, torch.argmin, head=1)
    monkeypatch.setattr(limits, "FLIP_NOISE", 0.0)
    assert share(case, candidate, EAGER) > 1
    monkeypatch.setattr(limits, "FLIP_NOISE", 4096.0)
    assert share(case, candidate, EAGER) < 1


def test_only_heads_that_are_off_and_have_near_ties_are_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FLIP_NOISE", 4096.0)
    case = Case(Problem("kda.decode", SQUARE, heads=4, batch=2, steps=1, seed=3))
    pools = case.pools()
    (step,) = walk(case, flipping("conv", torch.argmax, head=1), Oracle(case, EAGER), pools, FreeRun(case, None))
    for m in (step.output, step.state):
        assert m.excused.shape == (2, 4) and m.excused.flatten().nonzero().flatten().tolist() == [1]


ALL = Contract(rounds=dict.fromkeys(INTERIOR, torch.float16))


@pytest.mark.parametrize("point", ["beta", "decay", "read", "delta", "q", "k", "norm", "gate"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_declared_rounding_hides_no_other(point: str, dtype: str) -> None:
    """In one step of one head. At K = V = 128 most of FP16's heads have a near tie: it explains no whole head."""

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        return kda.decode(q, k, **x, at=rounding({**EAGER.resolve(q.dtype), point: q.dtype}))

    for seed in range(3):
        assert share(Problem("kda.decode", SQUARE, heads=1, batch=1, dtype=dtype, steps=1, seed=seed), candidate, EAGER) > 3


@pytest.mark.parametrize("point", ["delta", "k", "beta"])
def test_roundings_everywhere_hide_no_fault(point: str) -> None:
    """One step of one head whose contract rounds at every point to FP16, where it has dozens of near ties: a value 0.1 % off."""

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        rounded = rounding(ALL.rounds)
        return kda.decode(q, k, **x, at=lambda name, value: rounded(name, value) * (1.001 if name == point else 1))

    for seed in range(3):
        assert share(Problem("kda.decode", SQUARE, heads=1, batch=1, steps=1, seed=seed), candidate, ALL) > 1


def test_a_head_taken_out_of_its_batch_is_predicted_as_in_it() -> None:
    case = Case(Problem("kda.decode", "tiny", heads=3, batch=2, steps=1))
    oracle, pools, inputs = Oracle(case, EAGER), case.pools(), case.inputs(1)
    state, window = pools.state[live(pools.state, pools.slots)], pools.window[pools.slots.long()]
    call = Call(1, inputs, state, window, torch.zeros(2, 3, 16), True)
    whole = oracle.gold(inputs.tokens, state, window)
    sequence, head = torch.tensor([1, 0, 1]), torch.tensor([2, 1, 0])
    own = ties.gather(case, call, sequence, head, (1, 0, 1)).predict(oracle, [rounding(oracle.roundings)])
    for alone, among in ((own.out, whole.out), (own.state, whole.state)):
        assert (alone[0] - among[sequence, head]).abs().max() < 2.0**-40
