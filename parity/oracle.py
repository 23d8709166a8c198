"""The reference as the harness asks it: one step from given states, in a given dtype, with given roundings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.case import Case
from reference import kda
from reference.points import At, Contract, exact, grafted, rounding, tapped
from reference.precision import full_precision


@dataclass
class Prediction:
    """One step's boundary tensors, unrounded: out [N, H, V], state [N, H, V, K], window [N, 3, channels].

    rounded: what the contract's interior roundings left, by point; filled in for the gold.
    """

    out: Tensor
    state: Tensor
    window: Tensor
    rounded: dict[str, Tensor] = field(default_factory=dict)


class Oracle:
    """Gold for a case under a contract. `lowest` is the least precise floating dtype that any gold passed through."""

    def __init__(self, case: Case, contract: Contract | None) -> None:
        self.case = case
        self.declared = contract is not None
        self.roundings = (contract or Contract()).resolve(case.problem.activation)
        self.lowest = torch.float64

    @full_precision
    def predict(
        self, x: dict[str, Tensor], state: Tensor, window: Tensor, dtype: torch.dtype, at: At = exact, **changed: object
    ) -> Prediction:
        """One step from rows `state` [N, H, V, K] and `window` [N, 3, channels]; `changed` replaces weights or settings."""
        given = {**self.case.weights, **self.case.settings, **x, **changed}
        arguments: dict[str, Any] = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in given.items()}
        qkv = torch.cat([arguments.pop(name) for name in "qkv"], dim=1)
        f, beta, gate = (arguments.pop(name) for name in ("f", "beta", "gate"))
        out, new_state, new_window = kda.step(qkv, f, beta, gate, state.to(dtype), window.to(dtype), **arguments, at=at)
        return Prediction(out.unflatten(1, (state.shape[1], -1)), new_state, new_window)

    def exact(self, x: dict[str, Tensor], state: Tensor, window: Tensor) -> Prediction:
        """FP64, nothing rounded."""
        return self.predict(x, state, window, torch.float64, self._watched(exact))

    def gold(self, x: dict[str, Tensor], state: Tensor, window: Tensor) -> Prediction:
        """FP64, rounded at interior points where the contract says so."""
        values: dict[str, Tensor] = {}
        gold = self.predict(x, state, window, torch.float64, self._watched(tapped(values, rounding(self.roundings), self.roundings)))
        gold.rounded = values
        return gold

    def floor(self, x: dict[str, Tensor], state: Tensor, window: Tensor, gold: Prediction) -> Prediction:
        """What is healthy: the FP32 reference, going on from the gold's values where the contract rounds.

        A rounding swallows the noise before it, or flips it at a near tie: that is settled head by head, and no noise.
        """
        return self.predict(x, state, window, torch.float32, grafted(gold.rounded))

    def _watched(self, at: At) -> At:
        def watch(name: str, x: Tensor) -> Tensor:
            if torch.finfo(x.dtype).bits < torch.finfo(self.lowest).bits:
                self.lowest = x.dtype
            return at(name, x)

        return watch


Operator = Callable[..., Tensor]


def entry_points() -> frozenset[object]:
    """Code of the reference's operators: a candidate that enters one of these is compared with itself."""
    functions = (kda.decode, kda.prefill, kda.step)
    return frozenset(getattr(function, "__wrapped__", function).__code__ for function in functions)
