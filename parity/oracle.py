"""The reference as the harness asks it: one step from given states, in a given dtype, with given roundings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity import limits
from parity.case import Case
from parity.tokens import Tokens
from reference import kda, kda_chunk, kda_mixer, kda_verify
from reference.points import At, Contract, exact, flipped, grafted, rounding, tapped, tie_distance
from reference.precision import full_precision


@dataclass
class Prediction:
    """One step's boundary tensors, unrounded: out [T, H, V], state [N, H, V, K], window [N, 3, channels].

    rounded: what the contract's interior roundings left, by point, token by token; filled in for the gold.
    """

    out: Tensor
    state: Tensor
    window: Tensor
    rounded: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass
class Stored:
    """What a candidate's step left: out [T, H, V], state [N, H, V, K], window [N, 3, channels]."""

    out: Tensor
    state: Tensor
    window: Tensor


@dataclass
class Judged:
    """What a step is judged by. window_held: whose windows are what they may be, bool [N]. at: the gold's contract, as a step of a
    mixer was settled, and cell: the activations that it gave.
    """

    gold: Prediction
    exact: Prediction
    floor: Prediction
    window_held: Tensor
    at: At
    cell: Tokens | None = None


class Oracle:
    """Gold for a case under a contract. `lowest` is the least precise floating dtype that any gold passed through."""

    def __init__(self, case: Case, contract: Contract | None) -> None:
        self.case = case
        self.declared = contract is not None
        self.contract = contract or Contract()
        self.roundings = self.contract.resolve(case.problem.activation)
        self.chunked = self.contract.accumulate != "fp32" and bool(self.roundings)
        # Triton's interpreter multiplies FP32 operands in FP32, tensor cores in TF32
        self.tf32 = self.contract.accumulate == "mma_tf32" and case.problem.device.startswith("cuda")
        self.lowest = torch.float64

    @full_precision
    def predict(
        self, tokens: Tokens, state: Tensor, window: Tensor, dtype: torch.dtype, at: At | Sequence[At] = exact, **changed: object
    ) -> Prediction:
        """One step from rows `state` [N, H, V, K] and `window` [N, 3, channels], in the form that the contract is for.

        at: one for all tokens, or one for each. `changed` replaces weights or settings.
        """
        if self.chunked and callable(at):
            return self._chunks(tokens, state, window, dtype, at, **changed)
        return self._tokens(tokens, state, window, dtype, at, **changed)

    def _chunks(self, tokens: Tokens, state: Tensor, window: Tensor, dtype: torch.dtype, at: At, **changed: object) -> Prediction:
        """The chunk form, whose roundings are those of a kernel's matrix products."""
        given = {**self.case.weights, **self.case.settings, **{name: tokens.packed(x) for name, x in tokens.x.items()}, **changed}
        arguments: dict[str, Any] = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in given.items()}
        q, k = arguments.pop("q"), arguments.pop("k")
        new_state, new_window = state.to(dtype, copy=True).contiguous(), window.to(dtype, copy=True)
        out = kda_chunk.prefill(
            q, k, **arguments, state=new_state, window=new_window, slots=torch.arange(len(state), dtype=torch.int32, device=state.device),
            cu_seqlens=torch.tensor(tokens.offsets, dtype=torch.int32, device=state.device), form=self.contract.form, at=at,
        )  # fmt: skip
        return Prediction(out.unflatten(1, (state.shape[1], -1)), new_state, new_window)

    def _tokens(
        self, tokens: Tokens, state: Tensor, window: Tensor, dtype: torch.dtype, at: At | Sequence[At], **changed: object
    ) -> Prediction:
        """The recurrence, token by token."""
        given = {**self.case.weights, **self.case.settings, **changed}
        weights: dict[str, Any] = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in given.items()}
        x = {name: value.to(dtype) for name, value in tokens.x.items()}
        qkv = torch.cat([x[name] for name in "qkv"], dim=2)
        state, window = state.to(dtype), window.to(dtype)
        stored, outs = (state, window), []
        for t in range(tokens.longest):
            now = at if callable(at) else at[t]
            out, *after = kda.step(qkv[:, t], x["f"][:, t], x["beta"][:, t], x["gate"][:, t], state, window, **weights, at=now)
            outs.append(out)
            state, window = _where(tokens.runs(t), after, (state, window))
            stored = _where(tokens.stores(t), (state, window), stored)
        out = tokens.packed(torch.stack(outs, dim=1)) if outs else qkv.new_zeros(0, state.shape[1] * state.shape[2])
        return Prediction(out.unflatten(1, (state.shape[1], -1)), *stored)

    def exact(self, tokens: Tokens, state: Tensor, window: Tensor) -> Prediction:
        """FP64, nothing rounded."""
        return self._tokens(tokens, state, window, torch.float64, self._watched(exact))

    def gold(self, tokens: Tokens, state: Tensor, window: Tensor) -> Prediction:
        """FP64, rounded at interior points where the contract says so."""
        if self.chunked:
            return self.predict(tokens, state, window, torch.float64, self._watched(rounding(self.roundings)))
        values: list[dict[str, Tensor]] = [{} for _ in range(tokens.longest)]
        ats = [self._watched(tapped(each, rounding(self.roundings), self.roundings)) for each in values]
        gold = self.predict(tokens, state, window, torch.float64, ats)
        gold.rounded = values
        return gold

    def floor(self, tokens: Tokens, state: Tensor, window: Tensor, gold: Prediction) -> Prediction:
        """What is healthy: the FP32 reference, going on from the gold's values where the contract rounds.

        A rounding swallows the noise before it, or flips it at a near tie: that is allowed for head by head, and no noise.
        The chunk form rounds so much that flips are everywhere: there those of all near ties are part of the noise, and so is
        what TF32 makes of the matrices that its contract leaves in FP32.
        """
        if self.chunked:
            healthy = rounding(self.roundings)
            single = self.predict(tokens, state, window, torch.float32, in_tf32(healthy, state.device) if self.tf32 else healthy)
            turned = self.predict(tokens, state, window, torch.float64, all_flipped(self.roundings))
            out = spread(gold.out, single.out, turned.out)
            return Prediction(out, spread(gold.state, single.state, turned.state), gold.window)
        return self.predict(tokens, state, window, torch.float32, [grafted(values) for values in gold.rounded])

    def judged(self, tokens: Tokens, state: Tensor, window: Tensor, stored: Stored) -> Judged:
        """Gold, exact gold and floor of a step from rows, and whether its windows are the raw inputs bit by bit."""
        gold = self.gold(tokens, state, window)
        exact = self.exact(tokens, state, window) if self.roundings else gold
        held = (stored.window == gold.window).flatten(1).all(1)  # raw inputs, which no computation touches
        return Judged(gold, exact, self.floor(tokens, state, window, gold), held, rounding(self.roundings))

    def _watched(self, at: At) -> At:
        def watch(name: str, x: Tensor) -> Tensor:
            if torch.finfo(x.dtype).bits < torch.finfo(self.lowest).bits:
                self.lowest = x.dtype
            return at(name, x)

        return watch


def in_tf32(inner: At, device: torch.device) -> At:
    """Gram matrices and their inverse as far off as products of TF32 operands may be: a draw, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)

    def at(name: str, x: Tensor) -> Tensor:
        if name in ("akk", "aqk", "inv"):
            size = torch.maximum(x.abs(), x.square().mean(-1, keepdim=True).sqrt())
            x = x + limits.TF32_NOISE * size * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=device).where(x != 0, 0)
        return inner(name, x)

    return at


def all_flipped(dtypes: Mapping[str, torch.dtype]) -> At:
    """Every value whose tie its noise may reach rounded to the other side."""

    def at(name: str, x: Tensor) -> Tensor:
        if name not in dtypes:
            return x
        noise = torch.finfo(torch.float32).eps * torch.maximum(x.abs(), x.square().mean(-1, keepdim=True).sqrt())
        return flipped(dtypes, {name: tie_distance(x, dtypes[name]) <= limits.FLIP_NOISE * noise})(name, x)

    return at


def spread(gold: Tensor, *sides: Tensor) -> Tensor:
    """The gold, as far off as the sides are together, and nowhere less than they are on average: a flip may fall anywhere."""
    away = torch.stack([(side.double() - gold).abs() for side in sides]).sum(0)
    return gold + away + gold.abs() * (away.norm() / gold.norm().clamp(min=limits.SMALLEST_NORMAL))


Pair = tuple[Tensor, Tensor]


def _where(which: Tensor | None, new: Sequence[Tensor], old: Pair) -> Pair:
    """`new` for some sequences, `old` for the others; None: new for all."""
    if which is None:
        return new[0], new[1]
    state, window = (torch.where(which.view(-1, *[1] * (b.ndim - 1)), a, b) for a, b in zip(new, old, strict=True))
    return state, window


Operator = Callable[..., Tensor]


def entry_points() -> frozenset[object]:
    """Code of the reference's operators: a candidate that enters one of these is compared with itself."""
    functions = (
        kda.decode,
        kda.prefill,
        kda.step,
        kda_chunk.prefill,
        kda_chunk.chunk_step,
        kda_verify.verify,
        kda_verify.commit,
        kda_mixer.mixer,
        kda_mixer.project,
    )
    return frozenset(getattr(function, "__wrapped__", function).__code__ for function in functions)
