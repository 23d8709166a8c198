"""Which rows of a forward belong to whom, whatever their phase: the same object for every layer.

Context sequences first, packed, then generation rows. Source: spec of the contracts, section 3 (`kda.mixer`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Part:
    """Adjacent rows of one phase, and what its cell takes beside activations, weights and pools."""

    phase: Phase
    rows: slice
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """C context sequences, packed by cu_seqlens, then N generation sequences of one row each.

    slots int32 [C+N]: contexts first; outside the pool is padding. cu_seqlens int32 [C+1] over the context rows, None without
    contexts. fresh bool [C+N]: starts from zero whatever the slot holds. Sizes come from shapes: nothing reads the device.
    """

    slots: Tensor
    cu_seqlens: Tensor | None = None
    fresh: Tensor | None = None

    @property
    def contexts(self) -> int:
        """C."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def generation_rows(self) -> int:
        """Rows after the contexts'."""
        return self.slots.shape[0] - self.contexts

    def parts(self, tokens: int) -> Iterator[Part]:
        """The phases of a forward of `tokens` rows. A further phase (verify) is a branch here and a cell in the mixers' tables."""
        split, first = self.contexts, tokens - self.generation_rows
        if self.cu_seqlens is not None:
            yield Part("prefill", slice(0, first), dict(cu_seqlens=self.cu_seqlens, **self._sequences(slice(0, split))))
        if self.generation_rows:
            yield Part("decode", slice(first, tokens), self._sequences(slice(split, None)))

    def _sequences(self, of: slice) -> dict[str, Tensor | None]:
        return dict(slots=self.slots[of], fresh=None if self.fresh is None else self.fresh[of])
