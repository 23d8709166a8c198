"""The weights of one sparse MLA layer under their checkpoint names, and their slices by heads for tensor parallelism.

Source: spec of the model, sections 2 and 6.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class MlaWeights:
    """`self_attn.*` of a sparse MLA layer, without `.weight`; FP8 linears dequantised. H heads on this rank; linears are [out, in].

    q_a_proj [Rq, hidden], q_a_layernorm [Rq], q_b_proj [H*K, Rq]; kv_a_proj_with_mqa [L, hidden], kv_a_layernorm [L],
    kv_b_proj [H*(K+V), L], a head's key rows before its value rows; o_proj [hidden, H*V]. Of the indexer, whole on every rank:
    wq_b [Hi*D, Rq], wk [D, hidden], k_norm, k_norm_bias [D], weights_proj [Hi, hidden], index_kpool_compress_gate [D, hidden],
    index_kpool_compress_ape [4, D]. heads: H.
    """

    q_a_proj: Tensor
    q_a_layernorm: Tensor
    q_b_proj: Tensor
    kv_a_proj_with_mqa: Tensor
    kv_a_layernorm: Tensor
    kv_b_proj: Tensor
    o_proj: Tensor
    wq_b: Tensor
    wk: Tensor
    k_norm: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor
    index_kpool_compress_gate: Tensor
    index_kpool_compress_ape: Tensor
    heads: int


NAMES = tuple(field.name for field in fields(MlaWeights) if field.name != "heads")
BY_HEAD = ("q_b_proj", "kv_b_proj", "o_proj")


def shard(weights: MlaWeights, rank: int, world: int) -> MlaWeights:
    """The contiguous slice of heads of `rank` in `world`, in memory of its own; the outputs of all ranks sum to the whole's.

    Rows of q_b_proj and kv_b_proj, columns of o_proj; everything else, the indexer above all, whole: every rank selects the same
    rows. ValueError when the heads don't divide.
    """
    if world < 1 or weights.heads % world:
        raise ValueError(f"world: expected a divisor of {weights.heads} heads, got {world}; a head lies on one rank")
    if not 0 <= rank < world:
        raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}; ranks count from 0")

    def own(name: str) -> Tensor:
        x: Tensor = getattr(weights, name)
        if world == 1 or name not in BY_HEAD:
            return x
        part = x.chunk(world, dim=1 if name == "o_proj" else 0)[rank]
        return part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole

    return MlaWeights(**{name: own(name) for name in NAMES}, heads=weights.heads // world)
