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
from optimized.kda_cell import conv, delta_rule, load_rows, log_decay, shift, sigmoid, store_rows, tap_weights, taps
from reference import validate
from reference.kda import L2_EPS, MAX_A_LOG


@triton.jit
def _tile(s, tile, tiles, v, core, b, k_n, k_decayed, q_decayed, decay, k_dot_q):
    """One tile of rows: the updated rows, and `core` [TILES, BV] with this tile's filled in."""
    v_tile = tl.sum(tl.where(tiles == tile, v, 0.0), 0)
    s, core_tile = delta_rule(s, v_tile, b, k_n, k_decayed, q_decayed, decay, k_dot_q)
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
        s = load_rows(state_row, 0, key, carried, K, V, BV)

    q_channel = head * K + kk
    k_channel = heads * K + q_channel
    v_channel = 2 * heads * K + head * V + value
    q0, q1, q2, q3 = taps(q + row * q_stride + q_channel, window_row, q_channel, tap_stride, channel_stride, in_k, carried)
    k0, k1, k2, k3 = taps(k + row * k_stride + q_channel, window_row, k_channel, tap_stride, channel_stride, in_k, carried)
    v0, v1, v2, v3 = taps(v + row * v_stride + head * V + value, window_row, v_channel, tap_stride, channel_stride, in_v, carried)
    x = tl.load(f + row * f_stride + q_channel, mask=in_k, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + q_channel, mask=in_k, other=0.0)
    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))  # NaN stays NaN
    b = sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    weight = tl.load(norm_weight + value, mask=in_v, other=0.0).to(tl.float32)
    weight *= sigmoid(tl.load(gate + row * gate_stride + head * V + value, mask=in_v, other=0.0).to(tl.float32))

    q_w0, q_w1, q_w2, q_w3 = tap_weights(conv_weight, q_channel, in_k)
    q_y = conv(q_w0, q_w1, q_w2, q_w3, q0, q1, q2, q3)
    k_w0, k_w1, k_w2, k_w3 = tap_weights(conv_weight, k_channel, in_k)
    k_y = conv(k_w0, k_w1, k_w2, k_w3, k0, k1, k2, k3)
    v_w0, v_w1, v_w2, v_w3 = tap_weights(conv_weight, v_channel, in_v)
    v_y = conv(v_w0, v_w1, v_w2, v_w3, v0, v1, v2, v3)
    q_n = q_y * (tl.rsqrt(tl.sum(q_y * q_y, 0) + EPS) * SCALE)
    k_n = k_y * tl.rsqrt(tl.sum(k_y * k_y, 0) + EPS)
    k_dot_q = tl.sum(k_n * q_n, 0)
    decay = tl.where(in_k, tl.exp(log_decay(x, rate, lower_bound, BOUNDED)), 0.0)
    k_decayed = tl.reshape(k_n * decay, [CHUNKS, KI])
    q_decayed = tl.reshape(q_n * decay, [CHUNKS, KI])
    k_n = tl.reshape(k_n, [CHUNKS, KI])
    decay = tl.reshape(decay, [CHUNKS, KI])

    # Every thread has read the window before any thread shifts it: lanes may hold copies of one channel.
    tl.debug_barrier()
    shift(window_row, q_channel, tap_stride, channel_stride, in_k, q1, q2, q3)
    shift(window_row, k_channel, tap_stride, channel_stride, in_k, k1, k2, k3)
    shift(window_row, v_channel, tap_stride, channel_stride, in_v, v1, v2, v3)

    core = tl.zeros([TILES, BV], tl.float32)
    if TILES == 1:
        s, core = _tile(s, 0, tiles, v_y, core, b, k_n, k_decayed, q_decayed, decay, k_dot_q)
        store_rows(state_row, 0, s, key, K, V, BV)
    else:
        for tile in tl.range(0, TILES, num_stages=STAGES):
            s = load_rows(state_row, tile, key, carried, K, V, BV)
            s, core = _tile(s, tile, tiles, v_y, core, b, k_n, k_decayed, q_decayed, decay, k_dot_q)
            store_rows(state_row, tile, s, key, K, V, BV)

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
