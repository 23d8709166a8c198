"""`kda.verify` and `kda.commit`, each in one launch: replay of accepted drafts, golden token, new drafts, one pass over the state.

One program owns one head of one sequence, as in decode. It reads the state once and keeps it in registers over all tokens; it
writes the state once, after the golden token. What doesn't depend on the state comes first, while the state is under way: the
convolution, norms and gates of every token, pending drafts included, once a head.
Source: spec of the model, section 5.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import arch, contracts, interpreter, tiles, verify_tiles
from optimized.kda_cell import delta_rule, load_rows, shift, sigmoid, store_rows, tap_weights
from optimized.kda_replay import cached, carried_taps, convolved, decays, l2norms, replay_rows, store_drafts, tokens
from reference import validate, validate_verify
from reference.kda import L2_EPS, MAX_A_LOG
from reference.kda_offsets import Offsets
from reference.kda_replay import Replay
from reference.kda_verify import checked_offsets

CONTRACT = contracts.EXACT


@triton.jit(do_not_specialize=["num_slots"])
def kda_verify_kernel(
    q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, norm_weight, state, window, qkv_cache, f_cache, beta_cache,
    slots, counts, cu_seqlens, fresh, out,
    q_stride, k_stride, v_stride, f_stride, beta_stride, gate_stride, out_stride,
    state_stride, window_stride, tap_stride, channel_stride,
    qkv_slot_stride, qkv_draft_stride, f_slot_stride, f_draft_stride, beta_slot_stride, beta_draft_stride,
    num_slots, heads, lower_bound, norm_eps,
    K: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, DRAFTS: tl.constexpr,
    SHARED: tl.constexpr, BOUNDED: tl.constexpr, HAS_FRESH: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    RATE_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = 1 + DRAFTS
    pid = tl.program_id(0)
    head = pid % heads
    row = (pid // heads).to(tl.int64)

    kk = tl.arange(0, CHUNKS * KI)
    in_k = kk < K
    key = tl.arange(0, CHUNKS)[:, None] * KI + tl.arange(0, KI)[None, :]  # [CHUNKS, KI]: the same, as the state is tiled
    value = tl.arange(0, BV)
    in_v = value < V
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    slot = tl.load(slots + row).to(tl.int64)
    pending = tl.load(counts + row)  # with SHARED pending drafts, else accepted tokens
    first = row * TOKENS
    if SHARED:
        shifted = tl.load(cu_seqlens + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        for i in tl.static_range(TOKENS):
            tl.store(out + (first + i) * out_stride + head * V + value, tl.zeros([BV], tl.float32).to(out.dtype.element_ty), mask=in_v)
        return
    carried = slot >= 0
    if HAS_FRESH:
        carried = tl.load(fresh + row) == 0
    state_row = state + slot * state_stride + head * (V * K)
    s = load_rows(state_row, 0, key, carried, K, V, BV)  # under way before anything waits

    if SHARED:
        first = shifted + pending
    else:
        pending -= 1
    pending = tl.where(carried, tl.minimum(pending, DRAFTS), 0)

    q_channel = head * K + kk
    k_channel = heads * K + q_channel
    v_channel = 2 * heads * K + head * V + value
    window_row = window + slot * window_stride
    qkv_row = qkv_cache + slot * qkv_slot_stride
    f_row = f_cache + slot * f_slot_stride + q_channel
    beta_row = beta_cache + slot * beta_slot_stride + head
    q_taps = carried_taps(window_row, q_channel, tap_stride, channel_stride, in_k & carried)
    k_taps = carried_taps(window_row, k_channel, tap_stride, channel_stride, in_k & carried)
    v_taps = carried_taps(window_row, v_channel, tap_stride, channel_stride, in_v & carried)
    q_old = cached(qkv_row, qkv_draft_stride, q_channel, in_k, pending, DRAFTS)
    k_old = cached(qkv_row, qkv_draft_stride, k_channel, in_k, pending, DRAFTS)
    v_old = cached(qkv_row, qkv_draft_stride, v_channel, in_v, pending, DRAFTS)
    f_old = cached(f_row, f_draft_stride, 0, in_k, pending, DRAFTS)
    b_old = cached(beta_row, beta_draft_stride, 0, True, pending, DRAFTS)
    q_new = tokens(q, first, q_stride, q_channel, in_k, TOKENS)
    k_new = tokens(k, first, k_stride, q_channel, in_k, TOKENS)
    v_new = tokens(v, first, v_stride, head * V + value, in_v, TOKENS)
    f_new = tokens(f, first, f_stride, q_channel, in_k, TOKENS)
    b_new = tokens(beta, first, beta_stride, head, True, TOKENS)
    gate_row = gate + first * gate_stride + head * V + value
    out_row = out + first * out_stride + head * V + value
    gate_raw = tl.load(gate_row, mask=in_v, other=0.0)
    bias = tl.load(dt_bias + q_channel, mask=in_k, other=0.0)
    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))  # NaN stays NaN
    q_weight = tap_weights(conv_weight, q_channel, in_k)
    k_weight = tap_weights(conv_weight, k_channel, in_k)
    v_weight = tap_weights(conv_weight, v_channel, in_v)

    _, q_taps = convolved(q_weight, q_taps, q_old, pending, DRAFTS)  # replay needs no q, the window does
    k_y, k_taps = convolved(k_weight, k_taps, k_old, pending, DRAFTS)
    v_replayed, v_taps = convolved(v_weight, v_taps, v_old, pending, DRAFTS)
    k_replayed = l2norms(k_y, EPS, 1.0, DRAFTS)
    decay_replayed = decays(f_old, bias, rate, in_k, lower_bound, BOUNDED, DRAFTS)

    q_y, q_taps = convolved(q_weight, q_taps, q_new, 1, TOKENS)
    k_y, k_taps = convolved(k_weight, k_taps, k_new, 1, TOKENS)
    v_y, v_taps = convolved(v_weight, v_taps, v_new, 1, TOKENS)
    q_n = l2norms(q_y, EPS, SCALE, TOKENS)
    k_n = l2norms(k_y, EPS, 1.0, TOKENS)
    decay = decays(f_new, bias, rate, in_k, lower_bound, BOUNDED, TOKENS)

    # Every thread has read window and caches before any thread writes them: lanes may hold copies of one channel.
    tl.debug_barrier()
    shift(window_row, q_channel, tap_stride, channel_stride, in_k, q_taps[0], q_taps[1], q_taps[2])
    shift(window_row, k_channel, tap_stride, channel_stride, in_k, k_taps[0], k_taps[1], k_taps[2])
    shift(window_row, v_channel, tap_stride, channel_stride, in_v, v_taps[0], v_taps[1], v_taps[2])
    store_drafts(qkv_row, qkv_draft_stride, q_channel, in_k, q_new, DRAFTS)
    store_drafts(qkv_row, qkv_draft_stride, k_channel, in_k, k_new, DRAFTS)
    store_drafts(qkv_row, qkv_draft_stride, v_channel, in_v, v_new, DRAFTS)
    store_drafts(f_row, f_draft_stride, 0, in_k, f_new, DRAFTS)
    store_drafts(beta_row, beta_draft_stride, 0, None, b_new, DRAFTS)

    s = replay_rows(s, pending, v_replayed, b_old, k_replayed, decay_replayed, CHUNKS, KI, DRAFTS)
    for i in tl.static_range(TOKENS):
        gate_i = gate_raw.to(tl.float32)
        if i < DRAFTS:  # one token ahead: all at once would not fit in registers
            gate_row += gate_stride
            gate_raw = tl.load(gate_row, mask=in_v, other=0.0)
        s, core = delta_rule(
            s, v_y[i], sigmoid(b_new[i]), tl.reshape(k_n[i], [CHUNKS, KI]), tl.reshape(k_n[i] * decay[i], [CHUNKS, KI]),
            tl.reshape(q_n[i] * decay[i], [CHUNKS, KI]), tl.reshape(decay[i], [CHUNKS, KI]), tl.sum(k_n[i] * q_n[i], 0),
        )  # fmt: skip
        if i == 0:  # what the drafts do to the state stays here
            store_rows(state_row, 0, s, key, K, V, BV)
        scale = tl.rsqrt(tl.sum(core * core, 0) / V + norm_eps)
        weight = tl.load(norm_weight + value, mask=in_v, other=0.0).to(tl.float32)
        gated = core * scale * (weight * sigmoid(gate_i))
        tl.store(out_row, gated.to(out.dtype.element_ty), mask=in_v)
        out_row += out_stride


@triton.jit(do_not_specialize=["num_slots"])
def kda_commit_kernel(
    conv_weight, a_log, dt_bias, state, window, qkv_cache, f_cache, beta_cache, slots, accepted,
    state_stride, window_stride, tap_stride, channel_stride,
    qkv_slot_stride, qkv_draft_stride, f_slot_stride, f_draft_stride, beta_slot_stride, beta_draft_stride,
    num_slots, heads, lower_bound,
    K: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, DRAFTS: tl.constexpr,
    BOUNDED: tl.constexpr, EPS: tl.constexpr, RATE_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = pid % heads
    row = (pid // heads).to(tl.int64)
    kk = tl.arange(0, CHUNKS * KI)
    in_k = kk < K
    key = tl.arange(0, CHUNKS)[:, None] * KI + tl.arange(0, KI)[None, :]
    value = tl.arange(0, BV)
    in_v = value < V
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    slot = tl.load(slots + row).to(tl.int64)
    pending = tl.minimum(tl.load(accepted + row) - 1, DRAFTS)
    if (slot < 0) | (slot >= num_slots) | (pending <= 0):
        return
    state_row = state + slot * state_stride + head * (V * K)
    s = load_rows(state_row, 0, key, pending > 0, K, V, BV)

    q_channel = head * K + kk
    k_channel = heads * K + q_channel
    v_channel = 2 * heads * K + head * V + value
    window_row = window + slot * window_stride
    qkv_row = qkv_cache + slot * qkv_slot_stride
    q_taps = carried_taps(window_row, q_channel, tap_stride, channel_stride, in_k)
    k_taps = carried_taps(window_row, k_channel, tap_stride, channel_stride, in_k)
    v_taps = carried_taps(window_row, v_channel, tap_stride, channel_stride, in_v)
    q_old = cached(qkv_row, qkv_draft_stride, q_channel, in_k, pending, DRAFTS)
    k_old = cached(qkv_row, qkv_draft_stride, k_channel, in_k, pending, DRAFTS)
    v_old = cached(qkv_row, qkv_draft_stride, v_channel, in_v, pending, DRAFTS)
    f_old = cached(f_cache + slot * f_slot_stride, f_draft_stride, q_channel, in_k, pending, DRAFTS)
    b_old = cached(beta_cache + slot * beta_slot_stride, beta_draft_stride, head, True, pending, DRAFTS)
    bias = tl.load(dt_bias + q_channel, mask=in_k, other=0.0)
    log_rate = tl.load(a_log + head)
    rate = tl.exp(tl.where(log_rate > RATE_MAX, RATE_MAX, log_rate))
    q_weight = tap_weights(conv_weight, q_channel, in_k)
    k_weight = tap_weights(conv_weight, k_channel, in_k)
    v_weight = tap_weights(conv_weight, v_channel, in_v)

    _, q_taps = convolved(q_weight, q_taps, q_old, pending, DRAFTS)
    k_y, k_taps = convolved(k_weight, k_taps, k_old, pending, DRAFTS)
    v_y, v_taps = convolved(v_weight, v_taps, v_old, pending, DRAFTS)
    k_n = l2norms(k_y, EPS, 1.0, DRAFTS)
    decay = decays(f_old, bias, rate, in_k, lower_bound, BOUNDED, DRAFTS)

    tl.debug_barrier()  # as in verify
    shift(window_row, q_channel, tap_stride, channel_stride, in_k, q_taps[0], q_taps[1], q_taps[2])
    shift(window_row, k_channel, tap_stride, channel_stride, in_k, k_taps[0], k_taps[1], k_taps[2])
    shift(window_row, v_channel, tap_stride, channel_stride, in_v, v_taps[0], v_taps[1], v_taps[2])
    s = replay_rows(s, pending, v_y, b_old, k_n, decay, CHUNKS, KI, DRAFTS)
    store_rows(state_row, 0, s, key, K, V, BV)


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
    replay: Replay,
    slots: Tensor,
    accepted: Tensor,
    offsets: Offsets | None = None,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """The launch of validated arguments with a given tile, whose rows and stages have no say: a program holds its whole state."""
    out = torch.empty(sizes.tokens, sizes.heads * sizes.value_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    counts, cu_seqlens = (accepted, None) if offsets is None else offsets
    kda_verify_kernel[(sizes.sequences * sizes.heads,)](
        q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, norm_weight, state, window, replay.qkv, replay.f, replay.beta,
        slots, counts, cu_seqlens, fresh, out,
        q.stride(0), k.stride(0), v.stride(0), f.stride(0), beta.stride(0), gate.stride(0), out.stride(0),
        state.stride(0), *window.stride(), *_strides(replay),
        sizes.slots, sizes.heads, lower_bound or 0.0, norm_eps,
        SHARED=offsets is not None, HAS_FRESH=fresh is not None, SCALE=sizes.key_dim**-0.5, BOUNDED=lower_bound is not None,
        **_options(tile, sizes),
    )  # fmt: skip
    return out


def _strides(replay: Replay) -> list[int]:
    return [stride for x in (replay.qkv, replay.f, replay.beta) for stride in x.stride()[:2]]


def _options(tile: tiles.Tile, sizes: validate.KdaSizes) -> dict[str, Any]:
    """Constants and launch options that both kernels share."""
    padded_k, padded_v = triton.next_power_of_2(sizes.key_dim), triton.next_power_of_2(sizes.value_dim)
    chunk = min(tile.chunk, padded_k)
    return dict(
        K=sizes.key_dim, V=sizes.value_dim, CHUNKS=padded_k // chunk, KI=chunk, BV=padded_v, DRAFTS=sizes.drafts, EPS=L2_EPS,
        RATE_MAX=MAX_A_LOG, PDL=tile.pdl, num_warps=tile.warps, num_stages=1, enable_fp_fusion=True, launch_pdl=tile.pdl,
    )  # fmt: skip


def verify(
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
    replay: Replay,
    slots: Tensor,
    accepted: Tensor,
    offsets: Offsets | None = None,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda_verify.verify` as one Triton launch; arguments, pools, caches, errors and return value as there.

    BF16, FP16 or FP32 activations, FP32 or BF16 state. Nothing inside is rounded below FP32, and a replayed draft goes through
    the same operations as a decoded token. CPU tensors only in Triton's interpreter.
    """
    arguments: dict[str, Any] = dict(
        v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, replay=replay, slots=slots, accepted=accepted, offsets=offsets, fresh=fresh,
        lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    sizes = validate_verify.kda_verify(q, k, **arguments)
    _checked(sizes, q.dtype, state, slots, accepted, offsets, fresh)
    return launch(_tile(state, sizes), sizes, q, k, **arguments)


def commit(
    state: Tensor,
    window: Tensor,
    *,
    replay: Replay,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    accepted: Tensor,
    lower_bound: float | None,
) -> None:
    """`reference.kda_verify.commit` as one Triton launch; arguments, pools and errors as there."""
    arguments: dict[str, Any] = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, slots=slots, accepted=accepted)
    sizes = validate_verify.kda_commit(state, window, replay=replay, lower_bound=lower_bound, **arguments)
    _checked(sizes, window.dtype, state, slots, accepted)
    if sizes.sequences == 0:
        return
    kda_commit_kernel[(sizes.sequences * sizes.heads,)](
        conv_weight, a_log, dt_bias, state, window, replay.qkv, replay.f, replay.beta, slots, accepted,
        state.stride(0), *window.stride(), *_strides(replay), sizes.slots, sizes.heads, lower_bound or 0.0,
        BOUNDED=lower_bound is not None, **_options(_tile(state, sizes), sizes),
    )  # fmt: skip


def _checked(
    sizes: validate.KdaSizes,
    activation: torch.dtype,
    state: Tensor,
    slots: Tensor,
    accepted: Tensor,
    offsets: Offsets | None = None,
    fresh: Tensor | None = None,
) -> None:
    """What the kernels take; on a CPU the interpreter, and the values."""
    validate.kernel_dtypes(activation, state.dtype)
    if state.device.type == "cpu":
        interpreter.require("state")
        checked_offsets(sizes, slots, accepted, offsets, fresh)


def _tile(state: Tensor, sizes: validate.KdaSizes) -> tiles.Tile:
    return tiles.tile(arch.of_device(str(state.device)), state.dtype, sizes.sequences * sizes.heads, verify_tiles.VERIFY)
