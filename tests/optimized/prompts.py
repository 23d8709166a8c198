"""Prompts for the prefill kernel, and how far a call is from the chunk reference under a contract."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity import limits, metrics
from parity.oracle import all_flipped, spread
from reference import kda, kda_chunk
from reference.points import At, Contract, exact, rounding

ACTIVATIONS = ("q", "k", "v", "f", "beta", "gate")
POOLS = ("state", "window")
NAN = float("nan")

Prompt = dict[str, Any]
Prefill = Callable[..., Tensor]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prompt(
    lengths: list[int],
    slots: list[int] | None = None,
    *,
    pool: int = 4,
    heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changed: Any,
) -> Prompt:
    """Arguments of one call of `prefill`: sequences of these lengths in these slots (default: from the last slot down)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    qk, hv, tokens = heads * key_dim, heads * value_dim, sum(lengths)
    widths = dict(q=qk, k=qk, v=hv, f=qk, beta=heads, gate=hv)
    given = {name: normal(tokens, width) for name, width in widths.items()} | dict(
        conv_weight=normal(2 * qk + hv, 4, scale=0.5),
        a_log=normal(heads, scale=0.3, dtype=torch.float32),
        dt_bias=normal(qk, dtype=torch.float32),
        norm_weight=normal(value_dim),
        state=normal(pool, heads, value_dim, key_dim, dtype=state_dtype),
        window=normal(pool, 3, 2 * qk + hv),
        cu_seqlens=int32(*torch.tensor([0, *lengths]).cumsum(0).tolist()),
        slots=int32(*(slots if slots is not None else range(pool - 1, pool - 1 - len(lengths), -1))),
        lower_bound=-5.0,
        norm_eps=1e-5,
    )
    return given | changed


def copied(given: Prompt, dtype: torch.dtype | None = None) -> Prompt:
    """The same arguments over pools of their own, every floating tensor in `dtype` when there is one."""
    copy = {name: x.to(dtype) if dtype and isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}
    return copy | {name: copy[name].clone(memory_format=torch.contiguous_format) for name in POOLS}


def rows(given: Prompt) -> Tensor:
    slots = given["slots"]
    return slots[(slots >= 0) & (slots < len(given["state"]))].long()


def predicted(given: Prompt, dtype: torch.dtype, at: At, prefill: Prefill = kda_chunk.prefill) -> list[Tensor]:
    """Output [1, H, T, V] and states of the live sequences that a reference makes of the arguments."""
    copy = copied(given, dtype)
    return [by_head(prefill(**copy, at=at), given), copy["state"][rows(given)]]


def by_head(out: Tensor, given: Prompt) -> Tensor:
    return out.unflatten(1, (given["beta"].shape[1], -1)).transpose(0, 1)[None]


def away(prefill: Prefill, given: Prompt, contract: Contract | None = None) -> float:
    """Call it; how many times its limit the worst of output and state is from FP64 gold. Infinite when the window isn't exact."""
    before = copied(given)
    contract = contract or Contract()
    roundings, chunked = contract.resolve(given["q"].dtype), partial(kda_chunk.prefill, form=contract.form)
    out = prefill(**given)
    window = copied(before, torch.float64)
    kda_chunk.prefill(**window)
    live = rows(given)
    if not torch.equal(given["window"][live].double(), window["window"][live]):
        return torch.inf
    gold, true = predicted(before, torch.float64, rounding(roundings), chunked), predicted(before, torch.float64, exact, kda.prefill)
    single = predicted(before, torch.float32, rounding(roundings), chunked)
    turned = predicted(before, torch.float64, all_flipped(roundings), chunked)
    floors = [spread(*sides) for sides in zip(gold, single, turned, strict=True)] if roundings else single
    got, worst = [by_head(out, given), given["state"][live]], 0.0
    for i, candidate in enumerate(got):
        m = metrics.moments(candidate, gold[i], true[i], floors[i], candidate.dtype)
        worst = max(worst, metrics.noise_ratio(m).over(limits.boundary(candidate.dtype)))
    return worst


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
