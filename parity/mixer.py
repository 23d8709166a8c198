"""The mixer as the harness asks it: a layer's projections, its cell, the output projection, from given states.

A projection in a 16-bit dtype rounds thousands of values, and in nearly every head healthy noise turns one of them to the
other side of its tie. A decode step shows which: its raw q, k and v are the newest tap of the window, judged by themselves;
what it took for the decay and for beta is read off the state (`settle`). The gold goes on from there, so that state and
output are held to the limits of the cell. What turns behind the state, in the gate and in the cell's output, is part of the
output's floor, and so is every near tie of a prefill and of a verify, whose tokens nobody sees one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity import limits, metrics, settle, ties
from parity.case import Call, Case, Pools
from parity.metrics import Moments
from parity.oracle import Judged, Oracle, Prediction, Stored, spread
from parity.tokens import Tokens
from reference import kda_mixer
from reference.kda_weights import KdaWeights
from reference.points import KDA, At, Contract, exact, flipped, grafted, other_side, rounding, tie_distance
from reference.precision import full_precision


class MixerOracle(Oracle):
    """Gold of a mixer under one contract."""

    def __init__(self, case: Case, contract: Contract | None) -> None:
        super().__init__(case, contract)
        cell = {point: dtype for point, dtype in (contract.rounds if contract else {}).items() if point in KDA[:-1]}
        accumulate = contract.accumulate if contract else "fp32"
        self.cell = Oracle(case, Contract(rounds=cell, accumulate=accumulate) if contract else None)
        self._weights: dict[torch.dtype, KdaWeights] = {}

    def weights(self, dtype: torch.dtype) -> KdaWeights:
        """The layer in a dtype, once."""
        assert self.case.layer is not None
        if dtype not in self._weights:
            self._weights[dtype] = KdaWeights(**{name: x.to(dtype) for name, x in vars(self.case.layer).items()})
        return self._weights[dtype]

    @full_precision
    def predict(self, tokens: Tokens, state: Tensor, window: Tensor, dtype: torch.dtype, at: Any = exact, **changed: Any) -> Prediction:
        """One step from rows; `changed` replaces the cell's weights or settings, or `layer` the layer's."""
        layer = changed.pop("layer", None)
        layer = self.weights(dtype) if layer is None else KdaWeights(**{name: x.to(dtype) for name, x in vars(layer).items()})
        x = kda_mixer.project(tokens.x["hidden"].to(dtype), layer, at)
        cell = self.cell.predict(replace(tokens, x=x), state, window, dtype, at, **changed)
        return replace(cell, out=self._projected(cell.out, layer, at))

    def _projected(self, core: Tensor, layer: KdaWeights, at: At = exact) -> Tensor:
        return at("o_proj", core.flatten(1) @ layer.o_proj.T)[:, None]

    def gold(self, tokens: Tokens, state: Tensor, window: Tensor) -> Prediction:
        """FP64, rounded at interior points where the contract says so."""
        return self.predict(tokens, state, window, torch.float64, self._watched(rounding(self.roundings)))

    def exact(self, tokens: Tokens, state: Tensor, window: Tensor) -> Prediction:
        """FP64, nothing rounded."""
        return self.predict(tokens, state, window, torch.float64, self._watched(exact))

    def judged(self, tokens: Tokens, state: Tensor, window: Tensor, stored: Stored) -> Judged:
        """Gold, exact gold and floor of a step that left `stored`, and whose windows are within their limit."""
        raw: dict[str, Tensor] = {}
        rounded: dict[str, Tensor] = {}
        x = tokens.x["hidden"]
        kda_mixer.project(x.double(), self.weights(torch.float64), _seen(raw, _seen(rounded, rounding(self.roundings), after=True)))
        single: dict[str, Tensor] = {}
        kda_mixer.project(x.float(), self.weights(torch.float32), _seen(single, grafted(rounded if self.roundings else {})))
        noise = {point: self._noise(point, raw[point], single[point]) for point in raw}
        held = self._window_held(tokens, window, stored.window, raw["proj_qkv"], noise["proj_qkv"])
        exactly = self.exact(tokens, state, window)
        if tokens.longest > 1:
            gold = self.gold(tokens, state, window)
            return Judged(gold, exactly, self._spread(tokens, state, window, gold), held, rounding(self.roundings))
        gold, floor, own, cell = self._decoded(tokens, state, window, stored, raw, noise)
        return Judged(gold, exactly, floor, held, grafted(own, rounding(self.roundings)), cell)

    def allow(self, call: Call, cells: Sequence[Tokens], pools: Pools, state: Moments) -> None:
        """Near ties inside the cell, for the activations that decode steps were settled on."""
        if not cells:
            return
        x = {name: torch.cat([part.x[name][:, 0] for part in cells]) for name in cells[0].x}
        nothing = Moments(**{name: torch.zeros_like(state.error) for name in vars(state)})  # a cell's output is nobody's
        core = call.out.new_zeros(*state.error.shape, self.case.kda.value_dim)
        ties.allow(self.cell, replace(call, inputs=replace(call.inputs, tokens=Tokens.single(x)), out=core), pools, nothing, state)

    def mistaken(self) -> Iterator[tuple[str, str, KdaWeights]]:
        """Point, cause and weights of a layer that was put together wrong."""
        layer = self.weights(torch.float64)
        yield "proj_f_a", "f_a and g_a swapped", replace(layer, f_a_proj=layer.g_a_proj, g_a_proj=layer.f_a_proj)
        yield "proj_qkv", "q and k swapped", replace(layer, q_proj=layer.k_proj, k_proj=layer.q_proj)
        one = self.case.kda.value_dim
        for cause, columns in (("before", one), ("after", -one)):
            yield "o_proj", f"o_proj of the head {cause}", replace(layer, o_proj=layer.o_proj.roll(columns, 1))

    def _decoded(
        self, tokens: Tokens, state: Tensor, window: Tensor, stored: Stored,
        raw: dict[str, Tensor], noise: dict[str, Tensor],
    ) -> tuple[Prediction, Prediction, dict[str, Tensor], Tokens]:  # fmt: skip
        """Gold and floor of a decode step, the projections that they go on from, and the cell's activations."""
        found = settle.settle(self, tokens, state, window, stored, raw, noise)
        own = {"proj_qkv": stored.window[:, 2:].double()} | found.likely
        wide, contract = self.weights(torch.float64), rounding(self.roundings)
        before: dict[str, Tensor] = {}  # what rounds, and what it rounds to
        rounded: dict[str, Tensor] = {}
        settled = replace(tokens, x=kda_mixer.project(tokens.x["hidden"].double(), wide, grafted(own, contract)))
        self.cell.predict(settled, state, window, torch.float64, _seen(rounded, contract, after=True))
        gate = settle.settle_gate(self, rounded["norm"], stored.out, raw, noise)
        own |= gate.likely
        found = settle.Settled(found.likely | gate.likely, found.turned | gate.turned)
        settled = replace(tokens, x=kda_mixer.project(tokens.x["hidden"].double(), wide, _seen(before, grafted(own, contract))))

        watched = self._watched(_seen(before, _seen(rounded, contract, after=True)))
        gold = self.cell.predict(settled, state, window, torch.float64, watched)
        gold.rounded = [{point: rounded[point] for point in self.cell.roundings}]
        gold.window[:, -1] = contract("proj_qkv", raw["proj_qkv"][:, 0])
        out = self._projected(rounded["out"], wide)
        summed = self._truncation(rounded["out"].flatten(1).shape[1], out)
        narrow = self.weights(torch.float32)
        if not self.roundings:
            start = replace(tokens, x=kda_mixer.project(tokens.x["hidden"].float(), narrow, grafted(own)))
            floor = self.cell.floor(start, state, window, gold)
            return replace(gold, out=out), replace(floor, out=self._projected(floor.out, narrow)), own, settled
        floor = self.cell.floor(settled, state, window, gold)
        one = self._projected(rounded["out"].float(), narrow)
        turned = self._turned(settled, found.turned, state, window, before, noise, floor)
        floor.out = _away(out, one, turned.out) + summed
        floor.state = _away(gold.state, floor.state, turned.state)
        return replace(gold, out=out), floor, own, settled

    def _turned(
        self, tokens: Tokens, x: dict[str, Tensor], state: Tensor, window: Tensor,
        before: dict[str, Tensor], noise: dict[str, Tensor], floor: Prediction,
    ) -> Prediction:  # fmt: skip
        """Output and state with every near tie on the other side: the output of those that nothing shows, the state of those left open.

        before: the gold's values before they round. Where a tie that turned moves a value, its own tie may be as far away.
        """
        wide, contract, eps = self.weights(torch.float64), rounding(self.roundings), torch.finfo(torch.float32).eps

        def at(name: str, value: Tensor) -> Tensor:
            if name not in self.roundings:
                return value
            gold, dtype = before[name], self.roundings[name]
            if name in noise:
                reach = noise[name]
            else:
                off = (floor.out - gold).square().mean(-1, keepdim=True).sqrt() if name == "out" else 0.0
                reach = limits.FLIP_NOISE * (off + eps * torch.maximum(gold.abs(), gold.square().mean(-1, keepdim=True).sqrt()))
            near, moved = contract(name, gold), contract(name, value)
            turned = torch.where(tie_distance(gold, dtype) <= reach + 2 * (value - gold).abs(), other_side(gold, near, dtype), near)
            return torch.where((turned - near).abs() > (moved - near).abs(), turned, moved)

        gate = at("proj_g", x["proj_g_a"] @ wide.g_b_proj.T) if "proj_g_a" in x else tokens.x["gate"]
        own = replace(tokens, x=tokens.x | {"f": x.get("proj_f", tokens.x["f"]), "beta": x.get("proj_b", tokens.x["beta"])})
        after = self.cell.predict(own, state, window, torch.float64, contract)
        hidden = self.cell.predict(replace(own, x=own.x | {"gate": gate}), state, window, torch.float64, at)
        return replace(after, out=self._projected(hidden.out, wide))

    def _spread(self, tokens: Tokens, state: Tensor, window: Tensor, gold: Prediction) -> Prediction:
        """The floor where no value is seen: FP32, and every near tie on the other side."""
        one = self.predict(tokens, state, window, torch.float32, rounding(self.roundings))
        turned = self.predict(tokens, state, window, torch.float64, self._all_flipped())
        summed = self._truncation(self.case.problem.heads * self.case.kda.value_dim, gold.out)
        return Prediction(spread(gold.out, one.out, turned.out) + summed, spread(gold.state, one.state, turned.state), gold.window)

    def _all_flipped(self) -> At:
        eps = torch.finfo(torch.float32).eps

        def at(name: str, x: Tensor) -> Tensor:
            if name not in self.roundings:
                return x
            size = torch.maximum(x.abs(), x.square().mean(-1, keepdim=True).sqrt())
            reach = limits.FLIP_NOISE * eps * size + self._truncation(self._depth(name), x)
            return flipped(self.roundings, {name: tie_distance(x, self.roundings[name]) <= reach})(name, x)

        return at

    def _noise(self, point: str, x: Tensor, single: Tensor) -> Tensor:
        """How far healthy noise carries a projected value: FP32 sums, in another order and on tensor cores."""
        eps = torch.finfo(torch.float32).eps
        away = (single.double() - x).square().mean(-1, keepdim=True).sqrt() + eps * x.abs()
        return limits.FLIP_NOISE * away + self._truncation(self._depth(point), x)

    def _depth(self, point: str) -> int:
        """Products that a projection adds up; 0 for what is no projection."""
        if not point.startswith("proj_"):
            return 0
        return self.case.kda.key_dim if point in ("proj_f", "proj_g") else self.case.problem.shape.hidden

    def _truncation(self, depth: int, x: Tensor) -> Tensor:
        if self.case.problem.activation == torch.float32:
            return torch.zeros_like(x)
        return depth * limits.MMA_TRUNCATION * x.square().mean(-1, keepdim=True).sqrt().expand_as(x)

    def _window_held(self, tokens: Tokens, before: Tensor, after: Tensor, raw: Tensor, noise: Tensor) -> Tensor:
        """[N] bool: carried taps bit by bit, new ones the projection of their token within the limits of a stored tensor."""
        held = []
        problem, kda = self.case.problem, self.case.kda
        sections = [problem.heads * kda.key_dim] * 2 + [problem.heads * kda.value_dim]
        for i, count in enumerate(tokens.stored):
            new = min(count, 3)
            carried = torch.equal(after[i, : 3 - new], before[i, new:]) if new < 3 else True
            taps, values, reach = after[i, 3 - new :], raw[i, count - new : count], noise[i, count - new : count]
            far = False
            for tap, value, away in zip(*(x.split(sections, dim=1) for x in (taps, values, reach)), strict=True):
                own, gold, floor = (x.unflatten(1, (problem.heads, -1)) for x in (tap, value, value + away / limits.FLIP_NOISE))
                m = metrics.moments(own, gold, gold, floor, problem.activation)
                far |= not metrics.noise_ratio(m).within(limits.boundary(problem.activation))
            held.append(carried and not far)
        return torch.tensor(held, dtype=torch.bool, device=after.device)


def oracle_of(case: Case, contract: Contract | None, contexts: Contract | None) -> Oracle:
    """The oracle of a case's operator: of a cell, or of a mixer."""
    return Oracle(case, contract) if case.layer is None else MixerOracle(case, contract)


def _away(gold: Tensor, *sides: Tensor) -> Tensor:
    """The gold, as far off as the sides are together."""
    return gold + torch.stack([(side.double() - gold).abs() for side in sides]).sum(0)


def _seen(values: dict[str, Tensor], inner: At, after: bool = False) -> At:
    """Keep each value before (or after) `inner`."""

    def at(name: str, x: Tensor) -> Tensor:
        y = inner(name, x)
        values[name] = y if after else x
        return y

    return at
