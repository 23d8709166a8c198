"""What the fused KDA kernels share: gates, convolution, window, rows of the state, the delta rule; FP32 throughout.

Source: spec of the model, section 4.
"""

import triton
import triton.language as tl

from optimized import interpreter

interpreter.repair()


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log1p_unit(x):
    """log(1 + x) for x in [0, 1] to FP32 rounding: 2 atanh(x / (2 + x)) by its series; a device log loses small x."""
    s = x / (2.0 + x)
    s2 = s * s
    series = 1.0 / 15.0 + s2 * (1.0 / 17.0)
    series = 1.0 / 13.0 + s2 * series
    series = 1.0 / 11.0 + s2 * series
    series = 1.0 / 9.0 + s2 * series
    series = 1.0 / 7.0 + s2 * series
    series = 1.0 / 5.0 + s2 * series
    series = 1.0 / 3.0 + s2 * series
    return 2.0 * s * (1.0 + s2 * series)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p_unit(tl.exp(-tl.abs(x)))


@triton.jit
def taps(x, window, channel, tap_stride, channel_stride, mask, carried):
    """The three carried inputs, oldest first, and the newest; zeros for what a fresh sequence doesn't carry."""
    old = window + channel * channel_stride
    t0 = tl.load(old, mask=mask & carried, other=0.0).to(tl.float32)
    t1 = tl.load(old + tap_stride, mask=mask & carried, other=0.0).to(tl.float32)
    t2 = tl.load(old + 2 * tap_stride, mask=mask & carried, other=0.0).to(tl.float32)
    return t0, t1, t2, tl.load(x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tap_weights(weight, channel, mask):
    """The four weights of each channel, newest token last."""
    w0 = tl.load(weight + channel * 4, mask=mask, other=0.0).to(tl.float32)
    w1 = tl.load(weight + channel * 4 + 1, mask=mask, other=0.0).to(tl.float32)
    w2 = tl.load(weight + channel * 4 + 2, mask=mask, other=0.0).to(tl.float32)
    w3 = tl.load(weight + channel * 4 + 3, mask=mask, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def conv(w0, w1, w2, w3, t0, t1, t2, t3):
    """SiLU of the weighted taps."""
    y = w0 * t0 + w1 * t1 + w2 * t2 + w3 * t3
    return y * sigmoid(y)


@triton.jit
def shift(window, channel, tap_stride, channel_stride, mask, t1, t2, t3):
    dtype = window.dtype.element_ty
    tl.store(window + channel * channel_stride, t1.to(dtype), mask=mask)
    tl.store(window + channel * channel_stride + tap_stride, t2.to(dtype), mask=mask)
    tl.store(window + channel * channel_stride + 2 * tap_stride, t3.to(dtype), mask=mask)


@triton.jit
def load_rows(state, tile, key, carried, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Rows of the state as [BV, chunks, KI] in FP32; zeros for a fresh sequence, whatever the slot holds."""
    row = tile * BV + tl.arange(0, BV)[:, None, None]
    mask = (row < V) & (key < K)[None, :, :] & carried
    return tl.load(state + row * K + key[None, :, :], mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_rows(state, tile, s, key, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    row = tile * BV + tl.arange(0, BV)[:, None, None]
    mask = (row < V) & (key < K)[None, :, :]
    tl.store(state + row * K + key[None, :, :], s.to(state.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def dot_rows(s, x):
    """Each row of s [BV, chunks, KI] times x [chunks, KI]: chunks in a thread, then the few lanes that share a row."""
    return tl.sum(tl.sum(s * x[None, :, :], 1), 1)


@triton.jit
def log_decay(x, rate, lower_bound, BOUNDED: tl.constexpr):
    """Natural log of the decay for x, the raw gate with its bias."""
    if BOUNDED:
        return lower_bound * sigmoid(rate * x)
    else:
        return -rate * softplus(x)


@triton.jit
def delta_rule(s, v, b, k_n, k_decayed, q_decayed, decay, k_dot_q):
    """The updated rows s [BV, chunks, KI] and their core [BV], for values v [BV]; both products from one pass over the old rows."""
    delta = b * (v - dot_rows(s, k_decayed))
    core = dot_rows(s, q_decayed) + delta * k_dot_q
    return s * decay[None, :, :] + delta[:, None, None] * k_n[None, :, :], core
