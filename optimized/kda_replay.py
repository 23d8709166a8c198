"""What the kernels of `kda.verify` and `kda.commit` share: runs of tokens as tuples, one tensor a token, and the replay of drafts."""

import triton
import triton.language as tl

from optimized.kda_cell import conv, dot_rows, log_decay, sigmoid


@triton.jit
def carried_taps(window, channel, tap_stride, channel_stride, mask):
    """The three carried inputs, oldest first; zeros for what the mask excludes."""
    old = window + channel * channel_stride
    t0 = tl.load(old, mask=mask, other=0.0).to(tl.float32)
    t1 = tl.load(old + tap_stride, mask=mask, other=0.0).to(tl.float32)
    t2 = tl.load(old + 2 * tap_stride, mask=mask, other=0.0).to(tl.float32)
    return t0, t1, t2


@triton.jit
def cached(cache, draft_stride, offset, mask, pending, DRAFTS: tl.constexpr):
    """The pending drafts' values in a cache, one tensor a draft; zeros past them, which are not read."""
    values = ()
    draft = cache
    for i in tl.static_range(DRAFTS):
        values += (tl.load(draft + offset, mask=mask & (i < pending), other=0.0).to(tl.float32),)  # type: ignore[assignment]
        draft += draft_stride
    return values


@triton.jit
def tokens(x, first, stride, offset, mask, TOKENS: tl.constexpr):
    """A sequence's new values, one tensor a token."""
    values = ()
    for i in tl.static_range(TOKENS):
        values += (tl.load(x + (first + i) * stride + offset, mask=mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return values


@triton.jit
def store_drafts(cache, draft_stride, offset, mask, values, DRAFTS: tl.constexpr):
    """The raw inputs of the drafts, which follow the golden token in `values`."""
    draft = cache
    for i in tl.static_range(DRAFTS):
        tl.store(draft + offset, values[i + 1].to(cache.dtype.element_ty), mask=mask)
        draft += draft_stride


@triton.jit
def convolved(weights, taps, values, count, COUNT: tl.constexpr):
    """SiLU of the convolution at each of `values`, and the taps that the first `count` of them leave."""
    w0, w1, w2, w3 = weights
    t0, t1, t2 = taps
    left0, left1, left2 = taps
    out = ()
    for i in tl.static_range(COUNT):
        out += (conv(w0, w1, w2, w3, t0, t1, t2, values[i]),)  # type: ignore[assignment]
        t0, t1, t2 = t1, t2, values[i]
        left0, left1, left2 = tl.where(i < count, t0, left0), tl.where(i < count, t1, left1), tl.where(i < count, t2, left2)
    return out, (left0, left1, left2)


@triton.jit
def l2norms(values, EPS: tl.constexpr, SCALE: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(COUNT):
        out += (values[i] * (tl.rsqrt(tl.sum(values[i] * values[i], 0) + EPS) * SCALE),)  # type: ignore[assignment]
    return out


@triton.jit
def decays(values, bias, rate, mask, lower_bound, BOUNDED: tl.constexpr, COUNT: tl.constexpr):
    """The decay of each key channel at each of `values`, raw gates."""
    out = ()
    for i in tl.static_range(COUNT):
        out += (tl.where(mask, tl.exp(log_decay(values[i] + bias, rate, lower_bound, BOUNDED)), 0.0),)  # type: ignore[assignment]
    return out


@triton.jit
def replay_rows(s, pending, values, logits, keys, decays, CHUNKS: tl.constexpr, KI: tl.constexpr, DRAFTS: tl.constexpr):
    """The rows after the pending drafts, whose outputs are nobody's."""
    for i in tl.static_range(DRAFTS):
        if i < pending:
            k_n, decay = tl.reshape(keys[i], [CHUNKS, KI]), tl.reshape(decays[i], [CHUNKS, KI])
            delta = sigmoid(logits[i]) * (values[i] - dot_rows(s, tl.reshape(keys[i] * decays[i], [CHUNKS, KI])))
            s = s * decay[None, :, :] + delta[:, None, None] * k_n[None, :, :]
    return s
