"""Near ties: where a contract rounds inside, healthy noise may round a value that lies near a tie to the other side.

One such flip moves its head by more than a small fault would, so a limit for all heads can't allow for it. It is allowed for
where it can happen: each element of a head that is off may be wrong by what flips of the head's own near ties would do to
this element, added up. What is beyond that is the head's error. Its floor grows only by how flips of one head bend each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity import limits, metrics
from parity.case import Call, Case, Pools
from parity.metrics import Moments
from parity.oracle import Oracle, Prediction
from parity.tokens import Tokens
from reference.points import KDA_CELL, At, flipped, grafted, rounding, tapped, tie_distance

Shape = tuple[int, int, int]
GROUP = 192  # heads at a time: what bounds the memory


def allow(oracle: Oracle, call: Call, pools: Pools, output: Moments, state: Moments) -> None:
    """Take what near ties explain out of the errors of a step's moments, for heads that are off. pools: after the step.

    Nothing to do, and nothing done, where the contract rounds nothing inside.
    """
    if not oracle.roundings or oracle.chunked:
        return
    tokens = call.inputs.tokens
    dtypes = call.out.dtype, pools.state.dtype
    off = [metrics.head_ratios(m) > limits.boundary(dtype).tensor / 2 for m, dtype in zip((output, state), dtypes, strict=True)]
    starts = torch.tensor(tokens.offsets, device=off[0].device)
    owner = torch.repeat_interleave(torch.arange(len(tokens.length), device=starts.device), starts.diff())  # of each row of the output
    pairs = off[1].index_put((owner,), off[0], accumulate=True).nonzero()  # below half, no head can take a tensor beyond its limit
    for shape, group in _groups(tokens, pairs):
        sequence, head = group.unbind(1)
        flips = _Flips(oracle, gather(oracle.case, call, sequence, head, shape))
        out, after = flips.effects()
        rows = starts[sequence, None] + torch.arange(out.shape[1], device=starts.device)
        _excuse(output, (rows, head[:, None]), call.out[rows, head[:, None]], flips.gold.out.transpose(0, 1), out)
        _excuse(state, (sequence, head), pools.state[pools.index[sequence], head], flips.gold.state[0], after)


def _excuse(m: Moments, where: tuple[Tensor, ...], candidate: Tensor, gold: Tensor, ties: Tensor) -> None:
    """Errors of some heads, each element less what near ties may have moved it."""
    finite = torch.where(candidate.isfinite(), candidate.double(), 0)
    error = m.error[where]

    def squares(x: Tensor) -> Tensor:
        return x.square().flatten(error.ndim).sum(-1)

    left = squares(metrics.beyond_rounding(finite, gold, candidate.dtype, ties))
    m.excused[where], m.error[where] = (error - left).clamp(min=0), left
    m.floor[where] = (m.floor[where].sqrt() + limits.FLIPS_TOGETHER * squares(ties).sqrt()).square()


def _groups(tokens: Tokens, pairs: Tensor) -> Iterator[tuple[Shape, Tensor]]:
    """(sequence, head) pairs whose sequences run alike, so that they can be heads of one sequence."""
    shapes = list(zip(tokens.length, tokens.replayed, tokens.stored, strict=True))
    for shape in (shape for shape in dict.fromkeys(shapes) if shape[0]):  # without a token nothing rounds
        alike = torch.tensor([own == shape for own in shapes], device=pairs.device)
        yield from ((shape, group) for group in pairs[alike[pairs[:, 0]]].split(GROUP) if len(group))


@dataclass
class Heads:
    """Heads of sequences that run alike, each with all that its step needs: heads of one sequence, since heads share nothing.

    x: activations [M, L, D]. state [M, V, K], window and conv_weight by section ([M, 3, D], [M, D, 4]), a_log [M], dt_bias
    [M, K]. shape: length, replayed and stored of `Tokens`.
    """

    x: dict[str, Tensor]
    state: Tensor
    window: tuple[Tensor, ...]
    conv_weight: tuple[Tensor, ...]
    a_log: Tensor
    dt_bias: Tensor
    shape: Shape

    def __getitem__(self, rows: Tensor) -> "Heads":
        return Heads(
            {name: value[rows] for name, value in self.x.items()}, self.state[rows], tuple(part[rows] for part in self.window),
            tuple(part[rows] for part in self.conv_weight), self.a_log[rows], self.dt_bias[rows], self.shape,
        )  # fmt: skip

    def predict(self, oracle: Oracle, at: Sequence[At], dtype: torch.dtype = torch.float64) -> Prediction:
        """The step of these heads as one sequence's: out [T, M, V], state [1, M, V, K]."""
        x = {name: value.transpose(0, 1).flatten(1)[None] for name, value in self.x.items()}
        return oracle.predict(
            Tokens(x, *((count,) for count in self.shape)),
            self.state[None],
            torch.cat([part.transpose(0, 1).flatten(1) for part in self.window], dim=1)[None],
            dtype,
            at,
            conv_weight=torch.cat([part.flatten(0, 1) for part in self.conv_weight]),
            a_log=self.a_log,
            dt_bias=self.dt_bias.flatten(),
        )


def gather(case: Case, call: Call, sequence: Tensor, head: Tensor, shape: Shape) -> Heads:
    """Head `head[i]` of sequence `sequence[i]`, for every i."""
    count, kda, weights = case.problem.heads, case.kda, case.weights
    sections = [count * kda.key_dim, count * kda.key_dim, count * kda.value_dim]
    longest = shape[0]
    return Heads(
        {name: value[:, :longest].unflatten(2, (count, -1))[sequence, :, head] for name, value in call.inputs.tokens.x.items()},
        call.state_before[sequence, head],
        tuple(part.unflatten(2, (count, -1))[sequence, :, head] for part in call.window_before.split(sections, dim=2)),
        tuple(part.unflatten(0, (count, -1))[head] for part in weights["conv_weight"].split(sections)),
        weights["a_log"][head],
        weights["dt_bias"].unflatten(0, (count, -1))[head],
        shape,
    )


class _Flips:
    """The near ties of some heads, and what flipping them does. A head's values stand token by token, [M, L, W]."""

    def __init__(self, oracle: Oracle, heads: Heads) -> None:
        self.oracle, self.heads, self.longest = oracle, heads, heads.shape[0]
        self.points = [name for name in KDA_CELL if name in oracle.roundings]
        rounded: list[dict[str, Tensor]] = [{} for _ in range(self.longest)]
        values, self.gold = self._run(heads, [tapped(each, rounding(oracle.roundings), self.points) for each in rounded])
        single, _ = self._run(heads, [grafted(each) for each in rounded], torch.float32)
        self.widths = [x.shape[2] for x in values]
        self.values = torch.cat(values, dim=2)
        self.reach = torch.cat([_reach(*pair) for pair in zip(values, single, strict=True)], dim=2)
        self.distance = torch.cat([tie_distance(x, oracle.roundings[point]) for point, x in zip(self.points, values, strict=True)], dim=2)

    def effects(self) -> tuple[Tensor, Tensor]:
        """How far each element of the output [M, T, V] and the state [M, V, K] may be moved.

        By each near tie alone, added up, and by the values that these flips may carry to a tie of their own.
        """
        near = (self.distance <= self.reach).flatten(1)
        out, state, shift = (torch.zeros_like(x) for x in (self.gold.out.transpose(0, 1), self.gold.state[0], self.values))
        count, order = near.sum(1), near.int().argsort(1, descending=True)
        for rank in range(int(count.max())):
            rows = (count > rank).nonzero().flatten()
            self._add(rows, torch.zeros_like(near[rows]).scatter(1, order[rows, rank, None], True), out, state, shift)
        carried = (self.distance <= self.reach + shift).flatten(1) & ~near
        rows = carried.any(1).nonzero().flatten()
        if len(rows):
            self._add(rows, carried[rows], out, state, shift)
        return out, state

    def _add(self, rows: Tensor, marks: Tensor, out: Tensor, state: Tensor, shift: Tensor) -> None:
        """Add what flipping the marked values moves: the output, the state, and the values before they round."""
        ats = [flipped(self.oracle.roundings, self._flips(marks)) for marks in marks.unflatten(1, (self.longest, -1)).unbind(1)]
        values, moved = self._run(self.heads[rows], ats)
        out[rows] += (moved.out - self.gold.out[:, rows]).abs().transpose(0, 1)
        state[rows] += (moved.state[0] - self.gold.state[0, rows]).abs()
        shift[rows] += (torch.cat(values, dim=2) - self.values[rows]).abs()

    def _flips(self, marks: Tensor) -> dict[str, Tensor]:
        """Marks of one token, [m, W], by point and in its order of values."""
        flips = dict(zip(self.points, marks.split(self.widths, dim=1), strict=True))
        if "conv" in flips:  # its channels stand section by section, not head by head
            flips["conv"] = torch.cat([part.flatten() for part in flips["conv"].split(self._sections(1), dim=1)])
        return flips

    def _run(self, heads: Heads, ats: list[At], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Prediction]:
        """The values at each rounding point before they round, [m, L, values of the head], and the step."""
        seen: list[dict[str, Tensor]] = [{} for _ in ats]
        prediction = heads.predict(self.oracle, [_watched(values, at) for values, at in zip(seen, ats, strict=True)], dtype)
        return [torch.stack([self._by_head(point, values[point]) for values in seen], dim=1).double() for point in self.points], prediction

    def _by_head(self, point: str, x: Tensor) -> Tensor:
        if point != "conv":
            return x.flatten(2)[0] if x.ndim > 2 else x.T
        heads = x.shape[1] // sum(self._sections(1))
        return torch.cat([part.view(heads, -1) for part in x[0].split(self._sections(heads))], dim=1)

    def _sections(self, heads: int) -> list[int]:
        """Channels of q, k and v in so many heads."""
        return [heads * part.shape[1] for part in self.heads.conv_weight]


def _watched(values: dict[str, Tensor], at: At) -> At:
    def watch(name: str, x: Tensor) -> Tensor:
        values[name] = x
        return at(name, x)

    return watch


def _reach(x: Tensor, single: Tensor) -> Tensor:
    """How far healthy noise may carry a value: the FP32 reference's own and an FP32 rounding, a few times over."""
    return limits.FLIP_NOISE * ((single - x).square().mean(2, keepdim=True).sqrt() + torch.finfo(torch.float32).eps * x.abs())
