"""Broken twins of `kda.prefill`: each has one public bug, and is the chunk reference under the kernel's contract otherwise."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.kda_prefill import CONTRACT
from reference import kda_chunk
from reference.points import At, exact, grafted, rounding
from tests.optimized.prompts import ACTIVATIONS, POOLS, Prefill


def healthy(at: At = exact, **given: Any) -> Tensor:
    """The chunk reference, rounding where the kernel does after `at` has had its say."""
    rounded = rounding(CONTRACT.resolve(given["q"].dtype))
    return kda_chunk.prefill(**given, at=lambda name, x: rounded(name, at(name, x)))


def from_the_decays(point: str, make: Any) -> Prefill:
    """The value at `point` made of k and of the cumulative decays of its chunk."""

    def twin(**given: Any) -> Tensor:
        seen: dict[str, Tensor] = {}

        def at(name: str, x: Tensor) -> Tensor:
            seen[name] = x
            return make(seen["k"], seen["gcum"]) if name == point else x

        return healthy(at, **given)

    return twin


def rounded_to(dtype: torch.dtype, point: str) -> Prefill:
    return lambda **given: healthy(rounding({point: dtype}), **given)


mixed_bases = from_the_decays("k_out", lambda k, gcum: k * (gcum[-1] - gcum).exp2())
inverse_decay_on_its_own = from_the_decays("k_out", lambda k, gcum: k * (-gcum).exp() * gcum[-1].exp())
stale_last_decay = from_the_decays("k_out", lambda k, gcum: k * ((gcum[-1] if len(gcum) == kda_chunk.OURS.chunk else 0) - gcum).exp())


def clamped_softplus_gate(**given: Any) -> Tensor:
    bound = given["lower_bound"]
    return healthy(lambda name, x: x.clamp(min=bound) if name == "g" else x, **{**given, "lower_bound": None})


def naive_gate(**given: Any) -> Tensor:
    """Of a prompt within one chunk."""
    heads = given["beta"].shape[1]
    softplus = torch.log(1 + torch.exp(given["f"].float() + given["dt_bias"])).unflatten(1, (heads, -1))
    return healthy(grafted({"g": -given["a_log"].exp()[:, None] * softplus}), **given)


def mean_norm(**given: Any) -> Tensor:
    heads, width = given["beta"].shape[1], given["q"].shape[1]
    conv: dict[str, Tensor] = {}

    def at(name: str, x: Tensor) -> Tensor:
        if name == "conv":
            conv["q"], conv["k"] = (part.unflatten(1, (heads, -1)) for part in (x[:, :width], x[:, width : 2 * width]))
        size = x.shape[-1]
        scale = {"q": 1 / size, "k": size**-0.5}
        return F.rms_norm(conv[name], (size,), eps=1e-6) * scale[name] if name in scale else x

    return healthy(at, **given)


def norm_without_an_epsilon(**given: Any) -> Tensor:
    return healthy(lambda name, x: x / x.norm(dim=-1, keepdim=True) if name == "q" else x, **given)


def unmasked_lanes(**given: Any) -> Tensor:
    f = given["f"]
    lanes = f.as_strided((len(f), 32), f.stride())[:, f.shape[1] :].float()
    return healthy(**given) + 0 * lanes.exp().sum(1, keepdim=True).to(f.dtype)


def first_ranks_gates(**given: Any) -> Tensor:
    first = {name: given[name].as_strided(given[name].shape, (1,), 0) for name in ("a_log", "dt_bias")}
    return healthy(**{**given, **first})


def compact_ranks(**given: Any) -> Tensor:
    """Sequences that have tokens, numbered as if there were no others."""
    ends = given["cu_seqlens"].unique()
    kept = {"cu_seqlens": ends, "slots": given["slots"][: len(ends) - 1]}
    return healthy(**{**given, **kept})


def cold_start(**given: Any) -> Tensor:
    """A call of several tokens ignores what the slot carries."""
    lengths = given["cu_seqlens"].diff()
    return healthy(**{**given, "fresh": lengths > 1})


def dense_beta(**given: Any) -> Tensor:
    beta = given["beta"]
    return healthy(**{**given, "beta": beta.as_strided(beta.shape, (beta.shape[1], 1), beta.storage_offset())})


def padding_as_the_last_slot(**given: Any) -> Tensor:
    return healthy(**{**given, "slots": given["slots"] % len(given["state"])})


def the_whole_index_buffer(**given: Any) -> Tensor:
    full = {name: given[name].as_strided((size,), (1,)) for name, size in (("slots", 4), ("cu_seqlens", 5))}
    tokens = {name: given[name].as_strided((8, given[name].shape[1]), given[name].stride()) for name in ACTIVATIONS}
    return healthy(**{**given, **full, **tokens})[: len(given["q"])]


def offsets_of_32_bits(pool: str) -> Prefill:
    def twin(**given: Any) -> Tensor:
        stride = given[pool].stride(0)
        offset = (given["slots"].long() * stride + 2**31) % 2**32 - 2**31
        return healthy(**{**given, "slots": (offset // stride).int()})

    return twin


def key_major_pool(**given: Any) -> Tensor:
    state = given["state"].mT.contiguous()
    out = healthy(**{**given, "state": state})
    given["state"].copy_(state.mT)
    return out


def converted_window(**given: Any) -> Tensor:
    return healthy(**{**given, "window": given["window"].to(given["q"].dtype)})


def cleared_by_multiplication(**given: Any) -> Tensor:
    for name in POOLS:
        given[name][given["slots"][given["fresh"]]] *= 0
    return healthy(**{**given, "fresh": None})


def stale(pool: str) -> Prefill:
    return lambda **given: healthy(**{**given, pool: given[pool].clone()})


def activated_window(**given: Any) -> Tensor:
    """Leaves the convolution's outputs in the window."""
    out = healthy(**given)
    rows = given["slots"].long()
    given["window"][rows] = F.silu(given["window"][rows])
    return out


def power_series_inverse(**given: Any) -> Tensor:
    """(I + A)^-1 as (I - A)(I + A^2)(I + A^4)(I + A^8), every factor in FP16."""
    seen: dict[str, Tensor] = {}

    def at(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        if name != "inv":
            return x
        eye, power = torch.eye(x.shape[-1]).half(), seen["akk"].half()
        inverse = eye - power
        for _ in range(3):
            power = (power.float() @ power.float()).half()
            inverse = (inverse.float() @ (eye + power).float()).half()
        return inverse.float() * seen["beta"].T[:, None, :]

    return healthy(at, **given)
