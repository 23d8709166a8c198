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
def _rcp(y):
    if FLUSH:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / y


@triton.jit
def _unit_sigmoid(x):
    """1 / (1 + exp(-x)), to 2 ulp."""
    return _rcp(1.0 + _exp2(x * -LOG2E))


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
def _stacked(rows, C: tl.constexpr, LEVELS: tl.constexpr):
    """Vectors of D as the rows of [C, D]; a thread keeps its columns, so that nothing moves."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for r in tl.static_range(C >> (level + 1)):
            joined = joined + (tl.join(rows[r], rows[r + (C >> (level + 1))]),)
        rows = joined
    x = rows[0]
    return tl.trans(tl.reshape(x, [x.shape[0], C]))


@triton.jit
def _unstacked(x, C: tl.constexpr, LEVELS: tl.constexpr):
    """The rows of [C, D], each a vector."""
    rows = (tl.trans(x),)
    for level in tl.static_range(LEVELS):
        even, odd = (), ()
        for r in tl.static_range(1 << level):
            a = rows[r]
            if (C >> level) > 2:
                a = tl.reshape(a, [a.shape[0], C >> (level + 1), 2])
            a0, a1 = tl.split(a)
            even = even + (a0,)
            odd = odd + (a1,)
        rows = even + odd
    return rows


@triton.jit
def _raw_rows(x, stride, column, inside, count, C: tl.constexpr):
    """Rows of a chunk of which x is the first; past the sequence, its last one again."""
    rows = ()
    for r in tl.static_range(C):
        rows = rows + (tl.load(x + column, mask=inside, other=0.0),)
        x += tl.where(r + 1 < count, stride, 0)
    return rows


@triton.jit
def _rows_before(x, x_stride, window, tap_stride, channel_stride, section, column, first, inside, carried):
    """The three rows before a chunk; those before the sequence come from the window."""
    x += column - 3 * x_stride.to(tl.int64)
    t0 = tl.load(x, mask=inside & (first > 0), other=0.0)
    t1 = tl.load(x + x_stride, mask=inside & (first > 0), other=0.0)
    t2 = tl.load(x + 2 * x_stride.to(tl.int64), mask=inside & (first > 0), other=0.0)
    if first == 0:
        old = window + (section + column) * channel_stride
        t0 = tl.load(old, mask=inside & carried, other=0.0).to(x.dtype.element_ty)
        t1 = tl.load(old + tap_stride, mask=inside & carried, other=0.0).to(x.dtype.element_ty)
        t2 = tl.load(old + 2 * tap_stride, mask=inside & carried, other=0.0).to(x.dtype.element_ty)
    return t0, t1, t2


@triton.jit
def _weights(weight, channel, inside, PACKED: tl.constexpr):
    """The four weights of each channel in FP32, newest token last; PACKED reads the four of 16 bits as one word."""
    if PACKED:
        word = tl.load(weight.to(tl.pointer_type(tl.int64)) + channel, mask=inside, other=0)
        dtype = weight.dtype.element_ty
        w0 = word.to(tl.int16).to(dtype, bitcast=True)
        w1 = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
        w2 = (word >> 32).to(tl.int16).to(dtype, bitcast=True)
        w3 = (word >> 48).to(tl.int16).to(dtype, bitcast=True)
    else:
        w0 = tl.load(weight + channel * 4, mask=inside, other=0.0)
        w1 = tl.load(weight + channel * 4 + 1, mask=inside, other=0.0)
        w2 = tl.load(weight + channel * 4 + 2, mask=inside, other=0.0)
        w3 = tl.load(weight + channel * 4 + 3, mask=inside, other=0.0)
    return w0.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)


@triton.jit
def _raw(x, x_stride, window, tap_stride, channel_stride, weight, section, column, first, count, inside, carried, C: tl.constexpr, PACKED: tl.constexpr):
    rows = _raw_rows(x, x_stride, column, inside, count, C)
    before = _rows_before(x, x_stride, window, tap_stride, channel_stride, section, column, first, inside, carried)
    return before + rows + _weights(weight, section + column, inside, PACKED)


@triton.jit
def _conv(raw, SCALED: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr):
    """SiLU of the convolution, [C, D]; times -log2 e if SCALED."""
    t0, t1, t2 = raw[0].to(tl.float32), raw[1].to(tl.float32), raw[2].to(tl.float32)
    w0, w1, w2, w3 = raw[C + 3], raw[C + 4], raw[C + 5], raw[C + 6]
    if SCALED:
        w0 *= -LOG2E
        w1 *= -LOG2E
        w2 *= -LOG2E
        w3 *= -LOG2E
    out = ()
    for r in tl.static_range(C):
        t3 = raw[r + 3].to(tl.float32)
        y = t0 * w0 + t1 * w1 + t2 * w2 + t3 * w3
        if SCALED:
            out = out + (y * _rcp(1.0 + _exp2(y)),)
        else:
            out = out + (y * _unit_sigmoid(y),)
        t0, t1, t2 = t1, t2, t3
    return _stacked(out, C, LEVELS)


HALVES: tl.constexpr = tl.constexpr("""{ .reg .b32 a, b;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 a, $0, 16;
and.b32 b, $0, 0xffff0000;
sub.f32 a, $2, a;
sub.f32 b, $3, b;
cvt.rn.bf16x2.f32 $1, b, a; }""")


@triton.jit
def _halves(x):
    """x in FP32 as a sum of two in BF16, 2^-18 of it away; two at a time, for a conversion of one is as slow."""
    if FLUSH:
        high, low = tl.inline_asm_elementwise(HALVES, "=r,=r,r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return high, low


@triton.jit
def _by_parts(x, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """[C, K] as [PARTS, C, K / PARTS]: a product over K as a sum of products, one for each warp."""
    return tl.permute(tl.reshape(x, [C, PARTS, K // PARTS]), [1, 0, 2])


@triton.jit
def _split(x, SPLIT: tl.constexpr):
    if SPLIT:
        return _halves(x)
    else:
        return x, x


@triton.jit
def _matmul(a, b, SPLIT: tl.constexpr):
    """Of pairs of halves, or of FP32."""
    if SPLIT:
        product = tl.dot(a[1], b[0])
        product = tl.dot(a[0], b[1], product)
        return tl.dot(a[0], b[0], product)
    else:
        return tl.dot(a[0], b[0], input_precision="ieee")


@triton.jit
def _transposed(x):
    return tl.permute(x[0], [0, 2, 1]), tl.permute(x[1], [0, 2, 1])


@triton.jit
def _gram(a, b, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr):
    a, b = _split(_by_parts(a, C, K, PARTS), SPLIT), _split(_by_parts(b, C, K, PARTS), SPLIT)
    return tl.sum(_matmul(a, _transposed(b), SPLIT), 0)


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
def _merged(x, a, i, HALF: tl.constexpr, SPLIT: tl.constexpr):
    """Inverses of diagonal blocks of 2 HALF rows, from those of HALF rows in x: the corner is -x22 a21 x11."""
    corner = (i // (2 * HALF))[:, None] == (i // (2 * HALF))[None, :]
    corner = corner & (i // HALF % 2 == 1)[:, None] & (i // HALF % 2 == 0)[None, :]
    corner = tl.where(corner[None, :, :], a, 0.0)
    if HALF == 1:
        return x - corner
    else:
        x_halves = _split(x, SPLIT)
        y = _matmul(x_halves, _split(corner, SPLIT), SPLIT)
        return x - _matmul(_split(y, SPLIT), x_halves, SPLIT)


@triton.jit
def _inverse(a, i, LEVELS: tl.constexpr, SPLIT: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [PARTS, C, C] by forward substitution of blocks, in FP32: a power series loses near-collinear keys."""
    x = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        x = _merged(x, a, i, 1 << level, SPLIT)
    return x


@triton.jit
def _store_rows(out, x, stride, C: tl.constexpr, LEVELS: tl.constexpr):
    rows = _unstacked(x, C, LEVELS)
    for r in tl.static_range(C):
        tl.store(out + r * stride, rows[r])


@triton.jit(do_not_specialize=["num_slots", "sequences"])
def kda_prefill_prepare_kernel(
    q, k, v, f, beta, conv_weight, a_log, dt_bias, window, cu_seqlens, slots, fresh, w_out, q_out, k_out, u_out, aqk_out, decay_out,
    q_stride, k_stride, v_stride, f_stride, beta_stride, window_stride, tap_stride, channel_stride,
    num_slots, sequences, heads, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BOUNDED: tl.constexpr, ANCHORED: tl.constexpr, HAS_FRESH: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    RATE_MAX: tl.constexpr, LEAST_G: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, V_EARLY: tl.constexpr,
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

    raw_f = _raw_rows(f + token * f_stride, f_stride, column, in_k, count, C)
    raw_k = _raw(k + token * k_stride, k_stride, window, tap_stride, channel_stride, conv_weight, heads * K, column, first, count, in_k, carried, C, PACKED)
    raw_q = _raw(q + token * q_stride, q_stride, window, tap_stride, channel_stride, conv_weight, 0, column, first, count, in_k, carried, C, PACKED)
    if V_EARLY:
        raw_v = _raw(v + token * v_stride, v_stride, window, tap_stride, channel_stride, conv_weight, 2 * heads * K, v_column, first, count, in_v, carried, C, PACKED)
    bias = tl.load(dt_bias + column, mask=in_k, other=0.0)
    b = tl.load(beta + token * beta_stride + i.to(tl.int64) * beta_stride + head, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, _unit_sigmoid(b), 0.0)

    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))  # NaN stays NaN
    gates = ()
    if BOUNDED:
        rate *= -LOG2E
        bias *= rate
    for r in tl.static_range(C):
        x = raw_f[r].to(tl.float32)
        if BOUNDED:
            g = _rcp(1.0 + _exp2(x * rate + bias)) * tl.where(r < count, lower_bound * LOG2E, 0.0)
        else:
            g = tl.where(r < count, -rate * LOG2E * softplus(x + bias), 0.0)
        if not ANCHORED:
            g = tl.where(g < LEAST_G * LOG2E, LEAST_G * LOG2E, g)
        gates = gates + (g,)
    if ANCHORED:  # sums from the middle: the later rows' forward, the earlier ones' backward
        later, earlier = (tl.zeros([BK], tl.float32),), ()
        x = tl.zeros([BK], tl.float32)
        for r in tl.static_range(C // 2 + 1, C):
            x += gates[r]
            later = later + (x,)
        x = tl.zeros([BK], tl.float32)
        for r in tl.static_range(C // 2):
            x -= gates[C // 2 - r]
            earlier = (x,) + earlier
        middle = gates[0] - x
        leaving = later[C // 2 - 1]
        total = middle + leaving
        gcum = _stacked(earlier + later, C, LEVELS)
    else:
        x = tl.zeros([BK], tl.float32)
        sums = ()
        for r in tl.static_range(C):
            x += gates[r]
            sums = sums + (x,)
        total = x
        gcum = _stacked(sums, C, LEVELS)
    tl.store(decay_out + blob * BK + kk, _exp2(total))

    k_y = _conv(raw_k, True, C, LEVELS)
    k_y *= tl.where(valid, -tl.rsqrt(tl.sum(k_y * k_y, 1) + EPS * LOG2E * LOG2E), 0.0)[:, None]
    if ANCHORED:
        left, right = _exp2(gcum), k_y * _exp2(-gcum)
        _store_rows(k_out + blob * (C * BK) + kk, (right * _exp2(leaving)[None, :]).to(dtype), BK, C, LEVELS)
        right = _transposed(_split(_by_parts(right, C, BK, PARTS), SPLIT))
        start = _exp2(middle)[None, :]
        k_in = k_y * left
        gram = tl.sum(_matmul(_split(_by_parts(k_in, C, BK, PARTS), SPLIT), right, SPLIT), 0)
        k_in = _by_parts((k_in * start).to(dtype), C, BK, PARTS)
        q_y = _conv(raw_q, True, C, LEVELS)
        q_y *= tl.where(valid, tl.rsqrt(tl.sum(q_y * q_y, 1) + EPS * LOG2E * LOG2E) * -SCALE, 0.0)[:, None]
        q_in = q_y * left
        qk = tl.sum(_matmul(_split(_by_parts(q_in, C, BK, PARTS), SPLIT), right, SPLIT), 0)
        q_in = q_in * start
    else:
        q_y = _conv(raw_q, True, C, LEVELS)
        q_y *= tl.where(valid, tl.rsqrt(tl.sum(q_y * q_y, 1) + EPS * LOG2E * LOG2E) * -SCALE, 0.0)[:, None]
        gram, qk = _gram_safe(q_y, k_y, gcum, i, C, BK, LEVELS, PARTS, SPLIT)
        _store_rows(k_out + blob * (C * BK) + kk, (k_y * _exp2(total - gcum)).to(dtype), BK, C, LEVELS)
        decay = _exp2(gcum)
        k_in, q_in = _by_parts((k_y * decay).to(dtype), C, BK, PARTS), q_y * decay
    _store_rows(q_out + blob * (C * BK) + kk, q_in.to(dtype), BK, C, LEVELS)
    square = blob * (C * C) + i[:, None] * C + i[None, :]
    tl.store(aqk_out + square, tl.where(i[:, None] >= i[None, :], qk, 0.0).to(dtype))

    akk = tl.where(i[:, None] > i[None, :], gram * b[:, None], 0.0)
    inverse = _inverse(tl.broadcast_to(akk[None, :, :], [PARTS, C, C]), i, LEVELS, SPLIT)
    inverse = (inverse * b[None, None, :]).to(dtype)
    w = tl.dot(inverse, k_in, input_precision="ieee")
    part = tl.arange(0, PARTS)[:, None, None]
    tile = blob * (C * BK) + i[None, :, None] * BK + part * (BK // PARTS) + tl.arange(0, BK // PARTS)[None, None, :]
    tl.store(w_out + tile, w.to(dtype))

    if not V_EARLY:
        raw_v = _raw(v + token * v_stride, v_stride, window, tap_stride, channel_stride, conv_weight, 2 * heads * K, v_column, first, count, in_v, carried, C, PACKED)
    v_y = _by_parts(_conv(raw_v, False, C, LEVELS), C, BV, PARTS)
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
