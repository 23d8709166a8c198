"""Buffers the harness owns: rows with gaps between them and guard bands round them, filled with 0xFF (NaN in every float).

What must not be read is NaN, what must not be written is checked byte by byte.
"""

import torch
from torch import Tensor

GUARD = 64  # elements before and after


class GuardedRows:
    """`count` rows of `width` elements, `gap` elements apart, in one allocation that starts and ends with a guard band."""

    def __init__(self, count: int, width: int, gap: int, dtype: torch.dtype, device: str) -> None:
        self.count, self.width, self.pitch = count, width, width + gap
        elements = 2 * GUARD + count * self.pitch
        self._bytes = torch.full((elements * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        self._flat = self._bytes.view(dtype)
        self.rows = self._flat[GUARD : GUARD + count * self.pitch].view(count, self.pitch)[:, :width]

    def intact(self) -> bool:
        """Guard bands and gaps still hold 0xFF."""
        size, pitch, width = self._flat.itemsize, self.pitch, self.width
        band = GUARD * size
        body = self._bytes[band : len(self._bytes) - band].view(self.count, pitch * size)
        return all(bool((part == 0xFF).all()) for part in (self._bytes[:band], self._bytes[-band:], body[:, width * size :]))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal byte by byte, NaNs included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.view(kind), b.view(kind))
