"""Rows of a chunk of `kda.prefill` as vectors of channels: loads, convolution, sums of the gate.

A thread keeps its channels for all rows, so that taps are loaded once, sums over rows are additions in a thread, and stacking
the rows to a matrix moves nothing.
"""

# mypy: disable-error-code=assignment
import triton
import triton.language as tl

from optimized import interpreter
from optimized.approximate import LOG2E, exp2, unit_over, unit_sigmoid

interpreter.repair()


@triton.jit
def stacked(rows, C: tl.constexpr, LEVELS: tl.constexpr):
    """C = 2^LEVELS vectors [D] as the rows of [C, D]."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for r in tl.static_range(C >> (level + 1)):
            joined += (tl.join(rows[r], rows[r + (C >> (level + 1))]),)
        rows = joined
    return tl.trans(tl.reshape(rows[0], [rows[0].shape[0], C]))


@triton.jit
def unstacked(x, C: tl.constexpr, LEVELS: tl.constexpr):
    """The rows of [C, D], vectors [D]."""
    rows = (tl.trans(x),)
    for level in tl.static_range(LEVELS):
        even, odd = (), ()
        for r in tl.static_range(1 << level):
            row = rows[r]
            if (C >> level) > 2:
                row = tl.reshape(row, [row.shape[0], C >> (level + 1), 2])
            first, second = tl.split(row)
            even += (first,)
            odd += (second,)
        rows = even + odd
    return rows


@triton.jit
def store_rows(out, x, stride, C: tl.constexpr, LEVELS: tl.constexpr):
    """Rows of x [C, D] to the pointers out [D], stride apart."""
    rows = unstacked(x, C, LEVELS)
    for r in tl.static_range(C):
        tl.store(out + r * stride, rows[r])


@triton.jit
def raw_rows(x, stride, column, inside, count, C: tl.constexpr):
    """Rows of a chunk whose first is at x; after the last of the sequence, that one again, so that no load has a mask of its own."""
    rows = ()
    for r in tl.static_range(C):
        rows += (tl.load(x + column, mask=inside, other=0.0),)
        x += tl.where(r + 1 < count, stride, 0)
    return rows


@triton.jit
def rows_before(x, stride, window, tap_stride, channel_stride, channel, column, first, inside, carried):
    """The three rows before a chunk; those before the sequence come from the window."""
    last = x - stride + column
    within = inside & (first > 0)
    t0 = tl.load(last - stride - stride, mask=within, other=0.0)
    t1 = tl.load(last - stride, mask=within, other=0.0)
    t2 = tl.load(last, mask=within, other=0.0)
    if first == 0:
        old = window + channel * channel_stride
        t0 = tl.load(old, mask=inside & carried, other=0.0).to(t0.dtype)
        t1 = tl.load(old + tap_stride, mask=inside & carried, other=0.0).to(t0.dtype)
        t2 = tl.load(old + 2 * tap_stride, mask=inside & carried, other=0.0).to(t0.dtype)
    return t0, t1, t2


@triton.jit
def weights(weight, channel, inside, PACKED: tl.constexpr):
    """The four weights of each channel in FP32, newest token last; PACKED: four of 16 bits are one aligned word."""
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
def conv_inputs(
    x, stride, window, tap_stride, channel_stride, weight, section, column, first, count, inside, carried, C: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """What `conv` needs of a chunk, as it is in memory, to be on its way early: rows with the three before them, then weights."""
    rows = raw_rows(x, stride, column, inside, count, C)
    before = rows_before(x, stride, window, tap_stride, channel_stride, section + column, column, first, inside, carried)
    return before + rows + weights(weight, section + column, inside, PACKED)


@triton.jit
def conv(inputs, SCALED: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr):
    """SiLU of the convolution [C, D], times -log2 e if SCALED: a norm removes the factor, and exp2 needs its argument so."""
    t0, t1, t2 = inputs[0].to(tl.float32), inputs[1].to(tl.float32), inputs[2].to(tl.float32)
    w0, w1, w2, w3 = inputs[C + 3], inputs[C + 4], inputs[C + 5], inputs[C + 6]
    if SCALED:
        w0, w1, w2, w3 = w0 * -LOG2E, w1 * -LOG2E, w2 * -LOG2E, w3 * -LOG2E
    rows = ()
    for r in tl.static_range(C):
        t3 = inputs[r + 3].to(tl.float32)
        y = t0 * w0 + t1 * w1 + t2 * w2 + t3 * w3
        if SCALED:
            rows += (y * unit_over(1.0 + exp2(y)),)
        else:
            rows += (y * unit_sigmoid(y),)
        t0, t1, t2 = t1, t2, t3
    return stacked(rows, C, LEVELS)


@triton.jit
def unit_rows(y, valid, SCALE: tl.constexpr, EPS: tl.constexpr):
    """Rows of a SCALED convolution normed to SCALE; 0 where the row is none of the sequence."""
    return y * tl.where(valid, tl.rsqrt(tl.sum(y * y, 1) + EPS * LOG2E * LOG2E) * -SCALE, 0.0)[:, None]


@triton.jit
def sums_from_start(g, C: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of the rows g up to each [C, D], and of all."""
    x = g[0]
    sums = (x,)
    for r in tl.static_range(1, C):
        x += g[r]
        sums += (x,)
    return stacked(sums, C, LEVELS), x


@triton.jit
def sums_from_middle(g, C: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of the rows g up to each, less that at row C / 2 [C, D]; the latter, and what is left after it."""
    x = tl.zeros(g[0].shape, tl.float32)
    later = (x,)
    for r in tl.static_range(C // 2 + 1, C):
        x += g[r]
        later += (x,)
    leaving = x
    x = tl.zeros(g[0].shape, tl.float32)
    earlier = ()
    for r in tl.static_range(C // 2):
        x -= g[C // 2 - r]
        earlier = (x,) + earlier  # noqa: RUF005 (Triton unpacks no tuples)
    return stacked(earlier + later, C, LEVELS), g[0] - x, leaving
