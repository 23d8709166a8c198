"""One input contract for every implementation of the sparse MLA operators: structure always, values on request.

-1, ids past the cache, repeated ids, rows of padding alone and empty rows are legal: they have a meaning. Structure costs
nothing; values (scales, block tables) cost a device synchronisation: operators check them for CPU tensors.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import fp8, widths
from reference.mla_cache import POOL, MlaCache, Sequences
from reference.mla_weights import NAMES, MlaWeights
from reference.validate import FLOATS, _contiguous, _fail, _last_contiguous, _norm_eps, _overlaps, _tensor, offsets, values

IDS = "ids are int32: convert them once, where they are made"
CORE_SIZES = "T, H and L come from q [T, H, L]"
INDEX_SIZES = "T, Hi and D come from index_q [T, Hi, D]"


@dataclass(frozen=True)
class AttendSizes:
    """tokens [T], heads [H], channels [L], width [W] of ids, rows of the cache; page: P."""

    tokens: int
    heads: int
    channels: int
    width: int
    rows: int
    page: int


@dataclass(frozen=True)
class LayerSizes:
    """Of a layer: hidden, heads [H] on this rank, key_dim K, value_dim V, channels L, index_heads Hi, index_dim D."""

    hidden: int
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    index_heads: int
    index_dim: int


def _rank(name: str, x: object, rank: int, form: str, hint: str) -> None:
    if not isinstance(x, Tensor) or x.ndim != rank:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        _fail(name, f"a tensor {form}", got, hint, TypeError)


def _ids(name: str, x: object, form: str, rank: int) -> None:
    _rank(name, x, rank, form, IDS)
    assert isinstance(x, Tensor)
    if x.dtype != torch.int32:
        _fail(name, "dtype int32", str(x.dtype).removeprefix("torch."), IDS, TypeError)


def _pool(name: str, x: Tensor) -> None:
    """A pool [pages, P, C]: rows contiguous inside, pages and rows as far apart as they like."""
    _rank(name, x, 3, "[pages, P, C]", "a flat cache [rows, C] is a view of it: cache[:, None]")
    _last_contiguous(name, x)


def _written(name: str, x: Tensor) -> None:
    if _overlaps(x):
        _fail(name, "distinct elements", f"strides {x.stride()}", "an expanded or overlapping tensor can't be updated in place")
    if x.requires_grad:
        _fail(name, "a tensor that needs no gradient", "requires_grad=True", f"pass {name}.detach()")


def latent_rows(name: str, latent: Tensor, channels: int, kv_scale: Tensor | None, device: torch.device, scale_name: str) -> None:
    """Rows of `channels` numbers, of bytes with their scales, or of E4M3 with one scale."""
    _pool(name, latent)
    if latent.device != device:
        _fail(name, f"a tensor on {device}", latent.device, f"move it with {name}.to({str(device)!r})")
    if latent.dtype == torch.uint8:
        fp8.check_rows(latent, channels, name)
    elif latent.dtype not in (*FLOATS, fp8.E4M3):
        _fail(name, "a floating dtype, float8_e4m3fn, or uint8 rows with scales", latent.dtype, "see fp8.quantize_rows", TypeError)
    elif latent.shape[2] != channels:
        _fail(name, f"rows of {channels} channels", latent.shape[2], CORE_SIZES)
    if (kv_scale is not None) != (latent.dtype == fp8.E4M3):
        got = "none" if kv_scale is None else f"one with {latent.dtype} rows"
        _fail(scale_name, "a scale for float8_e4m3fn rows, and only there", got, "rows of bytes carry their own")
    if kv_scale is not None:
        if not isinstance(kv_scale, Tensor) or kv_scale.numel() != 1 or kv_scale.dtype != torch.float32 or kv_scale.device != device:
            _fail(scale_name, f"an FP32 tensor of one value on {device}", kv_scale, "one static scale for the tensor", TypeError)


def attend(
    q: Tensor,
    latent: Tensor,
    *,
    ids: Tensor,
    counts: Tensor | None,
    scale: float,
    kv_scale: Tensor | None,
    kernel: str = "reference",
) -> AttendSizes:
    """Structure of `mla.attend` for a kernel of `widths.RULES`."""
    _rank("q", q, 3, "[T, H, L]", "absorbed queries, L channels for each head")
    tokens, heads, channels = q.shape
    _tensor("q", q, (tokens, heads, channels), FLOATS, q.device)
    if channels == 0:
        _fail("q", "at least one channel", 0, CORE_SIZES)
    _last_contiguous("q", q)
    widths.padded_heads(heads, kernel)
    latent_rows("latent", latent, channels, kv_scale, q.device, "kv_scale")
    _ids("ids", ids, "[T, W]", 2)
    _tensor("ids", ids, (tokens, ids.shape[1]), (torch.int32,), q.device, CORE_SIZES)
    _last_contiguous("ids", ids)
    widths.check_width(ids.shape[1], kernel)
    if counts is not None:
        _ids("counts", counts, "[T]", 1)
        _tensor("counts", counts, (tokens,), (torch.int32,), q.device, CORE_SIZES)
        _contiguous(counts=counts)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        _fail("scale", "a positive finite number", scale, "K^-0.5 of the heads before absorption: 1/16 for GLM-5.3-Flash")
    return AttendSizes(tokens, heads, channels, ids.shape[1], latent.shape[0] * latent.shape[1], latent.shape[1])


def attend_values(q: Tensor, latent: Tensor, ids: Tensor, counts: Tensor | None, kv_scale: Tensor | None) -> None:
    """No scale that is used is zero, negative, infinite or NaN. Synchronises the device."""
    if kv_scale is not None:
        _scales("kv_scale", kv_scale.reshape(1))
    if latent.dtype == torch.uint8:
        used = ids if counts is None else ids[torch.arange(ids.shape[1], device=ids.device) < counts[:, None]]
        rows = used[(used >= 0) & (used < latent.shape[0] * latent.shape[1])].unique().long()
        _scales("latent", fp8.row_scales(latent[rows // latent.shape[1], rows % latent.shape[1]], q.shape[2]))


def _scales(name: str, scales: Tensor) -> None:
    wrong = scales[~((scales > 0) & (scales < math.inf))]
    if len(wrong):
        _fail(name, "positive finite scales", wrong[:4].tolist(), "quantise the rows again: even a row of zeros has a scale")


def combine(outs: Tensor, lses: Tensor) -> None:
    """Structure of `mla.combine`."""
    _rank("outs", outs, 4, "[S, T, H, L]", "one output for each part")
    _tensor("lses", lses, tuple(outs.shape[:3]), FLOATS, outs.device, "S, T and H come from outs [S, T, H, L]")
    if outs.shape[0] == 0:
        _fail("outs", "at least one part", 0, "an attention without parts has no shape")


def pool_keys(index_k: Tensor, pool_gate: Tensor, ape: Tensor) -> None:
    """Structure of `kpool.pool_keys`."""
    if not isinstance(index_k, Tensor) or index_k.ndim < 2 or index_k.shape[-2] != POOL:
        got = list(index_k.shape) if isinstance(index_k, Tensor) else type(index_k).__name__
        _fail("index_k", f"a tensor [..., {POOL}, D]", got, f"a pool has {POOL} tokens")
    _tensor("index_k", index_k, tuple(index_k.shape), FLOATS, index_k.device)
    _tensor("pool_gate", pool_gate, tuple(index_k.shape), FLOATS, index_k.device, "it has a gate for each key")
    _tensor("ape", ape, (POOL, index_k.shape[-1]), FLOATS, index_k.device, "a position term for each token of a pool")


def _rows(tokens: int, device: torch.device, owner: Tensor, position: Tensor, block_table: Tensor) -> None:
    for name, x in (("owner", owner), ("position", position)):
        _ids(name, x, "[T]", 1)
        _tensor(name, x, (tokens,), (torch.int32,), device, "one for each token: mla_cache.locate makes them")
        _contiguous(**{name: x})
    _table(block_table, device)


def _table(block_table: Tensor, device: torch.device) -> None:
    _ids("block_table", block_table, "[N, blocks]", 2)
    _tensor("block_table", block_table, tuple(block_table.shape), (torch.int32,), device)
    _last_contiguous("block_table", block_table)


def scores(index_q: Tensor, head_weight: Tensor, pool_keys: Tensor, owner: Tensor, position: Tensor, block_table: Tensor) -> None:
    """Structure of `kpool.scores`."""
    _rank("index_q", index_q, 3, "[T, Hi, D]", "one query for each index head")
    tokens, heads, dim = index_q.shape
    if heads == 0 or dim == 0:
        _fail("index_q", "at least one head and channel", [heads, dim], INDEX_SIZES)
    _tensor("index_q", index_q, (tokens, heads, dim), FLOATS, index_q.device)
    _tensor("head_weight", head_weight, (tokens, heads), FLOATS, index_q.device, INDEX_SIZES)
    _pool("pool_keys", pool_keys)
    _tensor("pool_keys", pool_keys, (*pool_keys.shape[:2], dim), FLOATS, index_q.device, INDEX_SIZES)
    for name, x in (("index_q", index_q), ("head_weight", head_weight)):
        _last_contiguous(name, x)
    _rows(tokens, index_q.device, owner, position, block_table)


def select(score: Tensor, owner: Tensor, position: Tensor, block_table: Tensor, page: int, top: int) -> None:
    """Structure of `kpool.select`."""
    _rank("score", score, 2, "[T, columns]", "kpool.scores makes it")
    _tensor("score", score, tuple(score.shape), FLOATS, score.device)
    _last_contiguous("score", score)
    _rows(score.shape[0], score.device, owner, position, block_table)
    if not isinstance(page, int) or page < POOL or page % POOL:
        _fail("page", f"a multiple of {POOL} tokens", page, "a pool lies in one page")
    if not isinstance(top, int) or top < 1:
        _fail("top", "at least one pool", top, "GLM-5.3-Flash keeps 512")


def sequences(given: Sequences, tokens: int, device: torch.device) -> None:
    """Structure of `Sequences` for a call of `tokens` rows."""
    if not isinstance(given, Sequences):
        _fail("sequences", "an mla_cache.Sequences", type(given).__name__, "Sequences(slots, starts, cu_seqlens, block_table)", TypeError)
    _ids("sequences.slots", given.slots, "[N]", 1)
    count = given.slots.shape[0]
    hint = "N comes from slots [N]"
    for name, x, size in (
        ("slots", given.slots, count), ("starts", given.starts, count), ("cu_seqlens", given.cu_seqlens, count + 1)
    ):  # fmt: skip
        _ids(f"sequences.{name}", x, "[N]", 1)
        _tensor(f"sequences.{name}", x, (size,), (torch.int32,), device, hint)
        _contiguous(**{f"sequences.{name}": x})
    _table(given.block_table, device)
    if given.block_table.shape[0] != count:
        _fail("sequences.block_table", f"a row for each of {count} sequences", given.block_table.shape[0], hint)
    if count == 0 and tokens:
        _fail("sequences.slots", f"sequences for {tokens} tokens", 0, "a token belongs to a sequence")


def sequences_values(given: Sequences, tokens: int, slot_count: int, page: int, pages: int) -> None:
    """Slots are distinct, lengths add up, and every position of a live sequence has a page of its own. Synchronises the device."""
    values(given.slots, slot_count)
    offsets(given.cu_seqlens, tokens)
    named: Counter[int] = Counter()
    written: dict[int, int] = {}
    lengths = given.cu_seqlens.diff().tolist()
    for n, (slot, start, length) in enumerate(zip(given.slots.tolist(), given.starts.tolist(), lengths, strict=True)):
        if not 0 <= slot < slot_count or length == 0:
            continue
        if start < 0:
            _fail("sequences.starts", "positions of 0 and more", start, "0 for a new request")
        blocks = -(-(start + length) // page)
        if blocks > given.block_table.shape[1]:
            expected = f"at least {blocks} blocks of {page} tokens for the {start + length} of sequence {n}"
            _fail("sequences.block_table", expected, given.block_table.shape[1], "the table is too short: widen it before the call")
        used = given.block_table[n, :blocks].tolist()
        if wrong := [found for found in used if not 0 <= found < pages]:
            _fail("sequences.block_table", f"pages in 0..{pages - 1}", f"{wrong[0]} for sequence {n}", "allocate pages before the call")
        named.update(used)
        written |= dict.fromkeys(used[start // page :], n)
    for found, n in written.items():
        if named[found] > 1:
            hint = "pages may be shared where nobody writes"
            _fail("sequences.block_table", "pages of its own where tokens are written", f"{found} of sequence {n} twice", hint)


def cache(index_k: Tensor, pool_gate: Tensor, ape: Tensor, pool_keys: Tensor, ring: Tensor, given: Sequences) -> None:
    """Structure of `kpool.cache`."""
    _rank("index_k", index_k, 2, "[T, D]", "one key for each token")
    tokens, dim = index_k.shape
    _tensor("index_k", index_k, (tokens, dim), FLOATS, index_k.device)
    _tensor("pool_gate", pool_gate, (tokens, dim), FLOATS, index_k.device, "it has a gate for each key")
    for name, x in (("index_k", index_k), ("pool_gate", pool_gate)):
        _last_contiguous(name, x)
    _tensor("ape", ape, (POOL, dim), FLOATS, index_k.device, "a position term for each token of a pool")
    _contiguous(ape=ape)
    index_pools(pool_keys, ring, dim, index_k.device)
    sequences(given, tokens, index_k.device)


def index_pools(pool_keys: Tensor, ring: Tensor, dim: int, device: torch.device) -> None:
    """Structure of the indexer's pools."""
    for name, x, width in (("pool_keys", pool_keys, dim), ("ring", ring, 2 * dim)):
        _pool(name, x)
        _tensor(name, x, (*x.shape[:2], width), FLOATS, device, "D comes from index_k [T, D]")
        _written(name, x)
    if ring.shape[1] < POOL:
        _fail("ring", f"at least {POOL} rows, {POOL} + S with S drafts", ring.shape[1], "mla_cache.ring_rows(drafts) is enough")


def store(row: Tensor, given: MlaCache, owner: Tensor, position: Tensor, block_table: Tensor, policy: str) -> None:
    """Structure of `mla.store`."""
    _rank("row", row, 2, "[T, L]", "one latent row for each token")
    _tensor("row", row, tuple(row.shape), FLOATS, row.device)
    _last_contiguous("row", row)
    latent_rows("cache.latent", given.latent, row.shape[1], given.scale, row.device, "cache.scale")
    _written("cache.latent", given.latent)
    _rows(row.shape[0], row.device, owner, position, block_table)
    if policy not in ("fp32", "pow2"):
        _fail("policy", "fp32 or pow2", repr(policy), "fp32 stores the scale as it is, pow2 raises it to a power of two")
    if given.scale is not None and given.scale.device.type == "cpu":
        _scales("cache.scale", given.scale.reshape(1))


def weights(given: MlaWeights) -> LayerSizes:
    """Structure of the weights of a layer; the sizes they imply."""
    if not isinstance(given, MlaWeights):
        _fail("weights", "an mla_weights.MlaWeights", type(given).__name__, "build one from the checkpoint's tensors", TypeError)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj"):
        _rank(name, getattr(given, name), 2, "[out, in]", "a linear weight is [out, in]")
    heads = given.heads
    for name, size in (("q_b_proj", given.q_b_proj.shape[0]), ("o_proj", given.o_proj.shape[1])):
        if heads < 1 or size == 0 or size % heads:
            _fail(name, f"a multiple of {heads} heads", size, "heads is that of this rank")
    (rank, hidden), channels = given.q_a_proj.shape, given.kv_a_proj_with_mqa.shape[0]
    key, value = given.q_b_proj.shape[0] // heads, given.o_proj.shape[1] // heads
    index_heads, dim = given.weights_proj.shape[0], given.wk.shape[0]
    shapes = dict(
        q_a_proj=(rank, hidden), q_a_layernorm=(rank,), q_b_proj=(heads * key, rank), kv_a_proj_with_mqa=(channels, hidden),
        kv_a_layernorm=(channels,), kv_b_proj=(heads * (key + value), channels), o_proj=(hidden, heads * value),
        wq_b=(index_heads * dim, rank), wk=(dim, hidden), k_norm=(dim,), k_norm_bias=(dim,), weights_proj=(index_heads, hidden),
        index_kpool_compress_gate=(dim, hidden), index_kpool_compress_ape=(POOL, dim),
    )  # fmt: skip
    for name in NAMES:
        _tensor(name, getattr(given, name), shapes[name], FLOATS, given.q_a_proj.device, "sizes come from the other weights of the layer")
    return LayerSizes(hidden, heads, key, value, channels, index_heads, dim)


def layer(hidden: Tensor, given: MlaWeights, cache: MlaCache, rows: Sequences, norm_eps: float, top: int) -> LayerSizes:
    """Structure of `mla.layer`."""
    sizes = weights(given)
    _rank("hidden", hidden, 2, "[T, hidden]", "flatten sequences into rows")
    device = given.q_a_proj.device
    _tensor("hidden", hidden, (hidden.shape[0], sizes.hidden), FLOATS, device, "it must fit the layer's q_a_proj [Rq, hidden]")
    _last_contiguous("hidden", hidden)
    if not isinstance(cache, MlaCache):
        _fail("cache", "an mla_cache.MlaCache", type(cache).__name__, "MlaCache(latent, pool_keys, ring)", TypeError)
    latent_rows("cache.latent", cache.latent, sizes.channels, cache.scale, device, "cache.scale")
    _written("cache.latent", cache.latent)
    index_pools(cache.pool_keys, cache.ring, sizes.index_dim, device)
    pages, page = cache.latent.shape[:2]
    if page < POOL or page % POOL:
        _fail("cache.latent", f"pages of a multiple of {POOL} tokens", page, "a pool lies in one page")
    if cache.pool_keys.shape[:2] != (pages, page // POOL):
        got = list(cache.pool_keys.shape[:2])
        _fail("cache.pool_keys", f"{pages} pages of {page // POOL} pools", got, "latent rows and pool keys share the block table")
    sequences(rows, hidden.shape[0], device)
    _norm_eps(norm_eps)
    if not isinstance(top, int) or top < 1:
        _fail("top", "at least one pool", top, "GLM-5.3-Flash keeps 512")
    if cache.scale is not None and cache.scale.device.type == "cpu":
        _scales("cache.scale", cache.scale.reshape(1))
    return sizes
