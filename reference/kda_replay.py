"""Replay caches of `kda.verify`: the drafts of the last verify by slot, raw as they came from the projections.

Nothing is rounded on the way into a cache, so that replaying a draft is decoding it. Source: spec of the model, section 5.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Replay:
    """The S drafts of each slot, one layer: raw q, k, v side by side as in the window, raw decay gate, beta logits.

    qkv [slots, S, 2*H*K + H*V] in the dtype of q, f [slots, S, H*K] in that of f, beta [slots, S, H] in that of beta; last
    dimensions contiguous, the others of any stride. S (3*H*K + H*V + H) elements a slot: 192 KiB and 384 bytes for 3 drafts,
    64 heads and BF16, beside a state of 4 MiB. What lies past the pending drafts is never read.
    """

    qkv: Tensor
    f: Tensor
    beta: Tensor

    @property
    def drafts(self) -> int:
        """S, the drafts of a verify."""
        return self.qkv.shape[1]

    @classmethod
    def empty(cls, state: Tensor, window: Tensor, drafts: int, gates: torch.dtype | None = None) -> "Replay":
        """Caches for pools state [slots, H, V, K] and window [slots, 3, 2*H*K + H*V]; gates: dtype of f and beta, if not the window's."""
        slots, heads, _, key_dim = state.shape
        return cls(
            window.new_empty(slots, drafts, window.shape[-1]),
            window.new_empty(slots, drafts, heads * key_dim, dtype=gates),
            window.new_empty(slots, drafts, heads, dtype=gates),
        )
