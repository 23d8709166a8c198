"""Sparse multi-head latent attention without rotary part: the absorbed core over selected rows, the dense form, the layer.

One row of L channels is key and value of every head. Computes in the dtype of its inputs, at least FP32. Source: spec of the
model, sections 6.1, 6.2 and 7 (transformers `glm5_next`; FlashMLA).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import fp8, kpool, validate_mla
from reference.kda import rms_norm
from reference.kpool import wide
from reference.mla_cache import MlaCache, Sequences, flat_rows, locate, page_rows, store_rows
from reference.mla_weights import NAMES, MlaWeights
from reference.points import At, exact
from reference.precision import full_precision

KEY_NORM_EPS = 1e-6  # of the indexer's LayerNorm
VALUES_AT_ONCE = 1 << 26  # gathered channels: more tokens than fit are taken in slices, each with points of its own
LN2 = math.log(2.0)


def read_rows(latent: Tensor, channels: int, rows: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of the cache as numbers [..., channels]; ids outside it are zeros, and nothing is read for them."""
    found = flat_rows(latent, rows)
    if latent.dtype == torch.uint8:
        found = fp8.dequantize_rows(found, channels)
    elif kv_scale is not None:
        found = fp8.dequantize_tensor(found, kv_scale)
    return found.to(dtype)


@full_precision
def attend(
    q: Tensor,
    latent: Tensor,
    *,
    ids: Tensor,
    counts: Tensor | None = None,
    scale: float,
    kv_scale: Tensor | None = None,
    at: At = exact,
) -> tuple[Tensor, Tensor]:
    """out[t, h] = sum_s softmax_s(scale q[t, h] . c_s) c_s over the rows s in ids[t], and the natural log of the sum of exponentials.

    q [T, H, L]: absorbed queries. latent [pages, P, L], or uint8 rows of 528 or 656 bytes (`fp8.quantize_rows`), or E4M3 with
    kv_scale, an FP32 tensor of one value. ids int32 [T, W]: rows page * P + offset; an id outside the cache contributes
    nothing, one that stands twice counts twice, order has no say. counts int32 [T]: columns from there on are not used.
    scale: K^-0.5 of the heads before absorption, 1/16 for GLM-5.3-Flash, not L^-0.5.
    Returns out [T, H, L] in the dtype of q, lse [T, H] FP32 at least; 0 and -inf for a row without an id. ValueError or TypeError
    before anything is computed.
    """
    validate_mla.attend(q, latent, ids=ids, counts=counts, scale=scale, kv_scale=kv_scale)
    validate_mla.attend_values(q, latent, ids, counts, kv_scale)
    tokens, heads, channels = q.shape
    out, lse = torch.zeros_like(q), q.new_full((tokens, heads), -torch.inf, dtype=wide(q))
    used = ids.long()
    if counts is not None:
        used = used.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= counts[:, None], -1)
    for some in torch.arange(tokens, device=q.device).split(max(1, VALUES_AT_ONCE // max(1, ids.shape[1] * channels))):
        rows = at("latent", read_rows(latent, channels, used[some], kv_scale, lse.dtype))
        inside = (used[some] >= 0) & (used[some] < latent.shape[0] * latent.shape[1])
        y, lse[some] = _softmax(at("q_absorbed", q[some].to(lse.dtype)), rows, inside[:, None], scale, at)
        out[some] = y.to(out.dtype)
    return out, lse


def _softmax(q: Tensor, rows: Tensor, inside: Tensor, scale: float, at: At) -> tuple[Tensor, Tensor]:
    """`attended` and the natural-log sum. The weights are over a power of two, so that rounding them doesn't depend on which."""
    logit = at("logit", torch.einsum("thl,twl->thw", q, rows) * scale).masked_fill(~inside, -torch.inf)
    if logit.shape[-1] == 0:
        return torch.zeros_like(q), logit.sum(-1) - torch.inf
    most = logit.amax(-1, keepdim=True)
    base = torch.where(most == -torch.inf, 0, (most / LN2).ceil() * LN2)
    weight = (logit - base).exp()
    total = weight.sum(-1, keepdim=True)
    attended = torch.einsum("thw,twl->thl", at("prob", weight), rows)
    return at("attended", torch.where(total == 0, 0, attended / total)), (total.log() + base)[..., 0]


@full_precision
def combine(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of one attention as a whole: outs [S, T, H, L], lses [S, T, H] natural log -> out [T, H, L], lse [T, H].

    A part without rows (lse -inf) is neutral whatever its output holds; all of them empty: 0 and -inf.
    """
    validate_mla.combine(outs, lses)
    lse = lses.logsumexp(0)
    share = torch.where(lses == -torch.inf, 0, (lses - lse).exp())[..., None]
    parts = torch.where(share == 0, 0, outs.to(wide(outs, lses)))
    return (share * parts).sum(0).to(outs.dtype), lse


def split_heads(kv_b: Tensor, heads: int, key_dim: int) -> tuple[Tensor, Tensor]:
    """kv_b [H*(K+V), L] as `(keys [H, K, L], values [H, V, L])`."""
    by_head = kv_b.unflatten(0, (heads, -1))
    return by_head[:, :key_dim], by_head[:, key_dim:]


@full_precision
def absorb(q: Tensor, kv_b: Tensor) -> Tensor:
    """Wk_h^T q[t, h]: [T, H, K] with kv_b [H*(K+V), L] -> [T, H, L]."""
    keys, _ = split_heads(kv_b, q.shape[1], q.shape[2])
    return torch.einsum("thk,hkl->thl", q, keys)


@full_precision
def expand(attended: Tensor, kv_b: Tensor, key_dim: int) -> Tensor:
    """Wv_h z[t, h]: [T, H, L] -> [T, H, V]."""
    _, values = split_heads(kv_b, attended.shape[1], key_dim)
    return torch.einsum("thl,hvl->thv", attended, values)


@full_precision
def dense(q: Tensor, latent: Tensor, *, kv_b: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with keys and values of each head written out: `(out [T, H, V], lse [T, H])`, the same numbers as the absorbed form.

    q [T, H, K]; latent [S, L]; kv_b [H*(K+V), L]; visible bool [T, S]. k = Wk c, v = Wv c, softmax of K^-0.5 q . k.
    """
    keys, values = split_heads(kv_b, q.shape[1], q.shape[2])
    logit = torch.einsum("thk,hkl,sl->ths", q, keys, latent) * q.shape[2] ** -0.5
    logit = logit.masked_fill(~visible[:, None], -torch.inf)
    lse = logit.logsumexp(-1)
    prob = torch.where(lse[..., None] == -torch.inf, 0, (logit - lse[..., None]).exp())
    return torch.einsum("ths,hvl,sl->thv", prob, values, latent), lse


def project(hidden: Tensor, weights: MlaWeights, norm_eps: float, at: At) -> dict[str, Tensor]:
    """What the layer makes of its tokens alone: query [T, H, K], row [T, L], index_q [T, Hi, D], index_k, pool_gate [T, D]."""
    index_heads = weights.weights_proj.shape[0]
    q_latent = at("q_latent", rms_norm(hidden @ weights.q_a_proj.T, weights.q_a_layernorm, norm_eps))
    key = hidden @ weights.wk.T
    return dict(
        query=at("query", q_latent @ weights.q_b_proj.T).unflatten(1, (weights.heads, -1)),
        row=at("kv_latent", rms_norm(hidden @ weights.kv_a_proj_with_mqa.T, weights.kv_a_layernorm, norm_eps)),
        index_q=at("index_q", q_latent @ weights.wq_b.T).unflatten(1, (index_heads, -1)),
        index_k=at("index_k", F.layer_norm(key, key.shape[1:], weights.k_norm, weights.k_norm_bias, KEY_NORM_EPS)),
        pool_gate=at("pool_gate", hidden @ weights.index_kpool_compress_gate.T),
    )


def encode(row: Tensor, cache: MlaCache, policy: fp8.Policy = "fp32") -> Tensor:
    """Latent rows [T, L] as the cache stores them."""
    if cache.latent.dtype == torch.uint8:
        reserved = cache.latent.shape[2] == fp8.row_bytes(row.shape[1], reserved=True)
        return fp8.quantize_rows(row, policy=policy, reserved=reserved)
    return row.to(cache.latent.dtype) if cache.scale is None else fp8.quantize_tensor(row, cache.scale)


@full_precision
def store(row: Tensor, *, cache: MlaCache, owner: Tensor, position: Tensor, block_table: Tensor, policy: fp8.Policy = "fp32") -> None:
    """Normed latent rows [T, L] into cache.latent, in place, as it stores them: rounded, or quantised and saturated explicitly.

    owner, position int32 [T] as from `mla_cache.locate`, block_table int32 [N, blocks]: a token of padding, or without a page,
    writes nothing. policy: of the scales of FP8 rows. ValueError or TypeError before anything is touched.
    """
    validate_mla.store(row, cache, owner, position, block_table, policy)
    store_rows(cache.latent, page_rows(block_table, owner, position, cache.page), encode(row, cache, policy))


@full_precision
def layer(
    hidden: Tensor,
    weights: MlaWeights,
    *,
    cache: MlaCache,
    sequences: Sequences,
    norm_eps: float = 1e-5,
    top: int = kpool.TOP_POOLS,
    policy: fp8.Policy = "fp32",
    at: At = exact,
) -> Tensor:
    """out = reshape(Wv attend(Wk^T q, rows that the indexer selects)) Wo^T, for prefill, decode and verify alike.

    hidden [T, hidden]: new tokens of `sequences`, packed. Weights as in `MlaWeights`, in the dtype of hidden. cache is updated in
    place: the tokens' rows, the keys of the pools that they complete, their raw keys; a verify's rejected tokens are written
    over by the next call, which starts at their positions. top: pools selected for a row. policy: of the scales of FP8 rows.
    Rows stored wider than FP8 are attended to before they are rounded, those of earlier calls as they are stored.
    Returns [T, hidden] in the dtype of hidden: of this rank's heads, to be summed over ranks. Rows of padding are zero.
    ValueError or TypeError before anything is touched.
    """
    sizes = validate_mla.layer(hidden, weights, cache, sequences, norm_eps, top)
    validate_mla.sequences_values(sequences, len(hidden), cache.ring.shape[0], cache.page, cache.latent.shape[0])
    dtype, table = wide(hidden), sequences.block_table
    weights = MlaWeights(**{name: getattr(weights, name).to(dtype) for name in NAMES}, heads=weights.heads)
    wide_hidden = hidden.to(dtype)
    given = project(wide_hidden, weights, norm_eps, at)
    owner, position = locate(sequences, len(hidden), cache.ring.shape[0])

    raw: dict[str, Any] = dict(owner=owner, position=position, sequences=sequences)
    index_k, pool_gate = given["index_k"], given["pool_gate"]
    token, key = kpool.refresh(index_k, pool_gate, ape=weights.index_kpool_compress_ape, ring=cache.ring, **raw, at=at)
    key_rows = kpool.pool_rows(table, owner[token], position[token], cache.pool_keys.shape[1])
    keys = cache.pool_keys.to(dtype, copy=True)
    store_rows(keys, key_rows, key)
    store_rows(cache.pool_keys, key_rows, key)
    kpool.store_raw(index_k, pool_gate, ring=cache.ring, **raw)
    rows = page_rows(table, owner, position, cache.page)
    store(given["row"], cache=cache, owner=owner, position=position, block_table=table, policy=policy)
    latent = cache.latent
    if latent.dtype.itemsize > 1:
        latent = latent.to(dtype, copy=True)
        store_rows(latent, rows, given["row"])

    where: dict[str, Any] = dict(owner=owner, position=position, block_table=table)
    head_weight = at("head_weight", wide_hidden @ weights.weights_proj.T * sizes.index_heads**-0.5)
    score = kpool.scores(given["index_q"], head_weight, pool_keys=keys, **where, at=at)
    ids, counts = kpool.select(score, **where, page=cache.page, top=top)
    attended, _ = attend(
        absorb(given["query"], weights.kv_b_proj), latent, ids=ids, counts=counts, scale=sizes.key_dim**-0.5, kv_scale=cache.scale, at=at
    )
    out = at("out", expand(attended, weights.kv_b_proj, sizes.key_dim))
    return at("o_proj", out.flatten(1) @ weights.o_proj.T).to(hidden.dtype)
