"""Metrics in FP64, kept for each (sequence, head) so that one bad head in thousands is not averaged away."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parity import limits
from parity.limits import Limit


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of `dtype` at |x|, in the dtype of x (FP64)."""
    info = torch.finfo(dtype)
    digits = -math.log2(info.eps)
    exponent = torch.frexp(x).exponent - 1  # |x| in [2^e, 2^(e+1))
    exponent = torch.where(x == 0, -1075, exponent).clamp(min=int(math.log2(info.smallest_normal)))
    return torch.ldexp(torch.ones_like(x), exponent - int(digits) - 1)


def beyond_rounding(candidate: Tensor, gold: Tensor, stored: torch.dtype, ties: Tensor | float = 0.0) -> Tensor:
    """|candidate - gold|, less what storing the gold would cost: half an ulp of a 16-bit boundary, nothing for FP32.

    ties: of each element, what flips of near ties may add to it.
    """
    error = ((candidate - gold).abs() - ties).clamp(min=0)
    if stored != torch.float32:
        error = (error - half_ulp(gold.abs() + ties, stored)).clamp(min=0)  # a flip may carry it past a power of two
    both_tiny = (candidate.abs() < limits.SMALLEST_NORMAL) & (gold.abs() < limits.SMALLEST_NORMAL)
    return error.masked_fill(both_tiny, 0)


def ulp_distance(candidate: Tensor, gold: Tensor) -> Tensor:
    """How many representable values lie between two tensors of one dtype, int64."""
    return (_ordered(candidate) - _ordered(gold)).abs()


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the floats; -0 and +0 are equal."""
    bits = x.contiguous().view(torch.int16 if x.itemsize == 2 else torch.int32).long()
    magnitude = bits & (0x7FFF if x.itemsize == 2 else 0x7FFFFFFF)
    return torch.where(bits < 0, -magnitude, magnitude)


@dataclass
class Moments:
    """Sums of squares of one boundary tensor at one step, each [N, H] in FP64.

    error: candidate against contract gold beyond its rounding. excused: of that, what flips of near ties explain and
    `error` no longer holds. floor: what healthy noise makes of it. gold: of it.
    difference, dot, candidate, exact: of the candidate and the exact gold, for cosine and relative L2.
    """

    error: Tensor
    excused: Tensor
    floor: Tensor
    gold: Tensor
    difference: Tensor
    dot: Tensor
    candidate: Tensor
    exact: Tensor
    non_finite: Tensor  # elements that are not finite where the gold is

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})


def joined(parts: list[Moments]) -> Moments:
    """Moments of runs of sequences, one after the other."""
    return Moments(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def moments(candidate: Tensor, gold: Tensor, exact: Tensor, floor: Tensor, stored: torch.dtype) -> Moments:
    """Moments of a boundary tensor [N, H, ...]: candidate as stored, the golds in FP64, `floor` the gold with healthy noise."""
    candidate = candidate.double()

    def squares(x: Tensor) -> Tensor:
        return x.square().flatten(2).sum(-1)

    finite = candidate.isfinite()
    non_finite = (~finite & gold.isfinite()).flatten(2).sum(-1)
    safe = torch.where(finite, candidate, 0)
    return Moments(
        error=squares(beyond_rounding(safe, gold, stored)),
        excused=torch.zeros_like(non_finite, dtype=torch.float64),
        floor=squares(floor.double() - gold),
        gold=squares(gold),
        difference=squares(safe - exact),
        dot=(safe * exact).flatten(2).sum(-1),
        candidate=squares(safe),
        exact=squares(exact),
        non_finite=non_finite,
    )


@dataclass(frozen=True)
class Ratio:
    """noise_ratio of a tensor and of its worst head, and where that is."""

    tensor: float
    head: float
    worst: tuple[int, int]

    def within(self, limit: Limit) -> bool:
        return self.tensor <= limit.tensor and self.head <= limit.head

    def over(self, limit: Limit) -> float:
        """How many times the limit; over 1 is a failure. What is no number is beyond every limit."""
        shares = (self.tensor / limit.tensor, self.head / limit.head)
        return math.inf if any(map(math.isnan, shares)) else max(shares)


def noise_ratio(m: Moments) -> Ratio:
    """|error| / |floor| of the tensor and of its worst head."""
    if m.error.numel() == 0:
        return Ratio(0.0, 0.0, (0, 0))
    heads = head_ratios(m)
    flat = int(heads.argmax())
    tensor_floor = torch.maximum(m.floor.sum().sqrt(), m.gold.sum().sqrt() * limits.LEAST_FLOOR)
    tensor = _divide(_errors(m).square().sum().sqrt(), tensor_floor)
    return Ratio(float(tensor), float(heads.flatten()[flat]), (flat // heads.shape[1], flat % heads.shape[1]))


def head_ratios(m: Moments) -> Tensor:
    """|error| / |floor| of each head, [N, H]; infinite where the candidate is not finite."""
    return _divide(_errors(m), head_floors(m))


def _errors(m: Moments) -> Tensor:
    return m.error.sqrt().masked_fill(m.non_finite > 0, torch.inf)


def head_floors(m: Moments) -> Tensor:
    """A head's floor, at least the median head's relative floor times its own norm, [N, H]."""
    floor, gold = m.floor.sqrt(), m.gold.sqrt()
    relative = torch.where(gold > 0, floor / gold, torch.inf)
    median = relative[relative.isfinite()].median() if relative.isfinite().any() else torch.tensor(0.0)
    return torch.maximum(floor, gold * median.clamp(min=limits.LEAST_FLOOR).item())


def _divide(error: Tensor, floor: Tensor) -> Tensor:
    """error / floor, 0 where there is no error, inf where there is no floor for one."""
    return torch.where(error == 0, 0.0, error / floor)


def rel_l2(m: Moments) -> float:
    """|candidate - exact| / |exact| of the whole tensor."""
    return _relative(m.difference.sum(), m.exact.sum(), m)


def _relative(difference: Tensor, exact: Tensor, m: Moments) -> float:
    if bool((m.non_finite > 0).any()):
        return math.nan
    return float(difference.sqrt() / exact.sqrt().clamp(min=limits.SMALLEST_NORMAL))


def cosine(m: Moments) -> float:
    """Of the flattened tensor; 1 when both are zero."""
    if bool((m.non_finite > 0).any()):
        return math.nan
    norms = (m.candidate.sum() * m.exact.sum()).sqrt()
    return 1.0 if float(norms) == 0 and float(m.difference.sum()) == 0 else float(m.dot.sum() / norms.clamp(min=limits.SMALLEST_NORMAL))


def worst_head(m: Moments) -> dict[str, float | int] | None:
    """The (sequence, head) with the largest relative L2."""
    if m.error.numel() == 0:
        return None
    relative = m.difference.sqrt() / m.exact.sqrt().clamp(min=limits.SMALLEST_NORMAL)
    relative = relative.masked_fill(m.non_finite > 0, torch.inf)
    flat = int(relative.argmax())
    return {"sequence": flat // relative.shape[1], "head": flat % relative.shape[1], "rel_l2": float(relative.flatten()[flat])}


def excused(m: Moments) -> float:
    """The error that flips of near ties explain, relative to the gold."""
    return float(m.excused.sum().sqrt() / m.gold.sum().sqrt().clamp(min=limits.SMALLEST_NORMAL))


def conditioning(m: Moments) -> float:
    """Relative error of the FP32 reference itself."""
    return float(m.floor.sum().sqrt() / m.gold.sum().sqrt().clamp(min=limits.SMALLEST_NORMAL))
