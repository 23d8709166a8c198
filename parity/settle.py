"""Which way the near ties of a mixer's projections fell, read off the state that a decode step left.

A value of f sets the decay of one column of a head's state, a value of beta how much is written to it: both show in what the
step made of the state. A value of f_a moves f in every head. Only a value within the noise of its tie has a choice, so a
wrong value is taken for the tie that lies nearest and stays wrong by the rest.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity import metrics
from reference import kda
from reference.points import other_side, rounding, tapped, tie_distance

if TYPE_CHECKING:
    from parity.mixer import MixerOracle
    from parity.oracle import Stored
    from parity.tokens import Tokens

ROUNDS = 2  # what is read off depends a little on what was settled before


@dataclass
class Evidence:
    """What the state says: the decay [N, H, K] with its weight, and the write strength [N, H], 0 to 1."""

    decay: Tensor
    weight: Tensor
    beta: Tensor


def settle(
    layer: "MixerOracle", tokens: "Tokens", state: Tensor, window: Tensor, stored: "Stored", raw: dict[str, Tensor], noise: dict[str, Tensor]
) -> dict[str, Tensor]:
    """f_a, f and beta [N, 1, D] as the candidate is likeliest to have rounded them; nothing where no projection rounds."""
    dtypes = layer.roundings
    if not {"proj_f_a", "proj_f", "proj_b"} <= dtypes.keys():
        return {}
    weights, qkv = layer.weights(torch.float64), stored.window[:, 2].double()
    near, other = _ties(raw["proj_f_a"][:, 0], noise["proj_f_a"][:, 0], dtypes["proj_f_a"])
    low = rounding(dtypes)("proj_f_a", raw["proj_f_a"][:, 0])
    f_raw = low @ weights.f_b_proj.T
    f = rounding(dtypes)("proj_f", f_raw)
    beta = rounding(dtypes)("proj_b", raw["proj_b"][:, 0])
    beta_near, beta_other = _ties(raw["proj_b"][:, 0], noise["proj_b"][:, 0], dtypes["proj_b"])
    reach = noise["proj_f"][:, 0]
    for _ in range(ROUNDS):
        seen = _evidence(layer, qkv, f, beta, state, window, stored.state)
        low, f_raw = _settle_low(layer, seen, low, f_raw, near, raw["proj_f_a"][:, 0], other)
        f = rounding(dtypes)("proj_f", f_raw)
        f_near, f_other = _ties(f_raw, reach, dtypes["proj_f"])
        f = torch.where(f_near & (_cost(layer, seen, f_other) < _cost(layer, seen, f)), f_other, f)
        seen = _evidence(layer, qkv, f, beta, state, window, stored.state)
        closer = (beta_other.sigmoid() - seen.beta).abs() < (beta.sigmoid() - seen.beta).abs()
        beta, beta_other = _swapped(beta_near & closer, beta, beta_other)
    return {name: value[:, None] for name, value in (("proj_f_a", low), ("proj_f", f), ("proj_b", beta))}


def _ties(x: Tensor, reach: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which values are near their tie, and what each is on the other side of it."""
    near = x.to(dtype).to(x.dtype)
    return tie_distance(x, dtype) <= reach, other_side(x, near, dtype)


def _swapped(which: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(which, b, a), torch.where(which, a, b)


def _settle_low(
    layer: "MixerOracle", seen: Evidence, low: Tensor, f_raw: Tensor, near: Tensor, raw: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """f_a [N, R] and the f that it gives: one near tie of each sequence after the other, as long as the state agrees better."""
    columns = layer.weights(torch.float64).f_b_proj.T  # [R, H*K]
    first = rounding(layer.roundings)("proj_f_a", raw)
    cost = _cost(layer, seen, rounding(layer.roundings)("proj_f", f_raw)).sum(1)
    count, order = near.sum(1), near.int().argsort(1, descending=True)
    rows = torch.arange(len(low), device=low.device)
    for rank in range(int(count.max()) if len(count) else 0):
        place = order[:, rank]
        turned = torch.where(low == first, other, first)[rows, place]
        f_turned = f_raw + (turned - low[rows, place])[:, None] * columns[place]
        cost_turned = _cost(layer, seen, rounding(layer.roundings)("proj_f", f_turned)).sum(1)
        better = (cost_turned < cost) & (count > rank)
        low = low.index_put((rows[better], place[better]), turned[better])
        f_raw, cost = torch.where(better[:, None], f_turned, f_raw), torch.where(better, cost_turned, cost)
    return low, f_raw


def _cost(layer: "MixerOracle", seen: Evidence, f: Tensor) -> Tensor:
    """How badly each f [N, H*K] agrees with the state; a wrong one counts, however wrong, little more than a slightly wrong one."""
    case, weights = layer.case, layer.weights(torch.float64)
    heads = case.problem.heads
    g = kda.log_decay(f.unflatten(1, (heads, -1)), weights.A_log, weights.dt_bias.view(heads, -1), case.kda.lower_bound)
    return (seen.weight * (g.exp() - seen.decay).square()).log1p().flatten(1)


def _evidence(
    layer: "MixerOracle", qkv: Tensor, f: Tensor, beta: Tensor, state: Tensor, window: Tensor, after: Tensor
) -> Evidence:
    """Least squares of what the step left beside what these f and beta would have left."""
    from parity.tokens import Tokens

    case, wide = layer.case, layer.weights(torch.float64)
    widths = [len(wide.q_proj), len(wide.k_proj), len(wide.v_proj)]
    q, k, v = qkv.split(widths, dim=1)
    at: dict[str, Tensor] = {}
    tokens = Tokens.single(dict(q=q, k=k, v=v, f=f, beta=beta, gate=torch.zeros_like(v)))
    made = layer.cell.predict(tokens, state, window, torch.float64, tapped(at, rounding(layer.cell.roundings), ("k", "decay", "beta", "delta")))
    before, left = state.double(), after.double()
    rest = torch.where(left.isfinite(), left - made.state, 0.0)
    scale = metrics.half_ulp(left.nan_to_num(), after.dtype).square() / 3
    scale += (torch.finfo(torch.float32).eps**2 * left.nan_to_num().square().mean((2, 3), keepdim=True)).clamp(min=torch.finfo(torch.float64).tiny)
    strength = (before.square() / scale).sum(2)  # [N, H, K]
    decay = at["decay"] + (rest * before / scale).sum(2) / strength.clamp(min=torch.finfo(torch.float64).tiny)
    written = at["delta"][..., None] * at["k"][:, :, None, :] / at["beta"].clamp(min=torch.finfo(torch.float64).tiny)[..., None, None]
    share = (rest * written / scale).sum((2, 3)) / (written.square() / scale).sum((2, 3)).clamp(min=torch.finfo(torch.float64).tiny)
    return Evidence(decay, strength, at["beta"] + share)
