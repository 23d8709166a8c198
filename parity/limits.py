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
# Flips of one head are not quite the sum of each alone: a second one moves by 2^-8 more or less after a first in BF16, and
# values that are carried to a tie may fall on either side, each shifting the head's norm. This share of all of them together.
FLIPS_TOGETHER = 2.0**-6
# Operands of a TF32 product have 10 bits after the leading one, and may be cut off instead of rounded.
TF32_NOISE = 2.0**-11
# A tensor core adds 16 products at a time to an FP32 sum and cuts off what doesn't fit: up to an ulp of the sum a step, always
# toward zero. Half an ulp in 16 products, of a sum as large as its row's usual one, is more than was left to chance.
MMA_TRUNCATION = 2.0**-24 / 16
# Two sides of a tie are told apart by what followed when one fits it better by this much, in squares of the noise's spread.
DECIDED = 25.0
# Another count of live sequences may be another launch configuration, whose sums flip a rounding here and there; a row that
# belongs to somebody else is wrong by its own size.
OTHER_CONFIGURATION = 2.0**-7
# A hypothesis about a fault is named when it leaves at most this share of the residual.
EXPLAINED = 0.1
# Heads with at least this share of the worst head's squared error take part; the others carry noise.
OFF_HEADS = 1e-2
# What one case scored before and after a change: healthy ratios of a case move under 1.9 times between seeds, drifts less.
GROWTH = 2.0
# Below this share of its limit an error is not said to have grown: healthy 16-bit boundaries score up to 0.02 of a limit of 2.
GROWTH_FLOOR = 2.0**-5
# Timings of two runs whose spreads don't meet, and which are apart by more than what the same product moved by between two
# runs on one H200, 1.14 times.
RUNS_APART = 1.15
# Of the test on paired answers: how sure a difference must be, and how likely to be found one must be to count as detectable.
CONFIDENCE = 0.95
POWER = 0.80


@dataclass(frozen=True)
class DriftLimit:
    """How far output and state may be from a reference that runs freely from the same state, at any of `steps` steps."""

    rel_l2: float
    cosine: float
    state_rel_l2: float
    steps: int
    least_heads: int
    reason: str


MIXER_DRIFT = DriftLimit(
    0.0067, 0.99998, 0.0024, 64, 8,
    "what the source PRs accept of a fused mixer beside FLA over 64 decode steps, 8 to 64 heads, spread gates, an FP32 state; "
    "here beside the reference that stores projections as both of those do",
)  # fmt: skip


def boundary(dtype: torch.dtype) -> Limit:
    """The limit for a tensor stored in this dtype."""
    return FP32_BOUNDARY if dtype == torch.float32 else ROUNDED_BOUNDARY
