"""Chunks of `kda.prefill`, all at once: what `reference.kda_chunk` makes of raw inputs before the state comes in.

One program prepares one chunk of one head and leaves in a dense workspace what the scan needs of it. Chunks restart at each
sequence: chunk i of sequence n lies at row cu_seqlens[n] // C + n + i, so that no count is read on the host.
Source: spec of the model, section 4.6.
"""

import triton
import triton.language as tl

from optimized import interpreter
from optimized.approximate import FLUSH, LOG2E, exp2, unit_over, unit_sigmoid
from optimized.kda_cell import softplus
from optimized.kda_rows import conv, conv_inputs, raw_rows, store_rows, sums_from_middle, sums_from_start, unit_rows  # fmt: skip

interpreter.repair()

# Two of FP32 as their roundings to BF16 and those of the rests; the results are written before all arguments are read.
HALVES = tl.constexpr("""{ .reg .b32 a, b;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.bf16x2.f32 $1, b, a; }""")


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
def _halves(x):
    """x in FP32 as a sum of two in BF16, 2^-18 of it away; a conversion of two at a time costs what one does."""
    if FLUSH:
        high, low = tl.inline_asm_elementwise(HALVES, "=&r,=&r,r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return high, low


@triton.jit
def _by_parts(x, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """[C, K] as [PARTS, C, K / PARTS]: a product over K as a sum of products, one for each warp."""
    return tl.permute(tl.reshape(x, [C, PARTS, K // PARTS]), [1, 0, 2])


@triton.jit
def _operand(x, SPLIT: tl.constexpr):
    """x for `_matmul`: its halves, or itself twice."""
    if SPLIT:
        return _halves(x)
    else:
        return x, x


@triton.jit
def _matmul(a, b, SPLIT: tl.constexpr):
    """a b of batches of operands, in FP32: exact products, or of halves in BF16, 2^-16 of each product away."""
    if SPLIT:
        product = tl.dot(a[1], b[0])
        product = tl.dot(a[0], b[1], product)
        return tl.dot(a[0], b[0], product)
    else:
        return tl.dot(a[0], b[0], input_precision="ieee")


@triton.jit
def _transposed(x):
    """An operand with its last two dimensions swapped."""
    return tl.permute(x[0], [0, 2, 1]), tl.permute(x[1], [0, 2, 1])


@triton.jit
def _gram(a, b, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr):
    """a b^T of rows [C, K]."""
    a, b = _operand(_by_parts(a, C, K, PARTS), SPLIT), _operand(_by_parts(b, C, K, PARTS), SPLIT)
    return tl.sum(_matmul(a, _transposed(b), SPLIT), 0)


@triton.jit
def _gram_across(
    q, k, gcum, i, kk, qk, C: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Adds the pairs that the middle of their 2 HALF rows parts, split there."""
    pairs = tl.reshape(gcum, [C // (2 * HALF), 2 * HALF, K])
    row = tl.arange(0, 2 * HALF)[None, :, None]
    middle = tl.sum(tl.where(row == HALF, pairs, 0.0), 1)[:, None, :]  # the first row of the later half
    decay = tl.reshape(exp2(tl.where(row >= HALF, pairs - middle, middle - pairs)), [C, K])
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
def _merged(x, a, i, HALF: tl.constexpr, SPLIT: tl.constexpr):
    """Inverses of diagonal blocks of 2 HALF rows, from those of HALF rows in x: the corner is -x22 a21 x11."""
    corner = (i // (2 * HALF))[:, None] == (i // (2 * HALF))[None, :]
    corner = corner & (i // HALF % 2 == 1)[:, None] & (i // HALF % 2 == 0)[None, :]
    corner = tl.where(corner[None, :, :], a, 0.0)
    if HALF == 1:
        return x - corner
    else:
        x_halves = _operand(x, SPLIT)
        y = _matmul(x_halves, _operand(corner, SPLIT), SPLIT)
        return x - _matmul(_operand(y, SPLIT), x_halves, SPLIT)


@triton.jit
def _inverse(a, i, LEVELS: tl.constexpr, SPLIT: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [PARTS, C, C] by substitution of blocks: a power series loses near-collinear keys.

    Of 16-bit activations, whose inverse is rounded next, the products are of halves in BF16, 2^-16 of each away.
    """
    x = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        x = _merged(x, a, i, 1 << level, SPLIT)
    return x


@triton.jit(do_not_specialize=["num_slots", "sequences"])
def kda_prefill_prepare_kernel(
    q, k, v, f, beta, conv_weight, a_log, dt_bias, window, cu_seqlens, slots, fresh, w_out, q_out, k_out, u_out, aqk_out, decay_out,
    q_stride, k_stride, v_stride, f_stride, beta_stride, window_stride, tap_stride, channel_stride,
    num_slots, sequences, heads, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BOUNDED: tl.constexpr, ANCHORED: tl.constexpr, HAS_FRESH: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    RATE_MAX: tl.constexpr, LEAST_G: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr,
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
    count = end - begin - first
    valid = i < count
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    in_k, in_v = True, True
    if K < BK:
        in_k = kk < K
    if V < BV:
        in_v = vv < V
    column, v_column = head * K + kk, head * V + vv
    blob = pid.to(tl.int64)  # of this chunk and head
    dtype = w_out.dtype.element_ty
    k_blob, q_blob = k_out + blob * (C * BK) + kk, q_out + blob * (C * BK) + kk

    f_rows = raw_rows(f + token * f_stride, f_stride, column, in_k, count, C)
    k_inputs = conv_inputs(
        k + token * k_stride, k_stride, window, tap_stride, channel_stride, conv_weight, heads * K, column, first, count, in_k, carried, C,
        PACKED,
    )  # fmt: skip
    q_inputs = conv_inputs(
        q + token * q_stride, q_stride, window, tap_stride, channel_stride, conv_weight, 0, column, first, count, in_k, carried, C, PACKED
    )  # fmt: skip
    bias = tl.load(dt_bias + column, mask=in_k, other=0.0)
    b = tl.load(beta + token * beta_stride + i.to(tl.int64) * beta_stride + head, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, unit_sigmoid(b), 0.0)
    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))  # NaN stays NaN

    g = ()
    for r in tl.static_range(C):  # in base 2 from here on
        x = f_rows[r].to(tl.float32) + bias
        if BOUNDED:
            log_decay = unit_over(1.0 + exp2(x * (rate * -LOG2E))) * tl.where(r < count, lower_bound * LOG2E, 0.0)
        else:
            log_decay = tl.where(r < count, -rate * LOG2E * softplus(x), 0.0)
        if not ANCHORED:
            log_decay = tl.where(log_decay < LEAST_G * LOG2E, LEAST_G * LOG2E, log_decay)
        g += (log_decay,)  # type: ignore[assignment]
    k_y = unit_rows(conv(k_inputs, True, C, LEVELS), valid, 1.0, EPS)
    if ANCHORED:  # decays split at the middle of the chunk; q only when k is done with, for want of registers
        gcum, middle, leaving = sums_from_middle(g, C, LEVELS)
        tl.store(decay_out + blob * BK + kk, exp2(middle + leaving))
        right = k_y * exp2(-gcum)
        store_rows(k_blob, (right * exp2(leaving)[None, :]).to(dtype), BK, C, LEVELS)
        right = _transposed(_operand(_by_parts(right, C, BK, PARTS), SPLIT))
        left, start = exp2(gcum), exp2(middle)[None, :]
        k_in = k_y * left
        gram = tl.sum(_matmul(_operand(_by_parts(k_in, C, BK, PARTS), SPLIT), right, SPLIT), 0)
        k_in *= start
    else:
        gcum, total = sums_from_start(g, C, LEVELS)
        tl.store(decay_out + blob * BK + kk, exp2(total))
        store_rows(k_blob, (k_y * exp2(total[None, :] - gcum)).to(dtype), BK, C, LEVELS)
        k_in = k_y * exp2(gcum)
    k_in = _by_parts(k_in.to(dtype), C, BK, PARTS)
    q_y = unit_rows(conv(q_inputs, True, C, LEVELS), valid, SCALE, EPS)
    if ANCHORED:
        q_in = q_y * left
        qk = tl.sum(_matmul(_operand(_by_parts(q_in, C, BK, PARTS), SPLIT), right, SPLIT), 0)
        q_in *= start
    else:
        gram, qk = _gram_safe(q_y, k_y, gcum, i, C, BK, LEVELS, PARTS, SPLIT)
        q_in = q_y * exp2(gcum)
    store_rows(q_blob, q_in.to(dtype), BK, C, LEVELS)
    v_inputs = conv_inputs(
        v + token * v_stride, v_stride, window, tap_stride, channel_stride, conv_weight, 2 * heads * K, v_column, first, count, in_v,
        carried, C, PACKED,
    )  # fmt: skip
    square = blob * (C * C) + i[:, None] * C + i[None, :]
    tl.store(aqk_out + square, tl.where(i[:, None] >= i[None, :], qk, 0.0).to(dtype))

    akk = tl.where(i[:, None] > i[None, :], gram * b[:, None], 0.0)
    inverse = _inverse(tl.broadcast_to(akk[None, :, :], [PARTS, C, C]), i, LEVELS, SPLIT)
    inverse = (inverse * b[None, None, :]).to(dtype)
    w = tl.dot(inverse, k_in, input_precision="ieee")
    part = tl.arange(0, PARTS)[:, None, None]
    tile = blob * (C * BK) + i[None, :, None] * BK + part * (BK // PARTS) + tl.arange(0, BK // PARTS)[None, None, :]
    tl.store(w_out + tile, w.to(dtype))

    v_y = _by_parts(conv(v_inputs, False, C, LEVELS), C, BV, PARTS)
    if SPLIT:  # v isn't rounded: both halves of it
        if dtype == tl.bfloat16:
            v_high, v_low = _halves(v_y)
        else:
            v_high = v_y.to(dtype)
            v_low = (v_y - v_high.to(tl.float32)).to(dtype)
        u = tl.dot(inverse, v_high, tl.dot(inverse, v_low))
    else:
        u = tl.dot(inverse, v_y, input_precision="ieee")
    vv = part * (BV // PARTS) + tl.arange(0, BV // PARTS)[None, None, :]
    tl.store(u_out + blob * (C * BV) + vv * C + i[None, :, None], u.to(dtype))  # [V, C], as the scan adds it
