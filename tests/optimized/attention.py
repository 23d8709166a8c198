"""Inputs of the sparse MLA kernels, and how far one is from gold, in limits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity import limits, metrics
from reference import fp8, mla
from reference.points import At, Contract, exact, rounding, tie_distance

Attend = Callable[..., tuple[Tensor, Tensor]]
Core = dict[str, Any]
NAN = float("nan")


def core(
    ids: list[list[int]] | Tensor,
    *,
    heads: int = 2,
    channels: int = 32,
    pages: int = 12,
    page: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    form: str = "plain",
    seed: int = 0,
    **changed: Any,
) -> Core:
    """Arguments of one call of `attend`; the rows nobody names hold NaN, or scales of NaN. form: plain, scaled, reserved, static."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.as_tensor(ids, dtype=torch.int32)
    given = dict(
        q=torch.randn(rows.shape[0], heads, channels, generator=generator).to(dtype), ids=rows, scale=channels**-0.5
    )  # fmt: skip
    wide = torch.randn(pages, page, channels, generator=generator)
    unnamed = torch.ones(pages * page, dtype=torch.bool)
    unnamed[rows[(rows >= 0) & (rows < pages * page)].long()] = False
    if form == "plain":
        latent = wide.to(dtype)
        latent[unnamed.view(pages, page)] = NAN
    elif form == "static":
        given["kv_scale"] = torch.tensor([0.0137])
        latent = fp8.quantize_tensor(wide, given["kv_scale"])
        latent.view(torch.uint8)[unnamed.view(pages, page)] = 0x7F
    else:
        latent = fp8.quantize_rows(wide * torch.logspace(-2, 0, page)[:, None], reserved=form == "reserved")
        latent[..., fp8.row_bytes(channels) :] = 0xFF
        latent[unnamed.view(pages, page)] = 0xFF
    return given | {"latent": latent} | changed


def away(attend: Attend, given: Core, contract: Contract | None = None) -> float:
    """Call it; how many times its limit the worst of output and LSE is from FP64 gold. Infinite where an empty row isn't 0 and -inf."""
    out, lse = attend(**given)
    at = exact if contract is None else rounding(contract.resolve(given["q"].dtype))
    wide = {**given, "q": given["q"].double()}
    seen: list[dict[str, Tensor]] = [{}, {}]
    gold, gold_lse = mla.attend(**wide, at=_watched(seen[0], at))
    true, true_lse = mla.attend(**wide)
    floor, floor_lse = mla.attend(**{**given, "q": given["q"].float()}, at=_watched(seen[1], at))
    empty = gold_lse == -torch.inf
    if bool(out[empty].any()) or not torch.equal(lse == -torch.inf, empty):
        return torch.inf
    worst, kept = 0.0, ~empty.all(1)
    if not bool(kept.any()):
        return 0.0
    ties: Tensor | float = 0.0 if contract is None else _flips(*seen, contract.resolve(given["q"].dtype))
    sums = [x[..., None] for x in (gold_lse, true_lse, floor_lse)]
    for candidate, sides, near in ((out, (gold, true, floor), ties), (lse[..., None], sums, 0.0)):
        m = metrics.moments(candidate[kept], *(x[kept] for x in sides), candidate.dtype)
        near = near[kept] if isinstance(near, Tensor) else near
        error = metrics.beyond_rounding(candidate[kept].double(), sides[0][kept], candidate.dtype, near)
        m.error = error.nan_to_num().square().sum(-1)  # what isn't finite is counted apart
        worst = max(worst, metrics.noise_ratio(m).over(limits.boundary(candidate.dtype)))
    return worst


def _watched(values: dict[str, Tensor], at: At) -> At:
    """Record what each point gets, and the rows as they leave theirs."""

    def watch(name: str, x: Tensor) -> Tensor:
        y = at(name, x)
        values[name] = y if name == "latent" else x
        return y

    return watch


def _flips(gold: dict[str, Tensor], single: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> Tensor:
    """How far weights near a tie may move each output [T, H, L], when healthy noise rounds them to the other side."""
    prob = gold["prob"]
    if "prob" not in dtypes:
        return torch.zeros_like(gold["q_absorbed"])
    noise = (single["prob"] - prob).square().mean(-1, keepdim=True).sqrt() + torch.finfo(torch.float32).eps * prob
    near = (tie_distance(prob, dtypes["prob"]) <= limits.FLIP_NOISE * noise) & (prob > 0)
    step = torch.where(near, 2 * metrics.half_ulp(prob, dtypes["prob"]), 0) / prob.sum(-1, keepdim=True)
    return torch.einsum("thw,twl->thl", step, gold["latent"].abs())
