"""`kda.verify_offsets`: which drafts of the last verify are pending and where the new tokens lie, once for all layers of a forward.

Source: spec of the model, section 5.2; TensorRT-LLM recomputes them in every layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reference import validate_verify
from reference.kda_replay import Replay

Offsets = tuple[Tensor, Tensor]


def offsets(accepted: Tensor, drafts: int) -> Offsets:
    """`(pending, cu_seqlens)` of N generation requests that verify `drafts` drafts each.

    accepted int32 [N]: tokens of the last verify that were accepted, the golden one included; 0 before the first verify.
    pending int32 [N] = accepted - 1, in 0..S. cu_seqlens int32 [N+1] = n (1+S) - pending[n]: token i of request n is row
    cu_seqlens[n] + pending[n] + i, replayed drafts lie before it, and the first entry may be negative. The last one is
    N (1+S), unshifted. Neither reads the device.
    """
    validate_verify.verify_offsets(accepted, drafts)
    width = 1 + drafts
    pending = (accepted - 1).clamp(0, drafts)
    cu_seqlens = torch.arange(0, (len(accepted) + 1) * width, width, dtype=torch.int32, device=accepted.device)
    cu_seqlens[:-1] -= pending
    return pending, cu_seqlens


class VerifyOffsets:
    """The offsets of one forward: computed when the first layer asks, the same tuple for every other.

    counts int32 [slots]: accepted tokens of each slot, written by the sampler; one tensor for all layers. replays: the caches
    of this rank's layers, None for a layer that was pruned, lies elsewhere or isn't KDA. `reset` begins a step, `get` is for
    layers, `clear` follows a prefill or the commit of every layer.
    """

    def __init__(self, counts: Tensor, replays: Sequence[Replay | None]) -> None:
        self.counts = counts
        self.drafts = next((replay.drafts for replay in replays if replay is not None), None)
        self._slots: Tensor | None = None
        self._accepted: Tensor | None = None
        self._offsets: Offsets | None = None

    def reset(self, slots: Tensor, *, contexts: int, rows: int, generation_slots: Tensor | None = None) -> None:
        """Begin a step of `contexts` prefills, then generation requests with `rows` tokens in all.

        slots int32 [contexts + N], prefills first. generation_slots int32 [N]: the same slots in a buffer of fixed address,
        which a captured graph needs; the tail of `slots` otherwise. ValueError for rows that aren't the same for each request,
        and, on CPU tensors, for single tokens while drafts are pending.
        """
        self._slots = self._accepted = self._offsets = None
        generation = slots[contexts:] if generation_slots is None else generation_slots
        if self.drafts is None or len(generation) == 0:
            return
        validate_verify.generation_rows(rows, len(generation), self.drafts)
        if rows != len(generation):
            self._slots = generation
        elif self.counts.device.type == "cpu":
            validate_verify.no_pending(_accepted(self.counts, generation))

    def accepted(self) -> Tensor | None:
        """int32 [N]: the accepted tokens of each generation request, 0 for padding; None when nothing is verified."""
        if self._accepted is None and self._slots is not None:
            self._accepted = _accepted(self.counts, self._slots)
        return self._accepted

    def get(self) -> Offsets | None:
        """This step's offsets; None for single tokens, without replay caches, and without a KDA layer on this rank."""
        accepted = self.accepted()
        if self._offsets is None and accepted is not None and self.drafts is not None:
            self._offsets = offsets(accepted, self.drafts)
        return self._offsets

    def clear(self, slots: Tensor) -> None:
        """Nothing is pending in `slots` from now on: `counts` becomes 0 there, in place."""
        every = torch.arange(len(self.counts), dtype=slots.dtype, device=slots.device)
        self.counts.masked_fill_((every[:, None] == slots).any(1), 0)  # no index of padding, no wait for the device


def _accepted(counts: Tensor, slots: Tensor) -> Tensor:
    """counts[slots], and 0 for a slot outside."""
    live = (slots >= 0) & (slots < len(counts))
    return torch.where(live, counts[torch.where(live, slots, 0).long()], 0) if len(counts) else torch.zeros_like(slots)
