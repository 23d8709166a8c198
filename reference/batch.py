"""Which rows of a forward belong to whom, whatever their phase: the same object for every layer.

Context sequences first, packed, then generation rows. Source: spec of the contracts, section 3 (`kda.mixer`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from reference.kda_offsets import Offsets

Phase = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class Part:
    """Adjacent rows of one phase, and what its cell takes beside activations, weights and pools."""

    phase: Phase
    rows: slice
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """C context sequences, packed by cu_seqlens, then N generation sequences of one row each, or of 1+S where they verify S drafts.

    slots int32 [C+N]: contexts first; outside the pool is padding. cu_seqlens int32 [C+1] over the context rows, None without
    contexts. fresh bool [C+N]: starts from zero whatever the slot holds. drafts S, 0 for one row each. accepted int32 [N]: with
    drafts, tokens that were accepted of the last verify, and offsets what `kda_offsets.offsets` made of them, once for all
    layers of the forward; None leaves them to each layer. Sizes come from shapes: nothing reads the device.
    """

    slots: Tensor
    cu_seqlens: Tensor | None = None
    fresh: Tensor | None = None
    drafts: int = 0
    accepted: Tensor | None = None
    offsets: Offsets | None = None

    @property
    def contexts(self) -> int:
        """C."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def generation_rows(self) -> int:
        """Rows after the contexts'."""
        return (self.slots.shape[0] - self.contexts) * (1 + self.drafts)

    def parts(self, tokens: int) -> Iterator[Part]:
        """The phases of a forward of `tokens` rows; each has a cell in the mixers' tables."""
        split, first = self.contexts, tokens - self.generation_rows
        if self.cu_seqlens is not None:
            yield Part("prefill", slice(0, first), dict(cu_seqlens=self.cu_seqlens, **self._sequences(slice(0, split))))
        if self.generation_rows and self.drafts:
            counts = dict(accepted=self.accepted, offsets=self.offsets)
            yield Part("verify", slice(first, tokens), counts | self._sequences(slice(split, None)))
        elif self.generation_rows:
            yield Part("decode", slice(first, tokens), self._sequences(slice(split, None)))

    def _sequences(self, of: slice) -> dict[str, Any]:
        return dict(slots=self.slots[of], fresh=None if self.fresh is None else self.fresh[of])
