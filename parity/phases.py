"""How a step of each KDA operator is made: the candidate's arguments, and the tokens that the references run.

A verify replays the accepted drafts of the step before from caches that are the candidate's own and that nobody else reads:
the references take them from the inputs of that step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parity import regimes
from parity.tokens import Tokens
from reference.batch import Batch

if TYPE_CHECKING:
    from parity.case import Case

Made = tuple[dict[str, Tensor], Tokens]


def _forward(function: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    q, k = arguments.pop("q"), arguments.pop("k")
    return function(q, k, **arguments)


@dataclass(frozen=True)
class Phase:
    """One operator's steps.

    make: from a step's activations [T, D], its further arguments and its tokens. mistaken: tokens that a faulty candidate may
    have run instead, by cause. steps: of a sweep on a CPU, where kernels are interpreted, and on a GPU. history: steps before
    the first that the invariants look at, so that it has drafts to replay. mixed: drafts and tokens choose among the phases of
    one operator. call: an implementation with the arguments of a step, by name. flushes: it takes no rows and returns none, but
    brings the pools up to date from caches that the harness fills. whole_numbers: judged to the bit by `exactly`, without a case.
    """

    make: Callable[["Case", int, dict[str, Tensor]], Made]
    mistaken: Callable[["Case", int, dict[str, Tensor]], dict[str, Tokens]] = lambda case, step, x: {}
    steps: tuple[int, int] = (16, 64)
    drafted: bool = False
    varlen: bool = False
    history: int = 0
    mixed: bool = False
    call: Callable[[Callable[..., Any], dict[str, Any]], Any] = _forward
    flushes: bool = False
    whole_numbers: bool = False


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


def _prefill(case: "Case", step: int, x: dict[str, Tensor]) -> Made:
    """A piece of each sequence; every further step continues it. Lengths are the case's, the same in each step."""
    lengths = sequence_lengths(case)
    ends = _ends(lengths, case)
    runs = {name: value.new_zeros(len(lengths), max(lengths, default=0), value.shape[1]) for name, value in x.items()}
    for name, value in x.items():
        for sequence, part in enumerate(value.split(lengths)):
            runs[name][sequence, : len(part)] = part
    return {"cu_seqlens": ends}, Tokens(runs, lengths, (0,) * len(lengths), lengths)


def _ends(lengths: tuple[int, ...], case: "Case") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=case.problem.device)


def sequence_lengths(case: "Case") -> tuple[int, ...]:
    """Lengths that add up to the problem's tokens: cut at random; of three sequences and more, one is empty and one has one token."""
    problem, generator, count = case.problem, case.generator(0), case.problem.prefilled
    free = count - 2 if count > 2 and problem.tokens else count
    left = problem.tokens - (free < count)
    cuts = torch.randint(0, left + 1, (max(free - 1, 0),), generator=generator, device=problem.device).sort().values.tolist()
    lengths = [b - a for a, b in pairwise([0, *cuts, left])]
    return (0, *lengths[:-1], 1, lengths[-1]) if free < count else tuple(lengths[:free])


def _mixer(case: "Case", step: int, x: dict[str, Tensor]) -> Made:
    """Contexts, if there are tokens, then a token of each other sequence."""
    problem = case.problem
    if not problem.tokens:
        return _decode(case, step, x)
    lengths, hidden = sequence_lengths(case), x["hidden"]
    parts = hidden.split([*lengths, *[1] * (problem.batch - len(lengths))])
    runs = hidden.new_zeros(problem.batch, max(map(len, parts), default=0), hidden.shape[1])
    for sequence, part in enumerate(parts):
        runs[sequence, : len(part)] = part
    counts = tuple(map(len, parts))
    contexts = tuple(i < len(lengths) for i in range(problem.batch))
    tokens = Tokens({"hidden": runs}, counts, (0,) * len(counts), counts, contexts=contexts)
    return {"cu_seqlens": _ends(lengths, case)}, tokens


def _call_mixer(call: Callable[..., Any], x: dict[str, Any]) -> Any:
    batch = Batch(x.pop("slots"), x.pop("cu_seqlens", None), x.pop("fresh", None))
    return call(x.pop("hidden"), x.pop("weights"), batch=batch, **x)


def anew(others: dict[str, Tensor], fresh: Tensor) -> dict[str, Tensor]:
    """A step's further arguments as they are for sequences that start from zero: nothing is pending."""
    return {name: value.masked_fill(fresh, 0) if name == "accepted" else value for name, value in others.items()}


def no_sequences(others: dict[str, Tensor]) -> dict[str, Tensor]:
    """A step's further arguments for no sequence at all."""
    return {name: value[:1] if name == "cu_seqlens" else value[:0] for name, value in others.items()}


def reverse(others: dict[str, Tensor]) -> dict[str, Tensor]:
    """A step's further arguments for the sequences in reverse order."""
    return {name: value[-1] - value.flip(0) if name == "cu_seqlens" else value.flip(0) for name, value in others.items()}


def accepted_counts(case: "Case", step: int) -> Tensor:
    """int32 [N]: tokens of the step before that the sampler accepted, its golden token included."""
    problem = case.problem
    if step <= 1:
        return torch.zeros(problem.batch, dtype=torch.int32, device=problem.device)
    counts = torch.randint(1, 2 + problem.drafts, (problem.batch,), generator=case.generator(-step), device=problem.device)
    return counts.to(torch.int32)


def _commit(case: "Case", step: int, x: dict[str, Tensor]) -> Made:
    """Drafts of each sequence, raw as a verify leaves them, and how many of them were accepted: any count, at every step."""
    problem = case.problem
    counts = torch.randint(0, 2 + problem.drafts, (problem.batch,), generator=case.generator(-step), device=problem.device).to(torch.int32)
    if problem.batch:
        counts[step % problem.batch] = 1 + problem.drafts
    drafts = _drafts(case, step)
    caches = {"qkv": torch.cat([drafts[name] for name in "qkv"], dim=2), "f": drafts["f"], "beta": drafts["beta"]}
    return {"accepted": counts, **{f"cached_{name}": value for name, value in caches.items()}}, _flushing(drafts, counts - 1)


def _drafts(case: "Case", step: int) -> dict[str, Tensor]:
    """[N, S, D] each, in the dtype of the case."""
    problem = case.problem
    x = regimes.token_inputs(case.regime, case.kda, case.weights["a_log"], problem.batch * problem.drafts, case.generator(2 + step))
    return {name: value.to(problem.activation).unflatten(0, (problem.batch, problem.drafts)) for name, value in x.items()}


def _flushing(drafts: dict[str, Tensor], pending: Tensor) -> Tokens:
    """The first `pending` drafts of each sequence: none has an output, all are stored."""
    counts = tuple(pending.clamp(min=0).tolist())
    return Tokens({name: value[:, : max(counts, default=0)] for name, value in drafts.items()}, counts, counts, counts)


def _flushed_otherwise(case: "Case", step: int, x: dict[str, Tensor]) -> dict[str, Tokens]:
    pending, drafts = _commit(case, step, x)[0]["accepted"] - 1, case.problem.drafts
    counts = {
        "one draft too many replayed": (pending + 1).clamp(max=drafts),
        "one draft too few replayed": pending - 1,
        "every draft replayed, rejected ones too": torch.full_like(pending, drafts),
        "no draft replayed": torch.zeros_like(pending),
    }
    return {cause: _flushing(_drafts(case, step), count) for cause, count in counts.items()}


def _flush(function: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """Fill the caches of named slots, NaN past what is pending, and commit; the output has no rows."""
    replay, slots, accepted = (arguments[name] for name in ("replay", "slots", "accepted"))
    live = (slots >= 0) & (slots < len(arguments["state"]))
    past = torch.arange(replay.drafts, device=slots.device) >= accepted[live, None] - 1
    for name in ("qkv", "f", "beta"):
        getattr(replay, name)[slots[live].long()] = arguments[f"cached_{name}"][live].masked_fill(past[:, :, None], torch.nan)
    taken = ("replay", "conv_weight", "a_log", "dt_bias", "slots", "accepted", "lower_bound")
    function(arguments["state"], arguments["window"], **{name: arguments[name] for name in taken})
    return torch.empty_like(arguments["v"])


PHASES = {
    "kda.decode": Phase(_decode),
    "kda.verify": Phase(_verify, _miscounted, (4, 16), drafted=True, history=1),
    "kda.prefill": Phase(_prefill, steps=(1, 4), varlen=True),
    "kda.commit": Phase(_commit, _flushed_otherwise, (4, 16), drafted=True, call=_flush, flushes=True),
    "kda.verify_offsets": Phase(_decode, steps=(16, 64), drafted=True, whole_numbers=True),
    "kda.mixer": Phase(_mixer, steps=(4, 64), drafted=True, varlen=True, mixed=True, call=_call_mixer),
}
