"""The reference as the harness asks it: one step from given states, in a given dtype, with given roundings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity import limits
from parity.case import Case
from reference import kda
from reference.points import At, Contract, exact, flipped, rounding


@dataclass
class Prediction:
    """One step's boundary tensors, unrounded: out [N, H, V], state [N, H, V, K], window [N, 3, channels]."""

    out: Tensor
    state: Tensor
    window: Tensor


class Oracle:
    """Gold for a case under a contract. `lowest` is the least precise floating dtype that any gold passed through."""

    def __init__(self, case: Case, contract: Contract | None) -> None:
        self.case = case
        self.declared = contract is not None
        self.roundings = (contract or Contract()).resolve(case.problem.activation)
        self.lowest = torch.float64

    def predict(
        self, x: dict[str, Tensor], state: Tensor, window: Tensor, dtype: torch.dtype, at: At = exact, **changed: object
    ) -> Prediction:
        """One step from rows `state` [N, H, V, K] and `window` [N, 3, channels]; `changed` replaces weights or settings."""
        case = self.case
        given = {**case.weights, **case.settings, **x, **changed}
        arguments: dict[str, Any] = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in given.items()}
        q, k = arguments.pop("q"), arguments.pop("k")
        new_state, new_window = state.to(dtype).clone(memory_format=torch.contiguous_format), window.to(dtype, copy=True)
        slots = torch.arange(state.shape[0], dtype=torch.int32, device=state.device)
        out = kda.decode(q, k, **arguments, state=new_state, window=new_window, slots=slots, at=at)
        return Prediction(out.unflatten(1, (case.problem.heads, -1)), new_state, new_window)

    def exact(self, x: dict[str, Tensor], state: Tensor, window: Tensor) -> Prediction:
        """FP64, nothing rounded."""
        return self.predict(x, state, window, torch.float64, self._watched(exact))

    def gold(self, x: dict[str, Tensor], state: Tensor, window: Tensor) -> Prediction:
        """FP64, rounded at interior points where the contract says so."""
        return self.predict(x, state, window, torch.float64, self._watched(rounding(self.roundings)))

    def floors(self, x: dict[str, Tensor], state: Tensor, window: Tensor) -> list[Prediction]:
        """What is healthy: the FP32 reference, and the gold with every near tie of an interior rounding gone the other way."""
        single = self.predict(x, state, window, torch.float32, rounding(self.roundings))
        if not self.roundings:
            return [single]
        return [single, self.predict(x, state, window, torch.float64, flipped(self.roundings, limits.FLIP_ULPS))]

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
