"""Full precision while a reference runs, whatever the process has set."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` with TF32 off in matrix products, and put the setting back."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision(before)

    return run
