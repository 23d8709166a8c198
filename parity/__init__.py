"""What holds: runs candidate and reference from shared states, judges every step, explains the first that is wrong."""

from collections.abc import Callable
from typing import Any

from reference.points import ACTIVATION, Contract

__all__ = ["ACTIVATION", "Contract", "assert_parity", "check"]


def check(case: str, impl: str | Callable[..., Any]) -> dict[str, Any]:
    """The row of `case` (`op:key=value,...`; device: the GPU when there is one) for an implementation's name or a function."""
    import torch

    from optimized import registry
    from parity import gate
    from parity.problem import parse

    if "device=" not in case and torch.cuda.is_available():
        case += f"{',' if ':' in case else ':'}device=cuda"
    problem = parse(case)
    entry = registry.find(problem.op, impl) if isinstance(impl, str) else registry.of_function(problem.op, impl)
    return gate.judge(problem, entry)


def assert_parity(case: str, impl: str | Callable[..., Any]) -> None:
    """For a test of one's own kernel: AssertionError with the verdict, the reason and the first divergence, unless it is PASS."""
    from parity.record import Verdict
    from parity.render import facts

    row = check(case, impl)
    if row["verdict"] != Verdict.PASS:
        told = "\n".join(f"  {label:<11}{text}" for label, text in facts.divergence(row))
        raise AssertionError(f"{row['verdict']} {row['case']}: {row['reason']}\n{told}\n{facts.command(row)}")
