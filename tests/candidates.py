"""Implementations that are wrong in one way each, for `--impl tests.candidates:NAME`: what the gate must catch and name.

The wrong ones are `reference.kda.decode` with one thing changed, through the reference's own points or pools.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from optimized.implementation import Implementation
from optimized.peers import eager
from reference import kda
from reference.points import ACTIVATION, Contract, rounding

DROPPED_STEP = 101
EAGER = Contract(rounds={"conv": ACTIVATION, "core": ACTIVATION})  # where `eager.decode` rounds


def beta_bf16(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """Beta rounded to BF16 after the sigmoid."""
    return kda.decode(q, k, **arguments, at=rounding({"beta": torch.bfloat16}))


def decay_after_update(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """The new key and value decay too: the state is read and updated first, then decayed."""
    held: dict[str, Tensor] = {}

    def at(point: str, x: Tensor) -> Tensor:
        if point == "decay":
            held[point] = x
            return torch.ones_like(x)
        return x * held["decay"][:, :, None, :] if point == "state" else x

    return kda.decode(q, k, **arguments, at=at)


def stale_slot(q: Tensor, k: Tensor, *, state: Tensor, slots: Tensor, **arguments: Any) -> Tensor:
    """Each sequence starts from the state of the one before it, as with the slots of an earlier batch."""
    own = live(state, slots)
    stale = state.clone()
    stale[own] = state[own.roll(1)]
    out = kda.decode(q, k, state=stale, slots=slots, **arguments)
    state[own] = stale[own]
    return out


def transposed_state(q: Tensor, k: Tensor, *, state: Tensor, slots: Tensor, **arguments: Any) -> Tensor:
    """The pool taken for [K, V]: read and stored transposed."""
    turned = state.mT.contiguous()
    out = kda.decode(q, k, state=turned, slots=slots, **arguments)
    own = live(state, slots)
    state[own] = turned.mT[own]
    return out


def dropped_update(q: Tensor, k: Tensor, *, state: Tensor, **arguments: Any) -> Tensor:
    """The state only decays in the 101st call on one pool; every other call is right."""
    return _with_delta_scaled({DROPPED_STEP: 0.0}, q, k, state=state, **arguments)


def no_update(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """What `dropped_update` does once, at every step."""
    return kda.decode(q, k, **arguments, at=lambda point, x: torch.zeros_like(x) if point == "delta" else x)


def small_then_large(q: Tensor, k: Tensor, *, state: Tensor, **arguments: Any) -> Tensor:
    """Delta 0.1 % too large in the third call on one pool, three times too large in the sixth."""
    return _with_delta_scaled({3: 1.001, 6: 3.0}, q, k, state=state, **arguments)


def healthy(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """Nothing wrong: the eager chain, under its contract."""
    return eager.decode(q, k, **arguments)


healthy.contract = EAGER  # type: ignore[attr-defined]

_calls = WeakIdKeyDictionary()  # by pool: a proof and an invariant have pools of their own, a trajectory has one


def _with_delta_scaled(factors: dict[int, float], q: Tensor, k: Tensor, *, state: Tensor, **arguments: Any) -> Tensor:
    factor = factors.get(call_on(state), 1.0)
    return kda.decode(q, k, state=state, **arguments, at=lambda point, x: x * factor if point == "delta" else x)


def call_on(state: Tensor) -> int:
    """How often a candidate that counts was called on this pool: in a trajectory, the step."""
    _calls[state] = _calls.get(state, 0) + 1
    return int(_calls[state])


def live(state: Tensor, slots: Tensor) -> Tensor:
    """The slots that are in the pool."""
    return slots[(slots >= 0) & (slots < state.shape[0])].long()


def nudge(state: Tensor, slot: int | Tensor) -> None:
    """One value of a slot moves to the next larger one: far below every limit, and never the same bits."""
    value = state[slot, 0, 0, 0]
    state[slot, 0, 0, 0] = torch.nextafter(value, torch.full_like(value, torch.inf))


def given(
    function: Callable[..., Any], contract: Contract | None = EAGER, kernels: tuple[str, ...] = (), runs: bool = True
) -> Implementation:
    """`function` as an implementation of `kda.decode`, under the eager contract unless another one is given."""
    supports = (lambda work: (True, "given")) if runs else (lambda work: (False, "not on this machine"))
    return Implementation("kda.decode", "given", "tests.candidates:healthy", contract, kernels, supports, function=function)
