"""The weights of a KDA layer as the mixer reads them: what has one input stands in one tensor, each weight is kept once.

Source: spec of the contracts, section 3 (`kda.mixer`); TensorRT-LLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import validate_mixer
from reference.kda_weights import KdaWeights
from reference.validate_mixer import MixerSizes

WIDE = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
GATES = ("f_b_proj", "g_b_proj")
CONV = ("q_conv1d", "k_conv1d", "v_conv1d")
COUNTERS = 8192  # tiles of one GEMM whose K is split


@dataclass(frozen=True)
class FusedWeights:
    """One layer. Calls with one FusedWeights follow each other: they share `arrivals`.

    wide [2*H*K + H*V + 2*R + H, hidden]: rows of q, k, v, f_a, g_a, b. gates [H*K + H*V, R]: f_b, g_b. conv [2*H*K + H*V, 4].
    A_log [H], dt_bias [H*K], o_norm [V], o_proj [hidden, H*V]: the checkpoint's own. arrivals int32 [2, COUNTERS]: zero between
    calls, a row for each stream.
    """

    wide: Tensor
    gates: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    o_proj: Tensor
    arrivals: Tensor
    sizes: MixerSizes

    def separate(self) -> KdaWeights:
        """The same memory under the checkpoint's names."""
        size = self.sizes
        key, value = size.heads * size.key_dim, size.heads * size.value_dim
        wide = self.wide.split([key, key, value, size.rank, size.rank, size.heads])
        conv = self.conv[:, None].split([key, key, value])
        own = dict(A_log=self.A_log, dt_bias=self.dt_bias, o_norm=self.o_norm, o_proj=self.o_proj)
        parts = zip((*WIDE, *GATES, *CONV), (*wide, *self.gates.split([key, value]), *conv), strict=True)
        return KdaWeights(**dict(parts), **own)


def fuse(weights: KdaWeights) -> FusedWeights:
    """A copy of what is fused, the rest as it is. ValueError or TypeError for weights that are no layer's."""
    sizes = validate_mixer.weights(weights)
    wide, gates, conv = (torch.cat([getattr(weights, name) for name in names]) for names in (WIDE, GATES, CONV))
    own = {name: getattr(weights, name).contiguous() for name in ("A_log", "dt_bias", "o_norm", "o_proj")}
    arrivals = torch.zeros(2, COUNTERS, dtype=torch.int32, device=sizes.device)
    return FusedWeights(wide, gates, conv[:, 0], **own, arrivals=arrivals, sizes=sizes)


def fuse_layers(layers: list[KdaWeights]) -> Iterator[FusedWeights]:
    """`fuse` for each layer, which is taken from `layers`: one layer at most is in memory twice, when nobody else holds them."""
    while layers:
        yield fuse(layers.pop(0))
