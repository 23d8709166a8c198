"""Near ties: where a contract rounds inside, healthy noise may round a value that lies near a tie to the other side.

One such flip moves its head by more than a small fault would, so a limit for all heads can't allow for it. It is allowed for
where it can happen: the floor of a head that is off grows by what a flip of each of its own near ties would do. Heads
without near ties keep their floor, and a fault is seen there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parity import limits, metrics
from parity.case import Call, Case
from parity.metrics import Moments
from parity.oracle import Oracle, Prediction
from reference.points import KDA_CELL, At, flipped, grafted, rounding, tapped, tie_distance

GROUP = 512  # heads at a time: what bounds the memory


def allow(oracle: Oracle, call: Call, stored: torch.dtype, output: Moments, state: Moments) -> None:
    """Fill in `ties` of a step's moments, for heads that are off. stored: the pool's dtype.

    Nothing to do, and nothing done, where the contract rounds nothing inside.
    """
    if not oracle.roundings:
        return
    off = torch.zeros_like(output.error, dtype=torch.bool)
    for m, dtype in ((output, call.out.dtype), (state, stored)):  # below half, no head can take a tensor beyond its limit
        off |= metrics.head_ratios(m) > limits.boundary(dtype).tensor / 2
    pairs = off.nonzero()
    for start in range(0, len(pairs), GROUP):
        sequence, head = pairs[start : start + GROUP].unbind(1)
        effects = _Flips(oracle, gather(oracle.case, call, sequence, head)).effects()
        output.ties[sequence, head], state.ties[sequence, head] = effects.square()


@dataclass
class Heads:
    """Heads of some sequences, each with all that its step needs: a batch of its own, since heads share nothing.

    x: activations [M, D]. state [M, V, K], window and conv_weight by section ([M, 3, D], [M, D, 4]), a_log [M], dt_bias
    [M, K].
    """

    x: dict[str, Tensor]
    state: Tensor
    window: tuple[Tensor, ...]
    conv_weight: tuple[Tensor, ...]
    a_log: Tensor
    dt_bias: Tensor

    def __getitem__(self, rows: Tensor) -> "Heads":
        return Heads(
            {name: value[rows] for name, value in self.x.items()}, self.state[rows], tuple(part[rows] for part in self.window),
            tuple(part[rows] for part in self.conv_weight), self.a_log[rows], self.dt_bias[rows],
        )  # fmt: skip

    def predict(self, oracle: Oracle, at: At, dtype: torch.dtype = torch.float64) -> Prediction:
        """The step of these heads as one sequence's: out [1, M, V], state [1, M, V, K]."""
        return oracle.predict(
            {name: value.reshape(1, -1) for name, value in self.x.items()},
            self.state[None],
            torch.cat([part.transpose(0, 1).flatten(1) for part in self.window], dim=1)[None],
            dtype,
            at,
            conv_weight=torch.cat([part.flatten(0, 1) for part in self.conv_weight]),
            a_log=self.a_log,
            dt_bias=self.dt_bias.flatten(),
        )


def gather(case: Case, call: Call, sequence: Tensor, head: Tensor) -> Heads:
    """Head `head[i]` of sequence `sequence[i]`, for every i."""
    count, kda, weights = case.problem.heads, case.kda, case.weights
    sections = [count * kda.key_dim, count * kda.key_dim, count * kda.value_dim]
    return Heads(
        {name: value.unflatten(1, (count, -1))[sequence, head] for name, value in call.inputs.tensors.items()},
        call.state_before[sequence, head],
        tuple(part.unflatten(2, (count, -1))[sequence, :, head] for part in call.window_before.split(sections, dim=2)),
        tuple(part.unflatten(0, (count, -1))[head] for part in weights["conv_weight"].split(sections)),
        weights["a_log"][head],
        weights["dt_bias"].unflatten(0, (count, -1))[head],
    )


class _Flips:
    """The near ties of some heads, and what flipping them does. A head's values stand point after point, [M, W]."""

    def __init__(self, oracle: Oracle, heads: Heads) -> None:
        self.oracle, self.heads = oracle, heads
        self.points = [name for name in KDA_CELL if name in oracle.roundings]
        rounded: dict[str, Tensor] = {}
        values, self.gold = self._run(heads, tapped(rounded, rounding(oracle.roundings), self.points))
        single, _ = self._run(heads, grafted(rounded), torch.float32)
        self.widths = [x.shape[1] for x in values]
        self.values = torch.cat(values, dim=1)
        self.reach = torch.cat([_reach(*pair) for pair in zip(values, single, strict=True)], dim=1)
        self.distance = torch.cat([tie_distance(x, oracle.roundings[point]) for point, x in zip(self.points, values, strict=True)], dim=1)

    def effects(self) -> Tensor:
        """How far the output and the state may be moved, [2, M].

        Element by element: by each near tie alone, added up, and by the values that these flips may carry to a tie of their own.
        """
        near = self.distance <= self.reach
        out, state, shift = (torch.zeros_like(x) for x in (self.gold.out[0], self.gold.state[0], self.values))
        count, order = near.sum(1), near.int().argsort(1, descending=True)
        for rank in range(int(count.max())):
            rows = (count > rank).nonzero().flatten()
            self._add(rows, torch.zeros_like(near[rows]).scatter(1, order[rows, rank, None], True), out, state, shift)
        carried = (self.distance <= self.reach + shift) & ~near
        rows = carried.any(1).nonzero().flatten()
        if len(rows):
            self._add(rows, carried[rows], out, state, shift)
        return torch.stack([out.norm(dim=1), state.flatten(1).norm(dim=1)])

    def _add(self, rows: Tensor, marks: Tensor, out: Tensor, state: Tensor, shift: Tensor) -> None:
        """Add what flipping the marked values moves: the output, the state, and the values before they round."""
        flips = dict(zip(self.points, marks.split(self.widths, dim=1), strict=True))
        if "conv" in flips:
            flips["conv"] = torch.cat([part.flatten() for part in flips["conv"].split(self._sections(1), dim=1)])
        values, moved = self._run(self.heads[rows], flipped(self.oracle.roundings, flips))
        out[rows] += (moved.out[0] - self.gold.out[0, rows]).abs()
        state[rows] += (moved.state[0] - self.gold.state[0, rows]).abs()
        shift[rows] += (torch.cat(values, dim=1) - self.values[rows]).abs()

    def _run(self, heads: Heads, at: At, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Prediction]:
        """The values at each rounding point before they round, [m, values of the head], and the step."""
        values: dict[str, Tensor] = {}

        def watch(name: str, x: Tensor) -> Tensor:
            values[name] = x
            return at(name, x)

        prediction = heads.predict(self.oracle, watch, dtype)
        count = len(heads.state)
        if "conv" in self.points:  # its channels stand section by section, not head by head
            sections = values["conv"][0].split(self._sections(count))
            values["conv"] = torch.cat([part.view(count, -1) for part in sections], dim=1)
        return [values[point].view(count, -1).double() for point in self.points], prediction

    def _sections(self, heads: int) -> list[int]:
        """Channels of q, k and v in so many heads."""
        return [heads * part.shape[1] for part in self.heads.conv_weight]


def _reach(x: Tensor, single: Tensor) -> Tensor:
    """How far healthy noise may carry a value: the FP32 reference's own and an FP32 rounding, a few times over."""
    return limits.FLIP_NOISE * ((single - x).square().mean(1, keepdim=True).sqrt() + torch.finfo(torch.float32).eps * x.abs())
