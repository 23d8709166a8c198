"""Broken twins of `kda.decode`: each has one public bug, and is the reference otherwise."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import kda
from reference.points import grafted, rounding
from tests.optimized.test_kda_decode import ACTIVATIONS, Decode


def with_points(**change: Callable[[Tensor], Tensor]) -> Decode:
    """The reference with some of its intermediate values changed."""
    return lambda *a, **given: kda.decode(*a, **given, at=lambda name, x: change.get(name, lambda y: y)(x))


def rounded(**points: torch.dtype) -> Decode:
    return lambda *a, **given: kda.decode(*a, **given, at=rounding(points))


def inverse_decay_on_its_own(**given: Any) -> Tensor:
    return with_points(decay=lambda decay: decay.square() * decay.reciprocal())(**given)


def clamped_softplus_gate(**given: Any) -> Tensor:
    bound = given["lower_bound"]
    return with_points(g=lambda g: g.clamp(min=bound))(**{**given, "lower_bound": None})


def naive_gate(**given: Any) -> Tensor:
    heads = given["beta"].shape[1]
    softplus = torch.log(1 + torch.exp(given["f"].float() + given["dt_bias"])).unflatten(1, (heads, -1))
    return kda.decode(**given, at=grafted({"g": -given["a_log"].exp()[:, None] * softplus}))


def mean_norm(**given: Any) -> Tensor:
    heads, width = given["beta"].shape[1], given["q"].shape[1]
    conv: dict[str, Tensor] = {}

    def at(name: str, x: Tensor) -> Tensor:
        if name == "conv":
            conv["q"], conv["k"] = (part.unflatten(1, (heads, -1)) for part in (x[:, :width], x[:, width : 2 * width]))
        size = x.shape[-1]
        scale = {"q": 1 / size, "k": size**-0.5}
        return F.rms_norm(conv[name], (size,), eps=1e-6) * scale[name] if name in scale else x

    return kda.decode(**given, at=at)


def first_ranks_gates(**given: Any) -> Tensor:
    first = {name: given[name].as_strided(given[name].shape, (1,), 0) for name in ("a_log", "dt_bias")}
    return kda.decode(**{**given, **first})


def unmasked_lanes(**given: Any) -> Tensor:
    f = given["f"]
    lanes = f.as_strided((len(f), 128), f.stride())[:, f.shape[1] :].float()
    return kda.decode(**given) + 0 * lanes.exp().sum(1, keepdim=True).to(f.dtype)


def padding_as_the_last_slot(**given: Any) -> Tensor:
    return kda.decode(**{**given, "slots": given["slots"] % len(given["state"])})


def the_whole_index_buffer(**given: Any) -> Tensor:
    full = {name: given[name].as_strided((4, *given[name].shape[1:]), given[name].stride()) for name in (*ACTIVATIONS, "slots")}
    return kda.decode(**{**given, **full})[: len(given["slots"])]


def offsets_of_32_bits(**given: Any) -> Tensor:
    stride = given["state"].stride(0)
    offset = (given["slots"].long() * stride + 2**31) % 2**32 - 2**31
    return kda.decode(**{**given, "slots": (offset // stride).int()})


def key_major_pool(**given: Any) -> Tensor:
    state = given["state"].mT.contiguous()
    out = kda.decode(**{**given, "state": state})
    given["state"].copy_(state.mT)
    return out


def converted_window(**given: Any) -> Tensor:
    return kda.decode(**{**given, "window": given["window"].to(given["q"].dtype)})


def cleared_by_multiplication(**given: Any) -> Tensor:
    for name in ("state", "window"):
        given[name][given["slots"][given["fresh"]]] *= 0
    return kda.decode(**{**given, "fresh": None})


def stale(name: str) -> Decode:
    return lambda **given: kda.decode(**{**given, name: given[name].clone()})
