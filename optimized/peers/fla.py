"""The FLA baseline: `kda.decode` as fla-core's own KDA layer decodes, with its kernels and our pools.

Three convolution updates, the fused recurrence in place by slot, the gated RMSNorm. Rounds where that chain stores: the
convolution's output and the core are in the activation dtype. The kernels here only move rows between the pools and the
layouts that FLA's kernels read. Sources: `fla.layers.kda`, `fla.ops.kda.fused_recurrent`, flash-linear-attention 0.6.0.
"""

import functools
import warnings
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import interpreter
from reference import validate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its greetings: no GPU, and a flash-attn that KDA doesn't use
    from fla.modules.causal_conv1d.ops import causal_conv1d_update, causal_conv1d_update_kernel
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd_kernel, rms_norm_gated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

interpreter.repair()
if interpreter.active():
    # Autotuning times launches on a device. The configurations tile over channels and rows, never inside a sum, so one will do.
    for _kernel in (causal_conv1d_update_kernel, layer_norm_gated_fwd_kernel):
        _kernel.fn.configs = _kernel.fn.configs[-1:]

TAPS = 4  # FLA's cache holds the newest input as well, and shifts before it reads
BLOCK_CHANNELS = 256
BLOCK_STATE = 4096


@triton.jit
def _cache_offset(n, channel, sequences, QK: tl.constexpr, CHANNELS: tl.constexpr):
    """Of tap 0: the caches of q, k and v follow each other, each contiguous [N, D, 4]."""
    first = tl.where(channel < QK, 0, tl.where(channel < 2 * QK, QK, 2 * QK)).to(tl.int64)
    width = tl.where(channel < 2 * QK, QK, CHANNELS - 2 * QK).to(tl.int64)
    return (sequences * first + n * width + channel - first) * 4


@triton.jit(do_not_specialize=["sequences", "slot_count", "padding_row"])
def load_windows_kernel(
    window,
    cache,
    slots,
    fresh,
    rows,
    sequences: tl.int64,
    slot_count: tl.int64,
    padding_row: tl.int64,
    slot_stride: tl.int64,
    tap_stride: tl.int64,
    channel_stride: tl.int64,
    QK: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The carried inputs of each sequence into FLA's caches, and its row of the state pool into `rows`."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    live = (slot >= 0) & (slot < slot_count)
    tl.store(rows + n, tl.where(live, slot, padding_row), mask=tl.program_id(1) == 0)
    reads = live
    if HAS_FRESH:
        reads = live & (tl.load(fresh + n) == 0)

    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, 4)
    source = slot * slot_stride + (tap - 1)[None, :] * tap_stride + channel[:, None] * channel_stride
    mask = (channel < CHANNELS)[:, None] & (tap >= 0)[None, :]
    x = tl.load(window + source, mask=mask & (tap >= 1)[None, :] & reads, other=0.0)
    target = _cache_offset(n, channel, sequences, QK, CHANNELS)[:, None] + tap[None, :]
    tl.store(cache + target, x, mask=mask)


@triton.jit(do_not_specialize=["sequences", "slot_count"])
def store_windows_kernel(
    window,
    cache,
    slots,
    out,
    sequences: tl.int64,
    slot_count: tl.int64,
    slot_stride: tl.int64,
    tap_stride: tl.int64,
    channel_stride: tl.int64,
    QK: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The caches that FLA updated into the window of each live sequence; zeros into the output of the others."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    live = (slot >= 0) & (slot < slot_count)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, 4)
    mask = (channel < CHANNELS)[:, None] & (tap >= 1)[None, :] & live
    x = tl.load(cache + _cache_offset(n, channel, sequences, QK, CHANNELS)[:, None] + tap[None, :], mask=mask, other=0.0)
    target = slot * slot_stride + (tap - 1)[None, :] * tap_stride + channel[:, None] * channel_stride
    tl.store(window + target, x, mask=mask)
    width: tl.constexpr = CHANNELS - 2 * QK
    tl.store(out + n * width + channel, tl.zeros([BLOCK], out.dtype.element_ty), mask=(channel < width) & (live == 0))


@triton.jit(do_not_specialize=["slot_count"])
def clear_states_kernel(state, slots, fresh, slot_count: tl.int64, slot_stride: tl.int64, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros into the state rows of fresh sequences: FLA's kernel reads the row of every sequence."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    clears = (slot >= 0) & (slot < slot_count) & (tl.load(fresh + n) != 0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(state + slot * slot_stride + element, tl.zeros([BLOCK], state.dtype.element_ty), mask=(element < ROW) & clears)


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
    """`reference.kda.decode` with FLA's kernels; arguments, pools, errors and return value as there.

    Never synchronises. FLA's kernels tune themselves at the first call with each width and dtype: make it before a CUDA graph
    is captured. Copies: windows into FLA's caches and back; f, beta and gate when they are strided. a_log is not clamped.
    """
    sizes = validate.kda_decode(
        q, k, v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, slots=slots, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        interpreter.require("q")
        validate.values(slots, sizes.slots)
    if sizes.sequences == 0:
        return torch.empty_like(v)
    with torch.no_grad(), torch.cuda.device_of(q):
        return _decode(sizes, (q, k, v), f, beta, gate, conv_weight, a_log, dt_bias, norm_weight, state, window, slots, fresh,
                       lower_bound, norm_eps)  # fmt: skip


def _decode(
    sizes: validate.KdaSizes,
    qkv: tuple[Tensor, Tensor, Tensor],
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
    fresh: Tensor | None,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    n, heads, key_dim, value_dim = sizes.sequences, sizes.heads, sizes.key_dim, sizes.value_dim
    row = heads * value_dim * key_dim
    if sizes.slots <= 1:  # the stride of a single slot may be anything
        state = state.as_strided(state.shape, (row, *state.stride()[1:]))
    scratch = state.new_empty(state.stride(0) + row)
    rows = torch.empty(n, dtype=torch.int64, device=state.device)
    cache = window.new_empty(n * sizes.channels * TAPS)
    grid = (n, triton.cdiv(sizes.channels, BLOCK_CHANNELS))
    layout = dict(QK=heads * key_dim, CHANNELS=sizes.channels, BLOCK=BLOCK_CHANNELS)

    # A copy: FLA's convolution reads caches [N, D, 4], contiguous and in the order of the batch.
    load_windows_kernel[grid](
        window, cache, slots, fresh, rows, n, sizes.slots, _row_inside(scratch, state), *window.stride(),
        HAS_FRESH=fresh is not None, **layout,
    )  # fmt: skip
    if fresh is not None:
        clears = (n, triton.cdiv(row, BLOCK_STATE))
        clear_states_kernel[clears](state, slots, fresh, sizes.slots, state.stride(0), ROW=row, BLOCK=BLOCK_STATE)

    widths = [x.shape[1] for x in qkv]
    caches = [part.view(n, -1, TAPS) for part in cache.split([n * width * TAPS for width in widths])]
    # Copies of strided f, beta and gate: FLA's kernels have no strides for them.
    out = _chain(
        sizes, qkv, caches, f.contiguous(), beta.contiguous(), gate.contiguous(), conv_weight, a_log, dt_bias, norm_weight, state, rows,
        lower_bound, norm_eps,
    )  # fmt: skip
    store_windows_kernel[grid](window, cache, slots, out, n, sizes.slots, *window.stride(), **layout)
    return out.view(n, heads * value_dim)


def _chain(
    sizes: validate.KdaSizes,
    qkv: tuple[Tensor, Tensor, Tensor],
    caches: list[Tensor],
    f: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    rows: Tensor,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """FLA's own launches: three convolutions into its caches, the recurrence on `rows` of the pool, the norm; [N, H, V]."""
    n, heads = sizes.sequences, sizes.heads
    # One launch for each of q, k and v, as in FLA's layer: its recurrence needs each contiguous.
    weights = conv_weight.split([x.shape[1] for x in qkv])
    conv = [causal_conv1d_update(x, c, weight=w, activation="silu")[0] for x, c, w in zip(qkv, caches, weights, strict=True)]
    q, k, v = (y.view(n, 1, heads, -1) for y in conv)
    core, _ = fused_recurrent_kda_fwd(
        q=q,
        k=k,
        v=v,
        g=f.view(n, 1, heads, sizes.key_dim),
        beta=beta.view(n, 1, heads),
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=state,
        inplace_final_state=True,
        state_v_first=True,
        ssm_state_indices=rows,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
        out=torch.empty_like(v),
    )
    heads_of = (n, heads, sizes.value_dim)
    return rms_norm_gated(core.view(heads_of), gate.view(heads_of), norm_weight, None, activation="sigmoid", eps=norm_eps)


def prepared(
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
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Callable[[], Tensor]:
    """FLA's launches alone, for timing: its caches filled and every input made contiguous beforehand. No padding."""
    sizes = validate.kda_decode(
        q, k, v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, slots=slots, fresh=None, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    carried = torch.nn.functional.pad(window[slots.long()].transpose(1, 2), (1, 0))
    caches = [part.contiguous() for part in carried.split([x.shape[1] for x in (q, k, v)], dim=1)]
    qkv = (q.contiguous(), k.contiguous(), v.contiguous())
    return functools.partial(
        _chain, sizes, qkv, caches, f.contiguous(), beta.contiguous(), gate.contiguous(), conv_weight, a_log, dt_bias, norm_weight,
        state, slots.long(), lower_bound, norm_eps,
    )  # fmt: skip


def _row_inside(scratch: Tensor, state: Tensor) -> int:
    """The slot number, far outside the pool, at which FLA's kernel addresses a whole row of `scratch`.

    Its recurrence can't skip a sequence, so padding works on memory of our own; no value of `slots` is read on the host.
    """
    distance = (scratch.data_ptr() - state.data_ptr()) // state.element_size()
    return -(-distance // state.stride(0))
