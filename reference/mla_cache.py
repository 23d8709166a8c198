"""Caches of a sparse MLA layer as pools, and which tokens of a call lie where in them.

Source: spec of the model, sections 6.9 and 7; spec of the contracts, sections 2 and 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

POOL = 4  # tokens of a pool key


@dataclass(frozen=True)
class MlaCache:
    """One layer, updated in place. Pages of P tokens, P a multiple of 4, are shared by `latent` and `pool_keys`.

    latent [pages, P, L] in the activation dtype or FP32; uint8 [pages, P, 528 or 656] (`fp8.quantize_rows`); or E4M3
    [pages, P, L] with `scale`, an FP32 tensor of one value. pool_keys [pages, P/4, D]: of pool j at its page's row j % (P/4).
    ring [slots, R, 2*D]: raw keys and pool gates of a sequence's last R tokens, that of position p in row p % R.
    """

    latent: Tensor
    pool_keys: Tensor
    ring: Tensor
    scale: Tensor | None = None

    @property
    def page(self) -> int:
        """P."""
        return self.latent.shape[1]


@dataclass(frozen=True)
class Sequences:
    """N sequences of a call, whatever their phase: prefill, decode (one token) and verify (1+S tokens) differ in lengths alone.

    slots int32 [N]: of the ring; outside it is padding. starts int32 [N]: position of the first new token of each, 0 for a new
    request; after a verify, past the accepted tokens. cu_seqlens int32 [N+1] over the new tokens. block_table int32
    [N, blocks]: page of each P positions; -1 where there is none.
    """

    slots: Tensor
    starts: Tensor
    cu_seqlens: Tensor
    block_table: Tensor


def ring_rows(drafts: int = 0) -> int:
    """R of a ring that survives the rejection of `drafts`: 4 * next_pow2(ceil((4 + S) / 4))."""
    pools = -(-(POOL + drafts) // POOL)
    return POOL * (1 << (pools - 1).bit_length())


def locate(sequences: Sequences, tokens: int, slot_count: int) -> tuple[Tensor, Tensor]:
    """`(owner, position)` int32 [T]: the sequence of each token and its position there, -1 for padding. Reads nothing on the host."""
    every = torch.arange(tokens, device=sequences.slots.device, dtype=torch.int32)
    if len(sequences.slots) == 0:
        return torch.zeros_like(every), torch.full_like(every, -1)
    owner = torch.searchsorted(sequences.cu_seqlens[1:].contiguous(), every, right=True).clamp(max=len(sequences.slots) - 1)
    position = sequences.starts[owner] + every - sequences.cu_seqlens[owner]
    slot = sequences.slots[owner]
    return owner.int(), torch.where((slot >= 0) & (slot < slot_count), position, -1).int()


def page_rows(block_table: Tensor, owner: Tensor, position: Tensor, page: int) -> Tensor:
    """Row `block_table[owner, position // page] * page + position % page` of each token in the cache, int64; -1 without one.

    owner and position broadcast; a position below 0, past the table, or on a page below 0 has no row.
    """
    block = torch.div(position, page, rounding_mode="floor").long()
    inside = (position >= 0) & (block < block_table.shape[1])
    if block_table.numel() == 0:
        return torch.full_like(block, -1)
    found = block_table[owner.long(), torch.where(inside, block, 0)].long()
    return torch.where(inside & (found >= 0), found * page + position % page, -1)


def flat_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """Rows [.., C] of a pool [pages, P, C]; zeros for ids outside it, whose memory isn't used: NaN there stays there."""
    pages, page = pool.shape[:2]
    inside = (rows >= 0) & (rows < pages * page)
    if pages * page == 0:
        return pool.new_zeros(*rows.shape, pool.shape[2])
    at = torch.where(inside, rows, 0).long()
    found = pool[at // page, at % page]
    return found.masked_fill_(~inside[..., None], 0) if found.dtype.itemsize > 1 else torch.where(inside[..., None], found, 0)


def store_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values [M, C] to rows [M] of a pool [pages, P, C]; ids outside it write nothing."""
    pages, page = pool.shape[:2]
    inside = (rows >= 0) & (rows < pages * page)
    at = rows[inside].long()
    pool[at // page, at % page] = values[inside].to(pool.dtype)
