"""The k-pool indexer: scores of pools, the best of them as row ids, and the keys of pools that tokens complete.

scores: a program for one query and some pools; heads in the columns of a product. select: one program for a query finds the
512th score by its bytes, then writes ids in one ascending pass: of equal scores the first pools win. cache: one program for a
token. Source: spec of the model, sections 6.4 to 6.9; `reference.kpool`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import arch, interpreter
from optimized.mla_attend import LEAST_DOT
from optimized.mla_tiles import kpool_tile
from reference import validate_mla
from reference.kpool import TAIL, TOP_POOLS
from reference.mla_cache import POOL, Sequences, locate
from reference.validate import _fail
from reference.widths import align_width

interpreter.repair()

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def kpool_scores_kernel(
    index_q, head_weight, pool_keys, owner, position, block_table, score,
    q_stride, q_head_stride, weight_stride, page_stride, row_stride, table_stride, score_stride, blocks, pages,
    HEADS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BJ
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    complete = (tl.load(position + token) + 1) // 4
    if first >= complete:
        return
    pool = first + tl.arange(0, BJ)
    head = tl.arange(0, BH)
    channel = tl.arange(0, BD)
    block = pool // PAGE
    seen = (pool < complete) & (block < blocks)
    page = tl.load(block_table + tl.load(owner + token).to(tl.int64) * table_stride + block, mask=seen, other=-1)
    inside = seen & (page >= 0) & (page < pages)
    at = page.to(tl.int64) * page_stride + (pool % PAGE) * row_stride
    key = tl.load(pool_keys + at[:, None] + channel[None, :], mask=inside[:, None] & (channel < D)[None, :], other=0.0)
    q_mask = (head < HEADS)[None, :] & (channel < D)[:, None]
    q = tl.load(index_q + token * q_stride + head[None, :] * q_head_stride + channel[:, None], mask=q_mask, other=0.0)
    weight = tl.load(head_weight + token * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
    dots = tl.dot(key, q.to(key.dtype), input_precision="ieee") * SCALE  # [BJ, BH]
    dots = tl.where(dots < 0.0, 0.0, dots)  # NaN stays NaN
    tl.store(score + token * score_stride + pool, tl.sum(dots * weight[None, :], 1), mask=seen)


@triton.jit
def _ordered(x):
    """FP32 scores as unsigned integers in their order; -0.0 is 0.0, NaN is above everything."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(x != x, -1, key).to(tl.uint32, bitcast=True)


@triton.jit
def _member_rows(pool, table, blocks, live, PAGE: tl.constexpr):
    """First row of each pool in the latent cache, -1 where the table has no page. PAGE in pools."""
    block = pool // PAGE
    page = tl.load(table + block, mask=live & (block < blocks), other=-1)
    return page, pool % PAGE


@triton.jit
def kpool_select_kernel(
    score, owner, position, block_table, ids, counts, score_stride, table_stride, ids_stride, blocks, columns,
    TOP: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seen = tl.load(position + token) + 1
    complete = seen // 4
    kept = tl.minimum(complete, TOP)
    score += token * score_stride
    table = block_table + tl.load(owner + token).to(tl.int64) * table_stride
    row = ids + token * ids_stride
    every = tl.arange(0, BLOCK)
    digit = tl.arange(0, 256)

    # The kept-th score, a byte at a time: how many scores share its bytes so far, and how many of them are wanted.
    threshold = tl.full([], 0, tl.uint32)
    wanted = kept
    if complete > TOP:
        for turn in tl.static_range(4):
            shift = 24 - 8 * turn
            histogram = tl.zeros([256], tl.int32)
            for first in range(0, complete, BLOCK):
                inside = (first + every < complete) & (first + every < columns)
                key = _ordered(tl.load(score + first + every, mask=inside, other=0.0))
                if turn > 0:
                    inside = inside & ((key >> (shift + 8)) == (threshold >> (shift + 8)))
                byte = ((key >> shift) & 255).to(tl.int32)
                histogram += tl.histogram(byte, 256, mask=inside)
            above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)  # with a larger byte
            found = tl.max(tl.where(above + histogram >= wanted, digit, 0), 0)
            wanted -= tl.sum(tl.where(digit == found, above, 0), 0)
            threshold = threshold | (found.to(tl.uint32) << shift)

    base = 0
    equal_before = 0
    for first in range(0, complete, BLOCK):
        pool = first + every
        inside = pool < complete
        if complete > TOP:
            key = _ordered(tl.load(score + pool, mask=inside & (pool < columns), other=0.0))
            equal = (inside & (key == threshold)).to(tl.int32)
            rank = equal_before + tl.cumsum(equal, 0)
            take = inside & ((key > threshold) | ((equal == 1) & (rank <= wanted)))
            equal_before += tl.sum(equal, 0)
        else:
            take = inside
        chosen = take.to(tl.int32)
        column = (base + tl.cumsum(chosen, 0) - 1) * 4
        page, offset = _member_rows(pool, table, blocks, take, PAGE)
        first_row = page * (4 * PAGE) + offset * 4
        for member in tl.static_range(4):
            tl.store(row + column + member, tl.where(page < 0, -1, first_row + member), mask=take)
        base += tl.sum(chosen, 0)

    # The open pool's tokens, then -1.
    page, offset = _member_rows(complete, table, blocks, seen > 0, PAGE)
    tail = seen % 4
    rest = tl.arange(0, BW)
    column = 4 * kept + rest
    value = tl.where((rest < tail) & (page >= 0), page * (4 * PAGE) + offset * 4 + rest, -1)
    tl.store(row + column, value, mask=column < WIDTH)
    tl.store(counts + token, 4 * kept + tail)


@triton.jit
def kpool_cache_kernel(
    index_k, pool_gate, ape, pool_keys, ring, owner, position, slots, starts, cu_seqlens, block_table,
    k_stride, gate_stride, page_stride, row_stride, slot_stride, ring_stride, table_stride, blocks, pages,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    here = tl.load(position + token)
    if here < 0:
        return
    n = tl.load(owner + token).to(tl.int64)
    first = tl.load(starts + n)
    last = first + tl.load(cu_seqlens + n + 1) - tl.load(cu_seqlens + n)
    slot = ring + tl.load(slots + n).to(tl.int64) * slot_stride
    channel = tl.arange(0, BD)
    in_d = channel < D
    dtype: tl.constexpr = ring.dtype.element_ty

    # Rows of the ring that the call's first pool reads: the program of its last token reads them, then writes over them.
    opened = first // 4 * 4
    reads = opened + 4 <= last
    if here % 4 == 3:
        most = tl.full([BD], -float("inf"), tl.float32)
        for member in tl.static_range(4):
            gate, _ = _raw(index_k, pool_gate, slot, token, here, member, first, channel, in_d, k_stride, gate_stride, ring_stride, D, RING)
            gate += tl.load(ape + member * D + channel, mask=in_d, other=0.0).to(tl.float32)
            most = tl.maximum(most, gate)
        total = tl.zeros([BD], tl.float32)
        key = tl.zeros([BD], tl.float32)
        for member in tl.static_range(4):
            gate, k = _raw(index_k, pool_gate, slot, token, here, member, first, channel, in_d, k_stride, gate_stride, ring_stride, D, RING)
            gate += tl.load(ape + member * D + channel, mask=in_d, other=0.0).to(tl.float32)
            weight = tl.exp(gate - most)
            total += weight
            key += weight * k
        pool = here // 4
        page = tl.load(block_table + n * table_stride + pool // PAGE, mask=pool // PAGE < blocks, other=-1)
        if (page >= 0) & (page < pages):
            at = pool_keys + page.to(tl.int64) * page_stride + (pool % PAGE) * row_stride
            tl.store(at + channel, (key / total).to(pool_keys.dtype.element_ty), mask=in_d)
        tl.debug_barrier()
        if here == opened + 3:
            for back in tl.static_range(3):
                old = opened + back
                new = old + (last - 1 - old) // RING * RING  # the last position of the call in this row
                if (old < first) & (new >= first):
                    source = token + new - here
                    new_k = tl.load(index_k + source * k_stride + channel, mask=in_d, other=0.0).to(dtype)
                    new_gate = tl.load(pool_gate + source * gate_stride + channel, mask=in_d, other=0.0).to(dtype)
                    tl.store(slot + old % RING * ring_stride + channel, new_k, mask=in_d)
                    tl.store(slot + old % RING * ring_stride + D + channel, new_gate, mask=in_d)

    behind = here % RING - opened % RING
    behind = tl.where(behind < 0, behind + RING, behind)  # rows after that of `opened`
    if (here >= last - RING) & ((reads == 0) | (behind >= first - opened)):
        own_k = tl.load(index_k + token * k_stride + channel, mask=in_d, other=0.0).to(dtype)
        own_gate = tl.load(pool_gate + token * gate_stride + channel, mask=in_d, other=0.0).to(dtype)
        tl.store(slot + here % RING * ring_stride + channel, own_k, mask=in_d)
        tl.store(slot + here % RING * ring_stride + D + channel, own_gate, mask=in_d)


@triton.jit
def _raw(
    index_k, pool_gate, slot, token, here, member: tl.constexpr, first, channel, in_d, k_stride, gate_stride, ring_stride,
    D: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Gate and key of a member of the pool that `here` completes: of this call, or carried in the ring."""
    at = here - 3 + member
    carried = at < first
    source = token - 3 + member
    ours, theirs = in_d & (at >= first), in_d & carried
    old = slot + at % RING * ring_stride + channel
    k = tl.load(index_k + source * k_stride + channel, mask=ours, other=0.0).to(tl.float32)
    gate = tl.load(pool_gate + source * gate_stride + channel, mask=ours, other=0.0).to(tl.float32)
    k_old = tl.load(old, mask=theirs, other=0.0).to(tl.float32)
    gate_old = tl.load(old + D, mask=theirs, other=0.0).to(tl.float32)
    return tl.where(carried, gate_old, gate), tl.where(carried, k_old, k)


def _kernel_dtypes(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype not in FLOATS:
            _fail(name, "dtype bfloat16, float16 or float32", x.dtype, "float64 is for the reference", TypeError)


def scores(index_q: Tensor, head_weight: Tensor, *, pool_keys: Tensor, owner: Tensor, position: Tensor, block_table: Tensor) -> Tensor:
    """`reference.kpool.scores` in one launch; arguments and errors as there.

    index_q in the dtype of pool_keys. Products in FP32, no TF32. Columns of pools that a row doesn't see are not written:
    `select` doesn't read them. Reads no value on the host.
    """
    validate_mla.scores(index_q, head_weight, pool_keys, owner, position, block_table)
    _kernel_dtypes(index_q=index_q, head_weight=head_weight, pool_keys=pool_keys)
    if index_q.dtype != pool_keys.dtype:
        _fail("index_q", f"the dtype of pool_keys, {pool_keys.dtype}", index_q.dtype, "convert the queries", TypeError)
    if index_q.device.type == "cpu":
        interpreter.require("index_q")
    (tokens, heads, dim), page = index_q.shape, pool_keys.shape[1]
    blocks = block_table.shape[1]
    out = torch.empty(tokens, blocks * page, dtype=torch.float32, device=index_q.device)
    if out.numel() == 0:
        return out
    tile = kpool_tile(arch.of_device(str(index_q.device)))
    kpool_scores_kernel[(tokens, triton.cdiv(blocks * page, tile.pools))](
        index_q, head_weight, pool_keys, owner, position, block_table, out,
        index_q.stride(0), index_q.stride(1), head_weight.stride(0), pool_keys.stride(0), pool_keys.stride(1), block_table.stride(0),
        out.stride(0), blocks, pool_keys.shape[0],
        HEADS=heads, BH=max(triton.next_power_of_2(heads), LEAST_DOT), D=dim, BD=max(triton.next_power_of_2(dim), LEAST_DOT),
        BJ=tile.pools, PAGE=page, SCALE=dim**-0.5, PDL=tile.pdl, num_warps=tile.warps, num_stages=1, enable_fp_fusion=True,
        launch_pdl=tile.pdl,
    )  # fmt: skip
    return out


def select(
    score: Tensor,
    *,
    owner: Tensor,
    position: Tensor,
    block_table: Tensor,
    page: int,
    top: int = TOP_POOLS,
    kernel: str = "triton",
) -> tuple[Tensor, Tensor]:
    """`reference.kpool.select` in one launch, in the same order; arguments, errors and return values as there, scores in FP32."""
    validate_mla.select(score, owner, position, block_table, page, top)
    if score.dtype != torch.float32:
        _fail("score", "dtype float32", score.dtype, "kpool.scores makes FP32", TypeError)
    if score.device.type == "cpu":
        interpreter.require("score")
    tokens, width = score.shape[0], align_width(POOL * top + TAIL, kernel)
    ids = torch.empty(tokens, width, dtype=torch.int32, device=score.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=score.device)
    if tokens == 0:
        return ids, counts
    tile = kpool_tile(arch.of_device(str(score.device)))
    kpool_select_kernel[(tokens,)](
        score, owner, position, block_table, ids, counts, score.stride(0), block_table.stride(0), ids.stride(0), block_table.shape[1],
        score.shape[1], TOP=top, WIDTH=width, BW=triton.next_power_of_2(width), BLOCK=tile.columns, PAGE=page // POOL, PDL=tile.pdl,
        num_warps=tile.select_warps, enable_fp_fusion=True, launch_pdl=tile.pdl,
    )  # fmt: skip
    return ids, counts


def cache(
    index_k: Tensor,
    pool_gate: Tensor,
    *,
    ape: Tensor,
    pool_keys: Tensor,
    ring: Tensor,
    sequences: Sequences,
    places: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`reference.kpool.cache` in one launch; arguments, pools and errors as there.

    places: a forward's shared `mla_cache.locate(sequences, T, slots)`, or None to compute it here. Softmax and sums in FP32.
    """
    validate_mla.cache(index_k, pool_gate, ape, pool_keys, ring, sequences)
    _kernel_dtypes(index_k=index_k, pool_gate=pool_gate, ape=ape, pool_keys=pool_keys, ring=ring)
    tokens, dim = index_k.shape
    if index_k.device.type == "cpu":
        interpreter.require("index_k")
        validate_mla.sequences_values(sequences, tokens, ring.shape[0], pool_keys.shape[1] * POOL, pool_keys.shape[0])
    if tokens == 0:
        return
    owner, position = locate(sequences, tokens, ring.shape[0]) if places is None else places
    table = sequences.block_table
    kpool_cache_kernel[(tokens,)](
        index_k, pool_gate, ape, pool_keys, ring, owner, position, sequences.slots, sequences.starts, sequences.cu_seqlens, table,
        index_k.stride(0), pool_gate.stride(0), pool_keys.stride(0), pool_keys.stride(1), ring.stride(0), ring.stride(1), table.stride(0),
        table.shape[1], pool_keys.shape[0], D=dim, BD=triton.next_power_of_2(dim), PAGE=pool_keys.shape[1], RING=ring.shape[1],
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
