"""The weights of one KDA layer under their checkpoint names, and their slices by heads for tensor parallelism.

Source: spec of the model, sections 2 and 4.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class KdaWeights:
    """`self_attn.*` of a KDA layer, without `.weight`. H heads on this rank; linear weights are [out, in].

    q_proj, k_proj [H*K, hidden], v_proj [H*V, hidden], b_proj [H, hidden]; f_a_proj, g_a_proj [R, hidden]; f_b_proj [H*K, R],
    g_b_proj [H*V, R]; q_conv1d, k_conv1d [H*K, 1, 4], v_conv1d [H*V, 1, 4], newest token last; A_log [H], dt_bias [H*K] FP32;
    o_norm [V]; o_proj [hidden, H*V].
    """

    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    b_proj: Tensor
    f_a_proj: Tensor
    f_b_proj: Tensor
    g_a_proj: Tensor
    g_b_proj: Tensor
    q_conv1d: Tensor
    k_conv1d: Tensor
    v_conv1d: Tensor
    A_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    o_proj: Tensor


NAMES = tuple(field.name for field in fields(KdaWeights))
SHARED = ("f_a_proj", "g_a_proj", "o_norm")  # by all heads: whole on every rank


def shard(weights: KdaWeights, rank: int, world: int) -> KdaWeights:
    """The contiguous slice of heads of `rank` in `world`, in memory of its own; the outputs of all ranks sum to the whole's.

    Rows of every tensor that has heads, columns of o_proj; f_a_proj, g_a_proj and o_norm whole. ValueError when the heads
    don't divide.
    """
    heads = weights.A_log.shape[0]
    if world < 1 or heads % world:
        raise ValueError(f"world: expected a divisor of {heads} heads, got {world}; a head lies on one rank")
    if not 0 <= rank < world:
        raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}; ranks count from 0")

    def own(name: str) -> Tensor:
        x: Tensor = getattr(weights, name)
        if world == 1 or name in SHARED:
            return x
        part = x.chunk(world, dim=1 if name == "o_proj" else 0)[rank]
        return part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole

    return KdaWeights(**{name: own(name) for name in NAMES})
