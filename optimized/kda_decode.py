"""`kda.decode` in one launch: conv window, SiLU, L2 norms, gate, beta, state update in place by slot, gated RMSNorm.

One program owns one head of one sequence: its state, its channels of the window and its norm, so nothing is shared and
nothing races. The state [V, K] streams through in tiles of rows; each row is read once and written once. Both products with
the state come from one pass over it, k^T S and q^T S of the decayed state; then core = q^T S + delta (k . q).
Source: spec of the model, section 4.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import arch, interpreter, tiles
from reference import validate
from reference.kda import L2_EPS, MAX_A_LOG

interpreter.repair()


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _log1p_unit(x):
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
def _softplus(x):
    return tl.maximum(x, 0.0) + _log1p_unit(tl.exp(-tl.abs(x)))


@triton.jit
def _taps(x, window, channel, tap_stride, channel_stride, mask, carried):
    """The three carried inputs, oldest first, and the newest; zeros for what a fresh sequence doesn't carry."""
    old = window + channel * channel_stride
    t0 = tl.load(old, mask=mask & carried, other=0.0).to(tl.float32)
    t1 = tl.load(old + tap_stride, mask=mask & carried, other=0.0).to(tl.float32)
    t2 = tl.load(old + 2 * tap_stride, mask=mask & carried, other=0.0).to(tl.float32)
    return t0, t1, t2, tl.load(x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _conv(weight, channel, mask, t0, t1, t2, t3):
    """SiLU of the weighted taps."""
    w0 = tl.load(weight + channel * 4, mask=mask, other=0.0).to(tl.float32)
    w1 = tl.load(weight + channel * 4 + 1, mask=mask, other=0.0).to(tl.float32)
    w2 = tl.load(weight + channel * 4 + 2, mask=mask, other=0.0).to(tl.float32)
    w3 = tl.load(weight + channel * 4 + 3, mask=mask, other=0.0).to(tl.float32)
    y = w0 * t0 + w1 * t1 + w2 * t2 + w3 * t3
    return y * _sigmoid(y)


@triton.jit
def _shift(window, channel, tap_stride, channel_stride, mask, t1, t2, t3):
    dtype = window.dtype.element_ty
    tl.store(window + channel * channel_stride, t1.to(dtype), mask=mask)
    tl.store(window + channel * channel_stride + tap_stride, t2.to(dtype), mask=mask)
    tl.store(window + channel * channel_stride + 2 * tap_stride, t3.to(dtype), mask=mask)


@triton.jit
def _load_rows(state, tile, key, carried, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Rows of the state as [BV, chunks, KI] in FP32; zeros for a fresh sequence, whatever the slot holds."""
    row = tile * BV + tl.arange(0, BV)[:, None, None]
    mask = (row < V) & (key < K)[None, :, :] & carried
    return tl.load(state + row * K + key[None, :, :], mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _store_rows(state, tile, s, key, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    row = tile * BV + tl.arange(0, BV)[:, None, None]
    mask = (row < V) & (key < K)[None, :, :]
    tl.store(state + row * K + key[None, :, :], s.to(state.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _dot_rows(s, x):
    """Each row of s [BV, chunks, KI] times x [chunks, KI]: chunks in a thread, then the few lanes that share a row."""
    return tl.sum(tl.sum(s * x[None, :, :], 1), 1)


@triton.jit
def _delta_rule(s, tile, tiles, v, core, b, k_n, k_decayed, q_decayed, decay, k_dot_q):
    """One tile of rows: the updated rows, and `core` [TILES, BV] with this tile's filled in."""
    v_tile = tl.sum(tl.where(tiles == tile, v, 0.0), 0)
    delta = b * (v_tile - _dot_rows(s, k_decayed))
    core_tile = _dot_rows(s, q_decayed) + delta * k_dot_q
    s = s * decay[None, :, :] + delta[:, None, None] * k_n[None, :, :]
    return s, tl.where(tiles == tile, core_tile[None, :], core)


@triton.jit(do_not_specialize=["num_slots"])
def kda_decode_kernel(
    q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, norm_weight, state, window, slots, fresh, out,
    q_stride, k_stride, v_stride, f_stride, beta_stride, gate_stride, out_stride,
    state_stride, window_stride, tap_stride, channel_stride,
    num_slots, heads, lower_bound, norm_eps,
    K: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, BOUNDED: tl.constexpr, HAS_FRESH: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    RATE_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = pid % heads
    row = (pid // heads).to(tl.int64)

    kk = tl.arange(0, CHUNKS * KI)  # all of K
    in_k = kk < K
    key = tl.arange(0, CHUNKS)[:, None] * KI + tl.arange(0, KI)[None, :]  # [CHUNKS, KI]: the same, as the state is tiled
    tiles = tl.arange(0, TILES)[:, None]
    value = tiles * BV + tl.arange(0, BV)[None, :]  # [TILES, BV]: all of V
    in_v = value < V
    out_row = out + row * out_stride + head * V
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        tl.store(out_row + value, tl.zeros([TILES, BV], tl.float32).to(out.dtype.element_ty), mask=in_v)
        return
    carried = slot >= 0
    if HAS_FRESH:
        carried = tl.load(fresh + row) == 0
    state_row = state + slot * state_stride + head * (V * K)
    window_row = window + slot * window_stride
    if TILES == 1:  # nothing to pipeline: the state is under way before anything waits
        s = _load_rows(state_row, 0, key, carried, K, V, BV)

    q_channel = head * K + kk
    k_channel = heads * K + q_channel
    v_channel = 2 * heads * K + head * V + value
    q0, q1, q2, q3 = _taps(q + row * q_stride + q_channel, window_row, q_channel, tap_stride, channel_stride, in_k, carried)
    k0, k1, k2, k3 = _taps(k + row * k_stride + q_channel, window_row, k_channel, tap_stride, channel_stride, in_k, carried)
    v0, v1, v2, v3 = _taps(v + row * v_stride + head * V + value, window_row, v_channel, tap_stride, channel_stride, in_v, carried)
    x = tl.load(f + row * f_stride + q_channel, mask=in_k, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + q_channel, mask=in_k, other=0.0)
    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))  # NaN stays NaN
    b = _sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    weight = tl.load(norm_weight + value, mask=in_v, other=0.0).to(tl.float32)
    weight *= _sigmoid(tl.load(gate + row * gate_stride + head * V + value, mask=in_v, other=0.0).to(tl.float32))

    q_y = _conv(conv_weight, q_channel, in_k, q0, q1, q2, q3)
    k_y = _conv(conv_weight, k_channel, in_k, k0, k1, k2, k3)
    v_y = _conv(conv_weight, v_channel, in_v, v0, v1, v2, v3)
    q_n = q_y * (tl.rsqrt(tl.sum(q_y * q_y, 0) + EPS) * SCALE)
    k_n = k_y * tl.rsqrt(tl.sum(k_y * k_y, 0) + EPS)
    k_dot_q = tl.sum(k_n * q_n, 0)
    if BOUNDED:
        g = lower_bound * _sigmoid(rate * x)
    else:
        g = -rate * _softplus(x)
    decay = tl.where(in_k, tl.exp(g), 0.0)
    k_decayed = tl.reshape(k_n * decay, [CHUNKS, KI])
    q_decayed = tl.reshape(q_n * decay, [CHUNKS, KI])
    k_n = tl.reshape(k_n, [CHUNKS, KI])
    decay = tl.reshape(decay, [CHUNKS, KI])

    # Every thread has read the window before any thread shifts it: lanes may hold copies of one channel.
    tl.debug_barrier()
    _shift(window_row, q_channel, tap_stride, channel_stride, in_k, q1, q2, q3)
    _shift(window_row, k_channel, tap_stride, channel_stride, in_k, k1, k2, k3)
    _shift(window_row, v_channel, tap_stride, channel_stride, in_v, v1, v2, v3)

    core = tl.zeros([TILES, BV], tl.float32)
    if TILES == 1:
        s, core = _delta_rule(s, 0, tiles, v_y, core, b, k_n, k_decayed, q_decayed, decay, k_dot_q)
        _store_rows(state_row, 0, s, key, K, V, BV)
    else:
        for tile in tl.range(0, TILES, num_stages=STAGES):
            s = _load_rows(state_row, tile, key, carried, K, V, BV)
            s, core = _delta_rule(s, tile, tiles, v_y, core, b, k_n, k_decayed, q_decayed, decay, k_dot_q)
            _store_rows(state_row, tile, s, key, K, V, BV)

    scale = tl.rsqrt(tl.sum(tl.sum(core * core, 1), 0) / V + norm_eps)
    tl.store(out_row + value, (core * scale * weight).to(out.dtype.element_ty), mask=in_v)


def launch(
    tile: tiles.Tile,
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
    slots: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """The launch of validated arguments with a given tile."""
    out = torch.empty(sizes.sequences, sizes.heads * sizes.value_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    padded_k, padded_v = triton.next_power_of_2(sizes.key_dim), triton.next_power_of_2(sizes.value_dim)
    chunk, rows = min(tile.chunk, padded_k), min(tile.rows, padded_v)
    kda_decode_kernel[(sizes.sequences * sizes.heads,)](
        q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, norm_weight, state, window, slots, fresh, out,
        q.stride(0), k.stride(0), v.stride(0), f.stride(0), beta.stride(0), gate.stride(0), out.stride(0),
        state.stride(0), *window.stride(),
        sizes.slots, sizes.heads, lower_bound or 0.0, norm_eps,
        K=sizes.key_dim, V=sizes.value_dim, CHUNKS=padded_k // chunk, KI=chunk, BV=rows, TILES=padded_v // rows, STAGES=tile.stages,
        BOUNDED=lower_bound is not None, HAS_FRESH=fresh is not None, SCALE=sizes.key_dim**-0.5, EPS=L2_EPS, RATE_MAX=MAX_A_LOG,
        PDL=tile.pdl, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, launch_pdl=tile.pdl,
    )  # fmt: skip
    return out


def decode(
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
    slots: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda.decode` as one Triton launch; arguments, pools, errors and return value as there.

    BF16, FP16 or FP32 activations, FP32 or BF16 state. Nothing inside is rounded below FP32. CPU tensors only in
    Triton's interpreter.
    """
    arguments: dict[str, Any] = dict(
        v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, slots=slots, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    sizes = validate.kda_decode(q, k, **arguments)
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        interpreter.require("q")
        validate.values(slots, sizes.slots)
    tile = tiles.tile(arch.of_device(str(q.device)), state.dtype, sizes.sequences * sizes.heads)
    return launch(tile, sizes, q, k, **arguments)
