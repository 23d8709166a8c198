"""Mixers with one thing wrong, and healthy ones with the noise of tensor cores, as a user would pass them with --impl."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optimized import contracts
from reference import kda_mixer
from reference.batch import Batch
from reference.kda_weights import KdaWeights
from reference.points import At, rounding

Mixer = Callable[..., Tensor]


def through(change: Callable[[str, Tensor, At], Tensor]) -> Mixer:
    """The reference under the contract of our mixer, FP32 arithmetic, with `change(point, value, contract)` at every point."""

    def candidate(hidden: Tensor, weights: KdaWeights, **x: Any) -> Tensor:
        contract = rounding(contracts.MIXER.resolve(hidden.dtype))
        return kda_mixer.mixer(hidden, weights, **x, at=lambda point, value: change(point, value, contract))

    candidate.contract = contracts.MIXER  # type: ignore[attr-defined]
    return candidate


def rounded(point: str, dtype: torch.dtype) -> Mixer:
    """One more rounding inside the cell."""
    return through(lambda name, x, contract: x.to(dtype).to(x.dtype) if name == point else contract(name, x))


healthy = through(lambda name, x, contract: contract(name, x))
beta_bf16 = rounded("beta", torch.bfloat16)
decay_bf16 = rounded("decay", torch.bfloat16)


def tensor_cores(share: float, seed: int = 0) -> Mixer:
    """Healthy: sums of K products cut short at each of K / 16 steps, by `share` of half an ulp of the row's usual sum, at random."""
    generator = torch.Generator().manual_seed(seed)

    def change(name: str, x: Tensor, contract: At) -> Tensor:
        if name.startswith("proj_") or name == "o_proj":
            depth = 128 if name in ("proj_f", "proj_g") else 4096
            size = depth / 16 * 2.0**-24 * share * x.square().mean(-1, keepdim=True).sqrt()
            x = x + size * (2 * torch.rand(x.shape, generator=generator) - 1)
        return contract(name, x)

    return through(change)


def bf16_sums(point: str) -> Mixer:
    """One product whose four shares of K are stored in BF16 before they are added, as a library may do that is not told otherwise."""
    generator = torch.Generator().manual_seed(0)

    def change(name: str, x: Tensor, contract: At) -> Tensor:
        if name == point:
            shares = torch.randn(4, *x.shape, generator=generator) * x.square().mean(-1, keepdim=True).sqrt() / 2
            shares += (x - shares.sum(0)) / 4  # any four that add up to x
            x = shares.bfloat16().float().sum(0)
        return contract(name, x)

    return through(change)


def weights_changed(change: Callable[[KdaWeights], dict[str, Tensor]]) -> Mixer:
    def candidate(hidden: Tensor, weights: KdaWeights, **x: Any) -> Tensor:
        return healthy(hidden, replace(weights, **change(weights)), **x)

    candidate.contract = contracts.MIXER  # type: ignore[attr-defined]
    return candidate


def _rolled_bias(weights: KdaWeights) -> dict[str, Tensor]:
    bias = weights.dt_bias.clone().view(len(weights.A_log), -1)
    bias[0] = bias[1]
    return {"dt_bias": bias.flatten()}


neighbours_bias = weights_changed(_rolled_bias)
swapped_gates = weights_changed(lambda weights: dict(f_a_proj=weights.g_a_proj, g_a_proj=weights.f_a_proj))
neighbours_output = weights_changed(lambda weights: dict(o_proj=weights.o_proj.roll(weights.o_proj.shape[1] // len(weights.A_log), 1)))


def stale_window(hidden: Tensor, weights: KdaWeights, *, window: Tensor, batch: Batch, **x: Any) -> Tensor:
    """Right but for the window, whose first sequence keeps its tap before the newest."""
    before = window.clone()
    out = healthy(hidden, weights, window=window, batch=batch, **x)
    slots = batch.slots[(batch.slots >= 0) & (batch.slots < len(window))].long()
    if len(slots):
        window[slots[0], 1] = before[slots[0], 1]
    return out


stale_window.contract = contracts.MIXER  # type: ignore[attr-defined]
FAULTS: dict[str, Mixer] = {
    "beta_bf16": beta_bf16, "decay_bf16": decay_bf16, "neighbours_bias": neighbours_bias, "swapped_gates": swapped_gates,
    "neighbours_output": neighbours_output, "stale_window": stale_window,
    **{f"bf16 sums of {point}": bf16_sums(point) for point in ("proj_qkv", "proj_f_a", "proj_f", "proj_b", "proj_g_a", "proj_g", "o_proj")},
}  # fmt: skip
