"""Every limit, with its reason. A tolerance typed anywhere else fails a test."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Limit:
    """How many noise floors a tensor, and its worst head, may be away."""

    tensor: float
    head: float
    reason: str


# Where nothing rounds inside, faults score 30 and more on either.
FP32_BOUNDARY = Limit(8.0, 24.0, "healthy FP32 boundaries score 1 to 4, their worst head 10")
ROUNDED_BOUNDARY = Limit(2.0, 6.0, "healthy 16-bit boundaries score under 0.2 beyond half an ulp, those of flipped near ties taken out")

# A reference that happens to be exact leaves no floor to divide by: a quarter of FP32's unit roundoff, below one rounding.
LEAST_FLOOR = 2.0**-26
# Values below FP32's smallest normal may be flushed to zero by a kernel.
SMALLEST_NORMAL = 2.0**-126
# The contract's own reference may be wrong by this much before a verdict says nothing.
CONDITIONING = 0.10
# A value whose tie is this many times its noise away may round either way in a healthy kernel: sums in another order,
# approximate exp. The noise is the FP32 reference's own, and an FP32 rounding of the value.
FLIP_NOISE = 8.0
# Operands of a TF32 product have 10 bits after the leading one, and may be cut off instead of rounded.
TF32_NOISE = 2.0**-11
# Another count of live sequences may be another launch configuration, whose sums flip a rounding here and there; a row that
# belongs to somebody else is wrong by its own size.
OTHER_CONFIGURATION = 2.0**-7
# A hypothesis about a fault is named when it leaves at most this share of the residual.
EXPLAINED = 0.1
# Heads with at least this share of the worst head's squared error take part; the others carry noise.
OFF_HEADS = 1e-2


def boundary(dtype: torch.dtype) -> Limit:
    """The limit for a tensor stored in this dtype."""
    return FP32_BOUNDARY if dtype == torch.float32 else ROUNDED_BOUNDARY
