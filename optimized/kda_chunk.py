"""Chunks of `kda.prefill`, all at once: what `reference.kda_chunk` makes of raw inputs before the state comes in.

One program prepares one chunk of one head and leaves in a dense workspace what the scan needs of it. Chunks restart at each
sequence: chunk i of sequence n lies at row cu_seqlens[n] // C + n + i, so that no count is read on the host.
Source: spec of the model, section 4.6.
"""

import triton
import triton.language as tl

from optimized import interpreter
from optimized.kda_cell import softplus

interpreter.repair()

LOG2E = tl.constexpr(1.4426950408889634)
FLUSH = tl.constexpr(not interpreter.active())  # a subnormal exp2 is 0, as it is in every sum here: four instructions less each


@triton.jit
def _exp2(x):
    if FLUSH:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def _unit_sigmoid(x):
    """1 / (1 + exp(-x)), to 2 ulp."""
    y = 1.0 + _exp2(x * -LOG2E)
    if FLUSH:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / y


@triton.jit
def _chunk_of(row, cu_seqlens, sequences, C: tl.constexpr):
    """Sequence, offset in it and its first and last token, of a row of the workspace; empty when the row holds no chunk."""
    low = row * 0
    high = low + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(cu_seqlens + middle) // C + middle <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    begin = tl.load(cu_seqlens + low)
    return low, (row - begin // C - low) * C, begin, tl.load(cu_seqlens + low + 1)


@triton.jit
def _conv_rows(x, x_stride, window, tap_stride, channel_stride, weight, section, column, first, i, valid, inside, carried):
    """SiLU of the convolution of rows `i` of a chunk, [C, D]; what lies before the sequence comes from the window."""
    y = tl.zeros([i.shape[0], column.shape[0]], tl.float32)
    for tap in tl.static_range(4):
        position = first + i + (tap - 3)  # in the sequence
        mask = (valid & (position >= 0))[:, None] & inside[None, :]
        t = tl.load(x + (i + (tap - 3)).to(tl.int64)[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if first == 0:
            before = window + (position + 3)[:, None] * tap_stride + (section + column)[None, :] * channel_stride
            mask = (valid & (position < 0))[:, None] & inside[None, :] & carried
            t += tl.load(before, mask=mask, other=0.0).to(tl.float32)
        y += t * tl.load(weight + (section + column) * 4 + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    return y * _unit_sigmoid(y)  # 0 where the row is none of the sequence


@triton.jit
def _halves(x):
    """x in FP32 as a sum of two in BF16, 2^-18 of it away. Rounds by its bits, and packs pairs: a conversion alone is four times slower."""
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _by_parts(x, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """[C, K] as [PARTS, C, K / PARTS]: a product over K as a sum of products, one for each warp."""
    return tl.permute(tl.reshape(x, [C, PARTS, K // PARTS]), [1, 0, 2])


@triton.jit
def _gram(a, b, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr):
    """a b^T of rows [C, K] in FP32: exact products, or of halves in BF16, 2^-16 of each product away."""
    if SPLIT:
        a_high, a_low = _halves(_by_parts(a, C, K, PARTS))
        b_high, b_low = _halves(_by_parts(b, C, K, PARTS))
        b_high, b_low = tl.permute(b_high, [0, 2, 1]), tl.permute(b_low, [0, 2, 1])
        product = tl.dot(a_low, b_high)
        product = tl.dot(a_high, b_low, product)
        return tl.sum(tl.dot(a_high, b_high, product), 0)
    b = tl.permute(_by_parts(b, C, K, PARTS), [0, 2, 1])
    return tl.sum(tl.dot(_by_parts(a, C, K, PARTS), b, input_precision="ieee"), 0)


@triton.jit
def _gram_anchored(
    q, k, decay_in, g, gcum, total, i, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Products of rows [C, K] under their decays, split at the middle of the chunk, and k as it leaves the chunk."""
    middle = tl.sum(tl.where((i <= C // 2)[:, None], g, 0.0), 0)[None, :]
    left = decay_in * _exp2(-middle)
    right = k * _exp2(middle - gcum)
    kk = _gram(k * left, right, C, K, PARTS, SPLIT)
    qk = _gram(q * left, right, C, K, PARTS, SPLIT)
    return kk, qk, right * _exp2(total - middle)


@triton.jit
def _gram_across(
    q, k, gcum, i, kk, qk, C: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Adds the pairs that the middle of their 2 HALF rows parts, split there."""
    pairs = tl.reshape(gcum, [C // (2 * HALF), 2 * HALF, K])
    row = tl.arange(0, 2 * HALF)[None, :, None]
    middle = tl.sum(tl.where(row == HALF, pairs, 0.0), 1)[:, None, :]  # the first row of the later half
    decay = tl.reshape(_exp2(tl.where(row >= HALF, pairs - middle, middle - pairs)), [C, K])
    later = (i // HALF % 2 == 1)[:, None]
    right = tl.where(later, 0.0, k * decay)
    block = (i // (2 * HALF))[:, None] == (i // (2 * HALF))[None, :]
    kk += tl.where(block, _gram(tl.where(later, k * decay, 0.0), right, C, K, PARTS, SPLIT), 0.0)
    qk += tl.where(block, _gram(tl.where(later, q * decay, 0.0), right, C, K, PARTS, SPLIT), 0.0)
    return kk, qk


@triton.jit
def _gram_safe(
    q, k, gcum, i, C: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """The same products for any gate: each pair by the halving that parts it, so that no exponent is positive."""
    same = i[:, None] == i[None, :]
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.where(same, tl.sum(q * k, 1)[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        kk, qk = _gram_across(q, k, gcum, i, kk, qk, C, K, C >> (level + 1), PARTS, SPLIT)
    return kk, qk


@triton.jit
def _merged(x, a, i, HALF: tl.constexpr):
    """Inverses of diagonal blocks of 2 HALF rows, from those of HALF rows in x: the corner is -x22 a21 x11."""
    corner = (i // (2 * HALF))[:, None] == (i // (2 * HALF))[None, :]
    corner = corner & (i // HALF % 2 == 1)[:, None] & (i // HALF % 2 == 0)[None, :]
    corner = tl.where(corner, a, 0.0)
    if HALF == 1:
        return x - corner
    return x - tl.dot(tl.dot(x, corner, input_precision="ieee"), x, input_precision="ieee")


@triton.jit
def _inverse(a, i, LEVELS: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C] by forward substitution of blocks, in FP32: a power series loses near-collinear keys."""
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        x = _merged(x, a, i, 1 << level)
    return x


@triton.jit(do_not_specialize=["num_slots", "sequences"])
def kda_prefill_prepare_kernel(
    q, k, v, f, beta, conv_weight, a_log, dt_bias, window, cu_seqlens, slots, fresh, w_out, q_out, k_out, u_out, aqk_out, decay_out,
    q_stride, k_stride, v_stride, f_stride, beta_stride, window_stride, tap_stride, channel_stride,
    num_slots, sequences, heads, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BOUNDED: tl.constexpr, ANCHORED: tl.constexpr, HAS_FRESH: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    RATE_MAX: tl.constexpr, LEAST_G: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = pid % heads
    n, first, begin, end = _chunk_of(pid // heads, cu_seqlens, sequences, C)
    slot = tl.load(slots + n).to(tl.int64)
    if (begin + first >= end) | (slot < 0) | (slot >= num_slots):
        return
    carried = slot >= 0
    if HAS_FRESH:
        carried = tl.load(fresh + n) == 0
    window += slot * window_stride
    token = (begin + first).to(tl.int64)

    i = tl.arange(0, C)
    valid = i < end - begin - first
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    in_k, in_v = kk < K, vv < V
    column, v_column = head * K + kk, head * V + vv
    blob = pid.to(tl.int64)  # of this chunk and head
    tile = blob * (C * BK) + i[:, None] * BK + kk[None, :]
    dtype = w_out.dtype.element_ty

    q_y = _conv_rows(
        q + token * q_stride, q_stride, window, tap_stride, channel_stride, conv_weight, 0, column, first, i, valid, in_k, carried
    )  # fmt: skip
    k_y = _conv_rows(
        k + token * k_stride, k_stride, window, tap_stride, channel_stride, conv_weight, heads * K, column, first, i, valid, in_k, carried
    )  # fmt: skip
    q_y *= (tl.rsqrt(tl.sum(q_y * q_y, 1) + EPS) * SCALE)[:, None]
    k_y *= tl.rsqrt(tl.sum(k_y * k_y, 1) + EPS)[:, None]
    mask = valid[:, None] & in_k[None, :]
    x = tl.load(f + token * f_stride + i.to(tl.int64)[:, None] * f_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + column, mask=in_k, other=0.0)[None, :]
    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))  # NaN stays NaN
    if BOUNDED:  # in base 2 from here on
        g = (lower_bound * LOG2E) * _unit_sigmoid(rate * x)
    else:
        g = -rate * LOG2E * softplus(x)
    if not ANCHORED:
        g = tl.where(g < LEAST_G * LOG2E, LEAST_G * LOG2E, g)
    g = tl.where(valid[:, None], g, 0.0)
    b = tl.load(beta + token * beta_stride + i.to(tl.int64) * beta_stride + head, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, _unit_sigmoid(b), 0.0)

    gcum = tl.cumsum(g, 0)
    total = tl.sum(g, 0)[None, :]
    decay_in = _exp2(gcum)
    tl.store(decay_out + blob * BK + kk[None, :], _exp2(total))
    if ANCHORED:
        gram, qk, k_leaving = _gram_anchored(q_y, k_y, decay_in, g, gcum, total, i, C, BK, PARTS, SPLIT)
    else:
        gram, qk = _gram_safe(q_y, k_y, gcum, i, C, BK, LEVELS, PARTS, SPLIT)
        k_leaving = k_y * _exp2(total - gcum)
    tl.store(k_out + tile, k_leaving.to(dtype))
    tl.store(q_out + tile, (q_y * decay_in).to(dtype))
    square = blob * (C * C) + i[:, None] * C + i[None, :]
    tl.store(aqk_out + square, tl.where(i[:, None] >= i[None, :], qk, 0.0).to(dtype))

    akk = tl.where(i[:, None] > i[None, :], gram * b[:, None], 0.0)
    row_b = tl.sum(tl.where(i[:, None] == i[None, :], b[:, None], 0.0), 0)
    inverse = (_inverse(akk, i, LEVELS) * row_b[None, :]).to(dtype)
    w = tl.dot(inverse, (k_y * decay_in).to(dtype), input_precision="ieee")
    tl.store(w_out + tile, w.to(dtype))

    v_y = _conv_rows(
        v + token * v_stride, v_stride, window, tap_stride, channel_stride, conv_weight, 2 * heads * K, v_column, first, i, valid, in_v,
        carried,
    )  # fmt: skip
    if SPLIT:  # v isn't rounded: both halves of it
        if dtype == tl.bfloat16:
            v_high, v_low = _halves(v_y)
        else:
            v_high = v_y.to(dtype)
            v_low = (v_y - v_high.to(tl.float32)).to(dtype)
        u = tl.dot(inverse, v_high, tl.dot(inverse, v_low))
    else:
        u = tl.dot(inverse, v_y, input_precision="ieee")
    tl.store(u_out + blob * (C * BV) + vv[None, :] * C + i[:, None], u.to(dtype))  # [V, C], as the scan adds it
