"""How a step of each KDA operator is made: the candidate's arguments, and the tokens that the references run.

A verify replays the accepted drafts of the step before from caches that are the candidate's own and that nobody else reads:
the references take them from the inputs of that step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity.tokens import Tokens

if TYPE_CHECKING:
    from parity.case import Case

Made = tuple[dict[str, Tensor], Tokens]


@dataclass(frozen=True)
class Phase:
    """One operator's steps.

    make: from a step's activations [T, D], its further arguments and its tokens. mistaken: tokens that a faulty candidate may
    have run instead, by cause. history: steps before the first that the invariants look at, so that it has drafts to replay.
    """

    make: Callable[["Case", int, dict[str, Tensor]], Made]
    mistaken: Callable[["Case", int, dict[str, Tensor]], dict[str, Tokens]] = lambda case, step, x: {}
    drafted: bool = False
    history: int = 0


def _decode(case: "Case", step: int, x: dict[str, Tensor]) -> Made:
    return {}, Tokens.single(x)


def _verify(case: "Case", step: int, x: dict[str, Tensor]) -> Made:
    """1+S tokens of each sequence after a random count of accepted ones; nothing was accepted before the first step."""
    accepted = accepted_counts(case, step)
    return {"accepted": accepted}, _replaying(case, step, x, (accepted - 1).clamp(min=0).tolist())


def _replaying(case: "Case", step: int, x: dict[str, Tensor], pending: list[int]) -> Tokens:
    """The first `pending` drafts of the step before, then this step's tokens."""
    batch, width, most = case.problem.batch, 1 + case.problem.drafts, max(pending, default=0)
    before = case.activations(step - 1) if most else x
    runs = {}
    for name, value in x.items():
        new, old = (side.unflatten(0, (batch, width)) for side in (value, before[name]))
        runs[name] = value.new_zeros(batch, most + width, value.shape[1])
        for sequence, count in enumerate(pending):
            runs[name][sequence, :count] = old[sequence, 1 : 1 + count]
            runs[name][sequence, count : count + width] = new[sequence]
    return Tokens(runs, tuple(count + width for count in pending), tuple(pending), tuple(count + 1 for count in pending))


def _miscounted(case: "Case", step: int, x: dict[str, Tensor]) -> dict[str, Tokens]:
    if step <= 1:
        return {}
    pending, drafts = accepted_counts(case, step) - 1, case.problem.drafts
    counts = {
        "one draft too many replayed": (pending + 1).clamp(max=drafts),
        "one draft too few replayed": (pending - 1).clamp(min=0),
        "every draft replayed, rejected ones too": torch.full_like(pending, drafts),
        "no draft replayed": torch.zeros_like(pending),
    }
    return {cause: _replaying(case, step, x, count.tolist()) for cause, count in counts.items()}


def anew(others: dict[str, Tensor], fresh: Tensor) -> dict[str, Tensor]:
    """A step's further arguments as they are for sequences that start from zero: nothing is pending."""
    return {name: value.masked_fill(fresh, 0) if name == "accepted" else value for name, value in others.items()}


def accepted_counts(case: "Case", step: int) -> Tensor:
    """int32 [N]: tokens of the step before that the sampler accepted, its golden token included."""
    problem = case.problem
    if step <= 1:
        return torch.zeros(problem.batch, dtype=torch.int32, device=problem.device)
    counts = torch.randint(1, 2 + problem.drafts, (problem.batch,), generator=case.generator(-step), device=problem.device)
    return counts.to(torch.int32)


PHASES = {"kda.decode": Phase(_decode), "kda.verify": Phase(_verify, _miscounted, drafted=True, history=1)}
