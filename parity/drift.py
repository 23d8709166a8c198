"""The absolute limits on drift: of one operator, on the problems that they were stated for."""

from typing import Any

import torch

from parity import limits
from parity.problem import Problem

Entry = dict[str, Any]  # of a row's drift


def limit(problem: Problem) -> limits.DriftLimit | None:
    """The limit on a problem's drift, if it has one."""
    mixer = problem.op == "kda.mixer" and not (problem.tokens or problem.drafts) and problem.regime == "random"
    stored = problem.state_dtype == "fp32" and problem.activation != torch.float32
    return limits.MIXER_DRIFT if mixer and stored and problem.heads >= limits.MIXER_DRIFT.least_heads else None


def judged(problem: Problem, drift: list[Entry]) -> dict[str, Any] | None:
    """The worst of each quantity over the steps that the limit is for, its limit, and how many times the limit it is."""
    bound = limit(problem)
    if bound is None or not drift:
        return None
    steps = drift[: bound.steps]
    found = {
        "output rel L2": (max(entry["rel_l2"] for entry in steps), bound.rel_l2),
        "output 1-cos": (max(1 - entry["cosine"] for entry in steps), 1 - bound.cosine),
        "state rel L2": (max(entry["state_rel_l2"] for entry in steps), bound.state_rel_l2),
    }
    return {name: {"worst": worst, "limit": most, "over": worst / most} for name, (worst, most) in found.items()}


def beyond(found: dict[str, Any] | None) -> list[str]:
    """A sentence for each quantity beyond its limit; NaN is."""
    return [
        f"{name} drifts to {entry['worst']:.3g}, over the absolute limit of {entry['limit']:.3g}"
        for name, entry in (found or {}).items() if not entry["over"] <= 1
    ]  # fmt: skip
