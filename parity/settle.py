"""Which way the near ties of a mixer's projections fell, read off the state and the output that a decode step left.

A value of f sets the decay of one column of a head's state, a value of beta how much is written to it: both show in what the
step made of the state. A value of f_a moves f in every head, one of g_a the gate of every output. Only
a value within the noise of its tie has a choice, so a wrong value is taken for the tie that lies nearest and stays wrong by the
rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity import limits, metrics
from parity.tokens import Tokens
from reference import kda
from reference.points import other_side, rounding, tapped, tie_distance

if TYPE_CHECKING:
    from parity.mixer import MixerOracle
    from parity.oracle import Stored

ROUNDS = 3  # what is read off depends a little on what was settled before


@dataclass
class Evidence:
    """What the state says, with weights of 1 over the square of its noise: decay [N, H, K] and write strength [N, H], 0 to 1."""

    decay: Tensor
    weight: Tensor
    beta: Tensor
    beta_weight: Tensor

    def of_beta(self, logit: Tensor) -> Tensor:
        """How far each logit [N, H] is from it, in squares of its noise."""
        return self.beta_weight * (logit.sigmoid() - self.beta).square()


@dataclass
class Settled:
    """Projections [N, 1, D] by point, as the candidate is likeliest to have rounded them, and with every tie that is left open
    on the other side. Both empty where no projection rounds.
    """

    likely: dict[str, Tensor]
    turned: dict[str, Tensor]


def settle(
    layer: "MixerOracle", tokens: Tokens, state: Tensor, window: Tensor, stored: "Stored", raw: dict[str, Tensor], noise: dict[str, Tensor]
) -> Settled:
    """What a decode step that left `stored` took for f_a, f and beta; raw: before they round, noise: how near a tie is near."""
    dtypes = layer.roundings
    if not {"proj_f_a", "proj_f", "proj_b"} <= dtypes.keys():
        return Settled({}, {})
    columns, contract = layer.weights(torch.float64).f_b_proj.T, rounding(dtypes)  # [R, H*K]
    qkv = stored.window[:, 2].double()
    low, beta = (
        _Ties(contract(point, raw[point][:, 0]), raw[point][:, 0], noise[point][:, 0], dtypes[point]) for point in ("proj_f_a", "proj_b")
    )
    reach = noise["proj_f"][:, 0]
    f = _Ties(contract("proj_f", low.value @ columns), low.value @ columns, reach, dtypes["proj_f"])
    for _ in range(ROUNDS):
        seen = _evidence(layer, qkv, f.value, beta.value, state, window, stored.state)
        f_raw = _descend(low, columns, partial(_fit, layer, seen, noise=noise))
        moves = torch.where(low.near, (low.other - low.value).abs(), 0.0) @ columns.abs()  # of f, by ties of f_a that were mistaken
        f = _Ties(contract("proj_f", f_raw), f_raw, reach + moves, dtypes["proj_f"])
        f.turn(f.near & (_misfit(layer, seen, f.other) < _misfit(layer, seen, f.value)))
        seen = _evidence(layer, qkv, f.value, beta.value, state, window, stored.state)
        beta.turn(beta.near & (seen.of_beta(beta.other) < seen.of_beta(beta.value)))
    open_f = f.near & _undecided(_misfit(layer, seen, f.other), _misfit(layer, seen, f.value))
    open_beta = beta.near & _undecided(seen.of_beta(beta.other), seen.of_beta(beta.value))
    turned = {
        point: torch.where(which, ties.other, ties.value)
        for point, ties, which in (("proj_f_a", low, low.open), ("proj_f", f, open_f), ("proj_b", beta, open_beta))
    }
    likely = dict(proj_f_a=low.value, proj_f=f.value, proj_b=beta.value)
    return Settled(*({name: value[:, None] for name, value in side.items()} for side in (likely, turned)))


class _Ties:
    """Rounded values [N, D], the other side of the tie of each, which are near it, and which of these nothing decides."""

    def __init__(self, value: Tensor, raw: Tensor, reach: Tensor, dtype: torch.dtype) -> None:
        self.value, self.other = value, other_side(raw, value, dtype)
        self.near = tie_distance(raw, dtype) <= reach
        self.open = self.near

    def turn(self, which: Tensor) -> None:
        self.value, self.other = torch.where(which, self.other, self.value), torch.where(which, self.value, self.other)


def settle_gate(layer: "MixerOracle", norm: Tensor, out: Tensor, raw: dict[str, Tensor], noise: dict[str, Tensor]) -> Settled:
    """g_a [N, 1, R] alike, read off the output [N, 1, hidden]: a value of it moves all of a token's gates. norm [N, H, V]."""
    dtypes = layer.roundings
    if not {"proj_g_a", "proj_g"} <= dtypes.keys():
        return Settled({}, {})
    contract, weights, point = rounding(dtypes), layer.weights(torch.float64), "proj_g_a"
    low = _Ties(contract(point, raw[point][:, 0]), raw[point][:, 0], noise[point][:, 0], dtypes[point])
    left = out.double().nan_to_num()
    scale = metrics.half_ulp(left, out.dtype).square() / 3 + (limits.MMA_TRUNCATION * norm[0].numel()) ** 2 * left.square().mean(
        2, keepdim=True
    )

    def fit(gate: Tensor) -> Tensor:
        core = contract("out", norm.flatten(1)[:, None] * contract("proj_g", gate).sigmoid())
        return ((core @ weights.o_proj.T - left).square() / scale.clamp(min=torch.finfo(torch.float64).tiny)).sum(2)

    _descend(low, weights.g_b_proj.T, fit)
    return Settled({point: low.value[:, None]}, {point: torch.where(low.open, low.other, low.value)[:, None]})


def _descend(low: _Ties, columns: Tensor, fit: Callable[[Tensor], Tensor]) -> Tensor:
    """Turn near ties in `low` as long as one of them makes what it gives fit better, the best of each sequence; what it gives.

    columns [R, D]: of the next linear. fit: how badly values [N, C, D] of it, before they round, fit what was seen, [N, C].
    """
    raw = low.value @ columns
    misfit = fit(raw[:, None])  # [N, 1]
    count = int(low.near.sum(1).max()) if len(raw) else 0
    low.open = torch.zeros_like(low.near)
    if count == 0:
        return raw
    place = low.near.int().argsort(1, descending=True)[:, :count]  # [N, C]
    usable, rows = low.near.gather(1, place), torch.arange(len(raw), device=raw.device)
    for last in [False] * 2 * count + [True]:
        change = (low.other - low.value).gather(1, place)
        misfits = fit(raw[:, None] + change[..., None] * columns[place])  # [N, C]
        gain, best = (misfit - misfits).masked_fill(~usable, -torch.inf).max(1)
        better = gain > 0
        if last or not bool(better.any()):
            break
        chosen = place[rows, best]
        raw = raw + (better * change[rows, best])[:, None] * columns[chosen]
        misfit = torch.where(better, misfits[rows, best], misfit[:, 0])[:, None]
        low.turn(torch.zeros_like(low.near).index_put((rows, chosen), better))
    low.open = low.open.scatter(1, place, usable & _undecided(misfits, misfit))
    return raw


def _fit(layer: "MixerOracle", seen: Evidence, raw: Tensor, noise: dict[str, Tensor]) -> Tensor:
    """How badly each f [N, C, H*K], before it rounds, fits the state, [N, C]; one that is wrong counts little more for being far off."""
    dtype = layer.roundings["proj_f"]
    value = raw.to(dtype).to(raw.dtype)
    own, other = (_misfit(layer, seen, x) for x in (value, other_side(raw, value, dtype)))
    near = tie_distance(raw, dtype) <= noise["proj_f"]
    return torch.where(near, torch.minimum(own, other), own).log1p().sum(2)


def _undecided(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() < limits.DECIDED


def _misfit(layer: "MixerOracle", seen: Evidence, f: Tensor) -> Tensor:
    """How far the decay of each f [N, ..., H*K] is from what the state says, in squares of its noise."""
    case, weights = layer.case, layer.weights(torch.float64)
    shape = (len(f), *[1] * (f.ndim - 2), *seen.weight.shape[1:])
    g = kda.log_decay(f.unflatten(-1, shape[-2:]), weights.A_log, weights.dt_bias.view(shape[-2:]), case.kda.lower_bound)
    return (seen.weight.view(shape) * (g.exp() - seen.decay.view(shape)).square()).flatten(-2)


def _evidence(layer: "MixerOracle", qkv: Tensor, f: Tensor, beta: Tensor, state: Tensor, window: Tensor, after: Tensor) -> Evidence:
    """Least squares of what the step left beside what these f and beta would have left."""
    wide = layer.weights(torch.float64)
    widths = [len(wide.q_proj), len(wide.k_proj), len(wide.v_proj)]
    q, k, v = qkv.split(widths, dim=1)
    at: dict[str, Tensor] = {}
    tokens = Tokens.single(dict(q=q, k=k, v=v, f=f, beta=beta, gate=torch.zeros_like(v)))
    points = ("k", "decay", "beta", "delta")
    made = layer.cell.predict(tokens, state, window, torch.float64, tapped(at, rounding(layer.cell.roundings), points))
    tiny = torch.finfo(torch.float64).tiny
    before, left = state.double(), after.double()
    rest = torch.where(left.isfinite(), left - made.state, 0.0)
    scale = metrics.half_ulp(left.nan_to_num(), after.dtype).square() / 3  # the variance of what is stored
    scale += (torch.finfo(torch.float32).eps ** 2 * left.nan_to_num().square().mean((2, 3), keepdim=True)).clamp(min=tiny)
    weight = (before.square() / scale).sum(2)  # [N, H, K]
    decay = at["decay"] + (rest * before / scale).sum(2) / weight.clamp(min=tiny)
    written = at["delta"][..., None] * at["k"][:, :, None, :] / at["beta"].clamp(min=tiny)[..., None, None]
    beta_weight = (written.square() / scale).sum((2, 3))
    return Evidence(decay, weight, at["beta"] + (rest * written / scale).sum((2, 3)) / beta_weight.clamp(min=tiny), beta_weight)
