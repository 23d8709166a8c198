"""Operators of whole numbers, judged to the bit against a formula of their own: `kda.verify_offsets`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from optimized.implementation import Implementation
from parity import path
from parity.buffers import same_bits
from parity.problem import Problem
from parity.record import Row, Verdict
from parity.trajectory import CandidateError

NAMES = ("pending", "cu_seqlens")


def expected(accepted: Sequence[int], drafts: int) -> tuple[list[int], list[int]]:
    """What waits of each request, and the row where it would begin if that stood before its tokens; the end of all, unshifted."""
    waits = [count - 1 if count else 0 for count in accepted]
    starts = accumulate((1 + drafts for _ in accepted), initial=0)
    return waits, [start - wait for start, wait in zip(starts, [*waits, 0], strict=True)]


def counts(problem: Problem, step: int) -> Tensor:
    """int32 [N]: nothing accepted, then everything, then any count for each request."""
    most = 1 + problem.drafts
    if step <= 2:
        return torch.full((problem.batch,), (0, most)[step - 1], dtype=torch.int32, device=problem.device)
    generator = torch.Generator(problem.device).manual_seed(problem.seed * 100_003 + step)
    return torch.randint(0, 1 + most, (problem.batch,), generator=generator, device=problem.device).to(torch.int32)


def run(problem: Problem, impl: Implementation) -> Row:
    """Verdict, path, invariants and the first difference of a row."""
    call, first = impl.load(), None
    _, proof = path.observe(impl, lambda: _called(call, counts(problem, 3), problem.drafts), [], problem.device)
    for step in range(1, 1 + problem.steps):
        accepted = counts(problem, step)
        first = first or _difference(step, _called(call, accepted, problem.drafts), accepted, problem.drafts)
    held = dict(_invariants(problem, call, impl.capturable))
    broken = sorted(name for name, kept in held.items() if not kept)
    verdict, reason = (Verdict.PASS, "") if proof.proved else (Verdict.INCONCLUSIVE, proof.reason)
    if first or broken:
        failures = [f"{first['tensor']} differs in step {first['step']}"] if first else []
        verdict, reason = Verdict.FAIL, "; ".join([*failures, *([f"invariants broken: {', '.join(broken)}"] if broken else [])])
    return {"verdict": verdict, "reason": reason, "path": proof.row("int64"), "invariants": held, "first_divergence": first}


def _called(call: Callable[..., Any], accepted: Tensor, drafts: int) -> Any:
    try:
        out = call(accepted, drafts)
    except (Exception, SystemExit) as error:
        raise CandidateError(error) from error
    shapes = [(len(accepted),), (len(accepted) + 1,)]
    ok = isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, Tensor) and x.dtype == torch.int32 for x in out)
    if not ok or [tuple(x.shape) for x in out] != shapes:
        raise CandidateError(TypeError(f"output: expected (pending, cu_seqlens), int32 {shapes[0]} and {shapes[1]}, got {out!r:.80}"))
    return out


def _difference(step: int, out: tuple[Tensor, Tensor], accepted: Tensor, drafts: int) -> dict[str, Any] | None:
    for name, got, right in zip(NAMES, out, expected(accepted.tolist(), drafts), strict=True):
        for request, (value, gold) in enumerate(zip(got.tolist(), right, strict=True)):
            if value != gold:
                return {"step": step, "tensor": name, "sequence": request, "candidate": float(value), "gold": float(gold),
                        "point": name, "cause": f"accepted {accepted[min(request, len(accepted) - 1)]} of 1+{drafts}"}  # fmt: skip
    return None


def _invariants(problem: Problem, call: Callable[..., Any], capturable: bool) -> Iterator[tuple[str, bool]]:
    accepted = counts(problem, 3)
    before = accepted.clone()
    base = _called(call, accepted, problem.drafts)
    yield "inputs_unmodified", same_bits(accepted, before)
    yield "repeated", _same(_called(call, accepted, problem.drafts), base)
    yield "empty_batch", _called(call, accepted[:0], problem.drafts)[1].tolist() == [0]
    if problem.device.startswith("cuda") and capturable:
        graph, fed = torch.cuda.CUDAGraph(), counts(problem, 1)
        with torch.cuda.graph(graph):
            out = _called(call, fed, problem.drafts)
        fed.copy_(accepted)
        graph.replay()
        yield "graph_replay", _same(out, base)


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
