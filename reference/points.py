"""Named points: the one mechanism for rounding, taps and grafts.

A reference passes each intermediate through a callable, `x = at("beta", x)`. What the callable does makes the same
straight-line math the exact gold, the emulation of a kernel's roundings, a recording, or a hypothesis about a fault.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

At = Callable[[str, Tensor], Tensor]

KDA_CELL = ("conv", "q", "k", "g", "decay", "beta", "read", "delta", "state", "core", "norm", "gate", "out")
KDA_CHUNK = (
    "conv", "q", "k", "g", "beta", "gcum", "q_in", "k_in", "v_in", "k_out", "akk", "aqk", "inv", "w", "u", "s_in", "dl", "core", "state",
    "norm", "gate", "out",
)  # fmt: skip
KDA = tuple(dict.fromkeys(KDA_CELL[: KDA_CELL.index("state")] + KDA_CHUNK))
KDA_MIXER = ("proj_qkv", "proj_f_a", "proj_f", "proj_g_a", "proj_g", "proj_b", *KDA, "o_proj")
INDEXER = ("index_q", "index_k", "pool_gate", "pool_prob", "pool_key", "head_weight", "score")
MLA_ATTEND = ("latent", "q_absorbed", "logit", "prob", "attended")
MLA_LAYER = ("q_latent", "query", "kv_latent", *INDEXER, "latent", "q_absorbed", "logit", "prob", "attended", "out", "o_proj")
BOUNDARY = frozenset({"state", "out"})  # of the cell: what is stored; everything else is interior

ACTIVATION = "activation"  # in a contract: the dtype of the activations of the case
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ChunkForm:
    """How a chunk is solved, where it moves a rounding; the function is the same.

    chunk: tokens at a time. scale: K^-0.5 is in `q` before it rounds, or multiplies the products of q. beta: in the columns of
    `inv`, or in the operands `k_in` and `v_in`.
    """

    chunk: int = 16
    scale: Literal["q", "products"] = "q"
    beta: Literal["inverse", "operands"] = "inverse"

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(f"chunk: expected a positive count of tokens, got {self.chunk!r}; our kernel has {ChunkForm.chunk}")
        for name, known in (("scale", ("q", "products")), ("beta", ("inverse", "operands"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Contract:
    """A precision contract: where an implementation rounds, as data.

    rounds: interior point -> dtype, or `ACTIVATION`. accumulate: how sums are formed. deterministic: equal inputs give
    equal bits for one launch configuration. points: of the operator, in order; the state and the last are its boundary.
    form: of the chunks, where sums are not the recurrence's.
    """

    rounds: Mapping[str, torch.dtype | str] = field(default_factory=dict)
    accumulate: str = "fp32"
    deterministic: bool = True
    points: tuple[str, ...] = KDA
    form: ChunkForm = ChunkForm()

    def __post_init__(self) -> None:
        inside = [point for point in self.points[:-1] if point != "state"]
        unknown = [point for point in self.rounds if point not in inside]
        if unknown:
            interior = ", ".join(inside)
            raise ValueError(f"contract: {', '.join(unknown)} can't round; interior points are {interior}")
        if self.accumulate not in ("fp32", "mma_bf16", "mma_tf32", "mma_fp8"):
            raise ValueError(f"contract: accumulate is one of fp32, mma_bf16, mma_tf32, mma_fp8, got {self.accumulate!r}")
        rounds = {point: DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype for point, dtype in self.rounds.items()}
        for point, dtype in rounds.items():
            if dtype != ACTIVATION and dtype not in DTYPES.values():
                raise ValueError(f"contract: {point} rounds to one of {', '.join(DTYPES)}, or ACTIVATION, got {dtype!r}")
        object.__setattr__(self, "rounds", MappingProxyType(rounds))

    def resolve(self, activation: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype at each point that rounds for activations of this dtype; FP32 rounds nothing of an FP32 computation."""
        dtypes = {point: activation if dtype == ACTIVATION else dtype for point, dtype in self.rounds.items()}
        return {point: dtype for point, dtype in dtypes.items() if isinstance(dtype, torch.dtype) and dtype != torch.float32}


def exact(name: str, x: Tensor) -> Tensor:
    """The identity: no rounding anywhere."""
    return x


def rounding(dtypes: Mapping[str, torch.dtype]) -> At:
    """Round to nearest even at the named points, and go on in the dtype of the computation."""

    def at(name: str, x: Tensor) -> Tensor:
        return x.to(dtypes[name]).to(x.dtype) if name in dtypes else x

    return at


def flipped(dtypes: Mapping[str, torch.dtype], flips: Mapping[str, Tensor]) -> At:
    """`rounding`, with the values marked in `flips` (bool, one for each value of their point) rounded to the other side."""
    rounded = rounding(dtypes)

    def at(name: str, x: Tensor) -> Tensor:
        near = rounded(name, x)
        return torch.where(flips[name].view_as(x), other_side(x, near, dtypes[name]), near) if name in flips else near

    return at


def tie_distance(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far each value is from where its rounding to `dtype` changes sides."""
    near = x.to(dtype).to(x.dtype)
    return ((near + other_side(x, near, dtype)) / 2 - x).abs()


def other_side(x: Tensor, near: Tensor, dtype: torch.dtype) -> Tensor:
    """The neighbour of `near`, the rounded x, that lies beyond x."""
    away = torch.where(x.abs() >= near.abs(), 1, -1).to(torch.int16)
    return (near.to(dtype).view(torch.int16) + away).view(dtype).to(x.dtype)


def tapped(values: dict[str, Tensor], inner: At = exact, points: Collection[str] | None = None) -> At:
    """Record a copy of every value in `values`, by point; at these points only, if some are named."""

    def at(name: str, x: Tensor) -> Tensor:
        x = inner(name, x)
        if points is None or name in points:
            values[name] = x.clone()
        return x

    return at


def grafted(values: Mapping[str, Tensor], inner: At = exact) -> At:
    """Return the value from `values` at its points, the computed one elsewhere."""

    def at(name: str, x: Tensor) -> Tensor:
        return values[name].to(x.dtype) if name in values else inner(name, x)

    return at
