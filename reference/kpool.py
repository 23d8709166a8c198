"""The k-pool indexer: one key for each four tokens, the 512 best pools for each query, and the ids of their rows.

Computes in the dtype of its inputs, at least FP32, with no Hadamard transform and no quantisation. Source: spec of the model,
sections 6.3 to 6.9 (transformers `glm5_next`, vLLM, TensorRT-LLM).
"""

import torch
from torch import Tensor

from reference import validate_mla
from reference.mla_cache import POOL, Sequences, flat_rows, locate, page_rows, store_rows
from reference.points import At, exact
from reference.precision import full_precision
from reference.widths import align_width

TOP_POOLS = 512
TAIL = POOL - 1  # tokens of the open pool, at most: the current one is there unless it completes a pool
TOKENS_AT_ONCE = 256


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of a computation: the widest of the inputs, at least FP32."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def pool_keys(index_k: Tensor, pool_gate: Tensor, *, ape: Tensor, at: At = exact) -> Tensor:
    """pk[d] = sum_s softmax_s(gate[s, d] + ape[s, d]) k[s, d], each channel for itself: [..., 4, D] -> [..., D].

    index_k, pool_gate [..., 4, D]: normed keys and raw gates of a pool's tokens; ape [4, D]. Returns the dtype of the
    computation. ValueError or TypeError for other shapes.
    """
    validate_mla.pool_keys(index_k, pool_gate, ape)
    dtype = wide(index_k, pool_gate, ape)
    prob = at("pool_prob", (pool_gate.to(dtype) + ape.to(dtype)).softmax(-2))
    return at("pool_key", (prob * index_k.to(dtype)).sum(-2))


@full_precision
def scores(
    index_q: Tensor,
    head_weight: Tensor,
    *,
    pool_keys: Tensor,
    owner: Tensor,
    position: Tensor,
    block_table: Tensor,
    at: At = exact,
) -> Tensor:
    """score[t, j] = sum_h head_weight[t, h] relu(D^-0.5 index_q[t, h] . pk[j]) for pools j with 4j + 3 <= position, else -inf.

    index_q [T, Hi, D]; head_weight [T, Hi], Hi^-0.5 included, of any sign. pool_keys [pages, P/4, D], addressed by block_table
    int32 [N, blocks] of pages of P tokens; owner, position int32 [T] as from `mla_cache.locate`. Pools that a row doesn't see
    are not read. Returns [T, blocks*P/4] in the dtype of the computation, FP32 at least.
    """
    validate_mla.scores(index_q, head_weight, pool_keys, owner, position, block_table)
    dtype = wide(index_q, pool_keys)
    columns = block_table.shape[1] * pool_keys.shape[1]
    out = torch.full((index_q.shape[0], columns), -torch.inf, dtype=dtype, device=index_q.device)
    pool = torch.arange(columns, device=index_q.device)
    for n in owner[position >= 0].unique().tolist():
        rows = page_rows(block_table, torch.full_like(pool, n), pool, pool_keys.shape[1])
        mine = ((owner == n) & (position >= 0)).nonzero()[:, 0]
        for some in mine.split(TOKENS_AT_ONCE):
            complete = (position[some].long() + 1) // POOL
            seen = pool[: int(complete.max())]
            key = flat_rows(pool_keys, rows[seen]).to(dtype)
            dots = torch.einsum("thd,jd->thj", index_q[some].to(dtype), key) * index_q.shape[2] ** -0.5
            score = at("score", torch.einsum("thj,th->tj", dots.relu(), head_weight[some].to(dtype)))
            out[some, : len(seen)] = score.masked_fill(seen >= complete[:, None], -torch.inf)
    return out


def select(
    score: Tensor,
    *,
    owner: Tensor,
    position: Tensor,
    block_table: Tensor,
    page: int,
    top: int = TOP_POOLS,
    kernel: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Rows of the `top` best complete pools and of the open pool: ids int32 [T, align_width(4*top + 3, kernel)], counts int32 [T].

    score [T, columns] of pools; a row at position p has (p + 1) // 4 candidates, and columns past them are not used. Equal
    scores (-0.0 is 0.0): the pool that comes first wins. In each row the selected pools ascend, the tail 4*((p + 1)//4) .. p
    follows, -1 fills the rest; counts = 4 min(top, candidates) + (p + 1) % 4. A token of padding (position < 0) has -1 and 0.
    ids are rows of a cache of pages of `page` tokens, through block_table; -1 where the table has no page.
    """
    validate_mla.select(score, owner, position, block_table, page, top)
    width = align_width(POOL * top + TAIL, kernel)
    seen = position.long() + 1  # 0 for padding
    complete, tail = seen // POOL, seen % POOL
    kept = complete.clamp(max=top)
    pools = _best(score, complete, top)

    column = torch.arange(width, device=score.device)
    member = torch.where(column < POOL * kept[:, None], pools[:, (column // POOL).clamp(max=top - 1)] * POOL + column % POOL, -1)
    after = column - POOL * kept[:, None]  # of the pools' rows
    member = torch.where((after >= 0) & (after < tail[:, None]), POOL * complete[:, None] + after, member)
    return page_rows(block_table, owner[:, None].expand_as(member), member, page).int(), (POOL * kept + tail).int()


def _best(score: Tensor, complete: Tensor, top: int) -> Tensor:
    """The `top` largest of each row's first `complete` scores as ascending columns [T, top]; what is missing comes last."""
    column = torch.arange(score.shape[1], device=score.device)
    ranked = score.masked_fill(column >= complete[:, None], -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    last = max(score.shape[1], top)
    order = torch.where(order < complete[:, None], order, last).sort(dim=-1).values
    return torch.nn.functional.pad(order, (0, top - order.shape[1]), value=last)


def refresh(
    index_k: Tensor, pool_gate: Tensor, *, ape: Tensor, ring: Tensor, owner: Tensor, position: Tensor, sequences: Sequences, at: At = exact
) -> tuple[Tensor, Tensor]:
    """The pools that this call's tokens complete: `(token [M], key [M, D])`, token the one that completes each.

    Members before the call come from the ring, those of the call from index_k and pool_gate [T, D].
    """
    token = (position % POOL == TAIL).nonzero()[:, 0]  # -1 % 4 is 3
    token = token[position[token] >= 0]
    back = torch.arange(TAIL, -1, -1, device=token.device)
    source, before = token[:, None] - back, position[token].long()[:, None] - back
    first = sequences.starts[owner[token].long()].long()[:, None]
    slot = sequences.slots[owner[token].long()].long()[:, None]
    dtype = wide(index_k, pool_gate, ring)
    raw = torch.cat([index_k, pool_gate], dim=-1).to(dtype)
    carried = before < first
    values = torch.where(
        carried[..., None], ring[slot, before % ring.shape[1]].to(dtype), raw[torch.where(carried, token[:, None], source)]
    )
    key, gate = values.chunk(2, dim=-1)
    return token, pool_keys(key, gate, ape=ape, at=at)


def store_raw(index_k: Tensor, pool_gate: Tensor, *, ring: Tensor, owner: Tensor, position: Tensor, sequences: Sequences) -> None:
    """Raw keys and gates of each sequence's last R tokens of the call into the ring, that of position p at p % R."""
    size = ring.shape[1]
    rows = owner.long()
    last = sequences.starts[rows] + sequences.cu_seqlens[rows + 1] - sequences.cu_seqlens[rows]
    token = ((position >= 0) & (position >= last - size)).nonzero()[:, 0]
    slot = sequences.slots[rows[token]].long()
    ring[slot, position[token].long() % size] = torch.cat([index_k, pool_gate], dim=-1)[token].to(ring.dtype)


def cache(
    index_k: Tensor, pool_gate: Tensor, *, ape: Tensor, pool_keys: Tensor, ring: Tensor, sequences: Sequences, at: At = exact
) -> None:
    """Store the keys of the pools that these tokens complete, and the tokens' raw keys and gates.

    index_k, pool_gate [T, D]: packed by sequences.cu_seqlens. pool_keys [pages, P/4, D] and ring [slots, R, 2*D] are updated in
    place; R >= 4 + S, so that what a verify's rejected drafts wrote over is not needed again: they are written anew at the same
    positions, and a pool that they completed is completed anew. A sequence whose slot lies outside the ring is padding.
    """
    validate_mla.cache(index_k, pool_gate, ape, pool_keys, ring, sequences)
    validate_mla.sequences_values(sequences, len(index_k), ring.shape[0], pool_keys.shape[1] * POOL, pool_keys.shape[0])
    owner, position = locate(sequences, len(index_k), ring.shape[0])
    token, key = refresh(index_k, pool_gate, ape=ape, ring=ring, owner=owner, position=position, sequences=sequences, at=at)
    store_rows(pool_keys, pool_rows(sequences.block_table, owner[token], position[token], pool_keys.shape[1]), key)
    store_raw(index_k, pool_gate, ring=ring, owner=owner, position=position, sequences=sequences)


def pool_rows(block_table: Tensor, owner: Tensor, position: Tensor, page_pools: int) -> Tensor:
    """Row of the pool keys' cache for the pool of each position."""
    return page_rows(block_table, owner, torch.where(position >= 0, position // POOL, -1), page_pools)
