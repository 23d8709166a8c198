"""`kda.prefill` in three launches: chunks prepared all at once, a scan over them, the gated norm.

prepare: convolution, norms, gate, cumulative decays, the Gram matrices of a chunk and its inverse; what the scan needs of a
chunk goes to a dense workspace. scan: one program carries V rows of the state [V, K] of a head through the chunks of a
sequence, in FP32; rows of V are independent. norm: gated RMSNorm over V, in place.
Source: spec of the model, section 4.6; `reference.kda_chunk` is the same math.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import arch, contracts, interpreter
from optimized.kda_cell import shift
from optimized.kda_chunk import _chunk_of, kda_prefill_prepare_kernel
from optimized.kda_rows import unit_sigmoid
from optimized.prefill_tiles import PrefillTile, prefill_tile
from reference import validate
from reference.kda import L2_EPS, MAX_A_LOG
from reference.kda_chunk import least_log_decay

interpreter.repair()

CONTRACT = contracts.PREFILL
LEAST_DOT = 16  # the smallest side of a matrix product
ANCHOR_SPAN = 80.0  # nats: exp of it, and of its negative, are normal in FP32 and BF16


def anchored(lower_bound: float | None, chunk: int) -> bool:
    """Whether the decays of a chunk may be split at its middle: the gate is bounded and the chunk within ANCHOR_SPAN."""
    return lower_bound is not None and -lower_bound * chunk <= ANCHOR_SPAN


def packed(conv_weight: Tensor) -> bool:
    """Whether the four weights of each channel are one aligned word of 64 bits."""
    return conv_weight.element_size() == 2 and conv_weight.data_ptr() % 8 == 0


@triton.jit
def _leave_window(x, x_stride, window, tap_stride, channel_stride, section, column, inside, begin, end, carried):
    """The last three inputs of the sequence, some of them from the window when it is shorter; every lane reads before any writes."""
    length = end - begin
    last = x + (end - 1).to(tl.int64) * x_stride + column
    old = window + (section + column) * channel_stride + length * tap_stride
    t1 = tl.load(old, mask=inside & carried & (length < 3), other=0.0).to(tl.float32)
    t2 = tl.load(old + tap_stride, mask=inside & carried & (length < 2), other=0.0).to(tl.float32)
    t3 = tl.load(old + 2 * tap_stride, mask=inside & carried & (length < 1), other=0.0).to(tl.float32)
    t1 = tl.where(length < 3, t1, tl.load(last - 2 * x_stride, mask=inside & (length >= 3), other=0.0).to(tl.float32))
    t2 = tl.where(length < 2, t2, tl.load(last - x_stride, mask=inside & (length >= 2), other=0.0).to(tl.float32))
    t3 = tl.where(length < 1, t3, tl.load(last, mask=inside & (length >= 1), other=0.0).to(tl.float32))
    tl.debug_barrier()
    shift(window, section + column, tap_stride, channel_stride, inside, t1, t2, t3)


@triton.jit(do_not_specialize=["num_slots"])
def kda_prefill_scan_kernel(
    q, k, v, state, window, cu_seqlens, slots, fresh, w_in, q_in, k_in, u_in, aqk_in, decay_in, out,
    q_stride, k_stride, v_stride, state_stride, window_stride, tap_stride, channel_stride, out_stride,
    num_slots, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ALL_V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PARTS: tl.constexpr, HAS_FRESH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    part = pid % (ALL_V // BV)
    head = pid // (ALL_V // BV) % heads
    n = pid // (ALL_V // BV) // heads
    slot = tl.load(slots + n).to(tl.int64)
    begin, end = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    if (slot < 0) | (slot >= num_slots):
        return
    carried = slot >= 0
    if HAS_FRESH:
        carried = tl.load(fresh + n) == 0
    if (begin == end) & carried:
        return

    i = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = part * BV + tl.arange(0, BV)
    in_k, in_v = kk < K, vv < V
    if PARTS == 1:
        in_row, key = in_v[:, None] & in_k[None, :], kk[None, :]
        rows, tile = vv[:, None] * K + key, i[:, None] * BK + key
    else:  # K by parts, one for each warp: rows are [PARTS, BV, BK / PARTS]
        key = tl.arange(0, PARTS)[:, None, None] * (BK // PARTS) + tl.arange(0, BK // PARTS)[None, None, :]
        in_row = in_v[None, :, None] & (key < K)
        rows, tile = vv[None, :, None] * K + key, i[None, :, None] * BK + key
    rows = state + slot * state_stride + head * (V * K) + rows
    s = tl.load(rows, mask=in_row & carried, other=0.0).to(tl.float32)

    base = (begin // C + n).to(tl.int64) * heads + head
    values = vv[:, None] * C + i[None, :]
    square = i[:, None] * C + i[None, :]
    first_part = tl.arange(0, PARTS)[:, None, None] == 0
    out += begin.to(tl.int64) * out_stride + head * V
    out_tile = vv[:, None] + i.to(tl.int64)[None, :] * out_stride
    for chunk in tl.range(0, (end - begin + C - 1) // C, num_stages=STAGES):
        blob = base + chunk * heads
        w = tl.load(w_in + blob * (C * BK) + tile)
        q_c = tl.load(q_in + blob * (C * BK) + tile)
        k_c = tl.load(k_in + blob * (C * BK) + tile)
        u = tl.load(u_in + blob * (C * ALL_V) + values).to(tl.float32)
        if PARTS == 1:
            aqk = tl.load(aqk_in + blob * (C * C) + square)
        else:
            aqk = tl.load(aqk_in + blob * (C * C) + square[None, :, :], mask=first_part, other=0.0)
        decay = tl.load(decay_in + blob * BK + key)

        s_c = s.to(w.dtype)
        if PARTS == 1:
            d = (u - tl.dot(s_c, tl.trans(w), input_precision="ieee")).to(w.dtype)  # [BV, C]
            core = tl.dot(s_c, tl.trans(q_c), input_precision="ieee")
            core = tl.dot(d, tl.trans(aqk), core, input_precision="ieee")
        else:
            d = (u - tl.sum(tl.dot(s_c, tl.permute(w, [0, 2, 1]), input_precision="ieee"), 0)).to(w.dtype)
            d = tl.broadcast_to(d[None, :, :], [PARTS, BV, C])
            core = tl.dot(s_c, tl.permute(q_c, [0, 2, 1]), input_precision="ieee")
            core = tl.sum(tl.dot(d, tl.permute(aqk, [0, 2, 1]), core, input_precision="ieee"), 0)
        s = tl.dot(d, k_c, s * decay, input_precision="ieee")
        inside = in_v[:, None] & (i < end - begin - chunk * C)[None, :]
        first = (blob - base) * 0 + chunk * C  # int64
        tl.store(out + first * out_stride + out_tile, core.to(out.dtype.element_ty), mask=inside)

    tl.store(rows, s.to(state.dtype.element_ty), mask=in_row)
    window += slot * window_stride
    if part == 0:
        column = head * K + kk
        _leave_window(q, q_stride, window, tap_stride, channel_stride, 0, column, in_k, begin, end, carried)
        _leave_window(k, k_stride, window, tap_stride, channel_stride, heads * K, column, in_k, begin, end, carried)
    _leave_window(v, v_stride, window, tap_stride, channel_stride, 2 * heads * K, head * V + vv, in_v, begin, end, carried)


@triton.jit(do_not_specialize=["num_slots", "sequences"])
def kda_prefill_norm_kernel(
    out, gate, norm_weight, cu_seqlens, slots, out_stride, gate_stride, num_slots, sequences, heads, norm_eps,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = pid % heads
    n, first, begin, end = _chunk_of(pid // heads, cu_seqlens, sequences, C)
    if begin + first >= end:
        return
    slot = tl.load(slots + n)
    i = tl.arange(0, C)
    vv = tl.arange(0, BV)
    mask = (i < end - begin - first)[:, None] & (vv < V)[None, :]
    row = (begin + first).to(tl.int64) + i.to(tl.int64)[:, None]
    column = (head * V + vv)[None, :]
    out += row * out_stride + column
    if (slot < 0) | (slot >= num_slots):
        tl.store(out, tl.zeros([C, BV], tl.float32).to(out.dtype.element_ty), mask=mask)
        return
    core = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + vv, mask=vv < V, other=0.0).to(tl.float32)[None, :]
    weight *= unit_sigmoid(tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32))
    scale = tl.rsqrt(tl.sum(core * core, 1) / V + norm_eps)[:, None]
    tl.store(out, (core * scale * weight).to(out.dtype.element_ty), mask=mask)


def launch(
    tile: PrefillTile,
    sizes: validate.KdaSizes,
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    f: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    window: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """The launches of validated arguments with a given tile."""
    heads, key_dim, value_dim, chunk = sizes.heads, sizes.key_dim, sizes.value_dim, tile.chunk
    out = torch.empty(sizes.tokens, heads * value_dim, dtype=q.dtype, device=q.device)
    if sizes.sequences == 0:
        return out
    padded_k, padded_v = (max(triton.next_power_of_2(size), LEAST_DOT) for size in (key_dim, value_dim))
    rows = min(tile.rows, padded_v)
    middle = anchored(lower_bound, chunk)
    parts = min(tile.parts, padded_k // LEAST_DOT)
    prepare_warps = tile.prepare_warps if middle else 2 * tile.prepare_warps
    prepare_parts = min(prepare_warps, padded_k // LEAST_DOT, padded_v // LEAST_DOT)
    blobs = (sizes.tokens // chunk + sizes.sequences) * heads  # at least one for each chunk and head
    keys = q.new_empty(3, blobs, chunk, padded_k)  # w, q and k of the chunks
    values, square = q.new_empty(blobs, padded_v, chunk), q.new_empty(blobs, chunk, chunk)
    decay = q.new_empty(blobs, padded_k, dtype=torch.float32)
    dims = dict(K=key_dim, V=value_dim, BK=padded_k, C=chunk, HAS_FRESH=fresh is not None)

    kda_prefill_prepare_kernel[(blobs,)](
        q, k, v, f, beta, conv_weight, a_log, dt_bias, window, cu_seqlens, slots, fresh, *keys, values, square, decay,
        q.stride(0), k.stride(0), v.stride(0), f.stride(0), beta.stride(0), *window.stride(),
        sizes.slots, sizes.sequences, heads, lower_bound or 0.0,
        BV=padded_v, LEVELS=chunk.bit_length() - 1, BOUNDED=lower_bound is not None, ANCHORED=middle,
        SCALE=key_dim**-0.5, EPS=L2_EPS, RATE_MAX=MAX_A_LOG, LEAST_G=least_log_decay(torch.float32),
        PARTS=prepare_parts, SPLIT=q.dtype != torch.float32, PACKED=packed(conv_weight), **dims,
        num_warps=prepare_warps, maxnreg=tile.registers if middle else None, enable_fp_fusion=True,
    )  # fmt: skip
    kda_prefill_scan_kernel[(sizes.sequences * heads * (padded_v // rows),)](
        q, k, v, state, window, cu_seqlens, slots, fresh, *keys, values, square, decay, out,
        q.stride(0), k.stride(0), v.stride(0), state.stride(0), *window.stride(), out.stride(0), sizes.slots, heads,
        ALL_V=padded_v, BV=rows, PARTS=parts, STAGES=tile.stages, **dims,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    kda_prefill_norm_kernel[(blobs,)](
        out, gate, norm_weight, cu_seqlens, slots, out.stride(0), gate.stride(0), sizes.slots, sizes.sequences, heads, norm_eps,
        V=value_dim, BV=padded_v, C=chunk, num_warps=tile.norm_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def prefill(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    f: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    window: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda.prefill` as three Triton launches; arguments, pools, errors and return value as there.

    BF16, FP16 or FP32 activations, FP32 or BF16 state; rounds as CONTRACT says, and never the state between chunks. Reads
    no value on the host. CPU tensors only in Triton's interpreter.
    """
    arguments: dict[str, Any] = dict(
        v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, cu_seqlens=cu_seqlens, slots=slots, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    sizes = validate.kda_prefill(q, k, **arguments)
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        interpreter.require("q")
        validate.values(slots, sizes.slots)
        validate.offsets(cu_seqlens, sizes.tokens)
    tile = prefill_tile(arch.of_device(str(q.device)), q.dtype, sizes.sequences * sizes.heads)
    return launch(tile, sizes, q, k, **arguments)
