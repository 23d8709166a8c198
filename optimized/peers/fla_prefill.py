"""The FLA baseline of `kda.prefill`: fla-core's convolution, chunk KDA and gated norm, over rows copied from and to our pools.

Rounds where that chain stores: convolution, normed q and k, core, and the operands of its chunks of 64; `contracts.FLA_CHUNKS`
has the points. Sources: `fla.layers.kda`, `fla.ops.kda.chunk`, flash-linear-attention 0.6.0.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optimized import interpreter
from reference import validate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its greetings: no GPU, and a flash-attn that KDA doesn't use
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd, causal_conv1d_fwd_kernel
    from fla.modules.norm import fused_norm_gate, l2norm
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.common import chunk_delta_h
    from fla.ops.common.gate import fused_beta_sigmoid
    from fla.ops.gla import chunk as gla_chunk
    from fla.ops.kda import chunk_intra, chunk_intra_token_parallel, wy_fast
    from fla.ops.kda import gate as kda_gate
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

TUNED = (
    causal_conv1d_fwd_kernel,
    l2norm.l2norm_fwd_kernel,
    kda_gate.kda_gate_chunk_cumsum_vector_kernel,
    chunk_intra.chunk_kda_fwd_kernel_intra_sub_chunk,
    chunk_intra_token_parallel.chunk_kda_fwd_kernel_intra_token_parallel,
    chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused,
    wy_fast.recompute_w_u_fwd_kda_kernel,
    chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
    gla_chunk.chunk_gla_fwd_kernel_o,
    fused_norm_gate.layer_norm_gated_fwd_kernel,
)


class _Counter(int):
    """What a loop of a kernel counts with: FLA's kernels call `to` on it, which a plain integer lacks."""

    def to(self, dtype: object) -> "_Counter":
        return self


def _interpreted() -> None:
    """Make FLA's kernels fit for Triton's interpreter, which times nothing, and whose loops count with plain integers."""
    interpreter.repair()
    for kernel in TUNED:  # configurations tile over channels, rows and parts of a sum: one will do
        tuner = kernel if hasattr(kernel, "configs") else kernel.fn
        tuner.configs = tuner.configs[-1:]
    chunk_intra.IS_GATHER_SUPPORTED = False  # a first row: gathered from registers, or loaded again
    chunk_delta_h.range = lambda stop: map(_Counter, range(int(stop)))


if interpreter.active():
    _interpreted()

CHUNK = 64
SAFE_BOUND = -5.0  # from here up to 0 its diagonal blocks are matrix products

# q, k, v [1, T, H, D] after the convolution, f [1, T, H, K], beta [1, T, H] raw, states [N, H, V, K] -> core, final states
Core = Callable[..., tuple[Tensor, Tensor]]


def chunk_core(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, states: Tensor, *, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FLA's own launches. Its public entry may hand over to another package that happens to be installed; this one can't."""
    core, final, *_ = chunk_kda_fwd(
        q=l2norm_fwd(q)[0],
        k=l2norm_fwd(k)[0],
        v=v,
        g=f,
        beta=fused_beta_sigmoid(beta),
        scale=q.shape[-1] ** -0.5,
        initial_state=states,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK,
        safe_gate=lower_bound is not None and lower_bound >= SAFE_BOUND,
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=dt_bias,
    )
    return core, final


def _chain(
    core: Core, sizes: validate.KdaSizes, qkv: Tensor, f: Tensor, beta: Tensor, gate: Tensor, states: Tensor, caches: Tensor, *,
    conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, cu_seqlens: Tensor, lower_bound: float | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Convolution, core and norm over rows: `(out [T, H, V], states, caches)`; caches [N, channels, 4], newest last."""
    heads, width = sizes.heads, sizes.heads * sizes.key_dim
    conv, caches = causal_conv1d_fwd(
        qkv[None], conv_weight, None, None, initial_state=caches, output_final_state=True, activation="silu", cu_seqlens=cu_seqlens
    )
    q, k, v = (x.unflatten(2, (heads, -1)).contiguous() for x in conv.split([width, width, heads * sizes.value_dim], dim=2))
    y, states = core(
        q, k, v, f[None].unflatten(2, (heads, -1)), beta[None], states, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out = rms_norm_gated(y[0], gate.unflatten(1, (heads, -1)), norm_weight, None, activation="sigmoid", eps=norm_eps)
    return out, states, caches


def _rows(
    sizes: validate.KdaSizes, state: Tensor, window: Tensor, slots: Tensor, fresh: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Which sequences have a slot, and copies of the pools' rows: states in FP32, caches [N, channels, 4]; zeros where fresh."""
    live = (slots >= 0) & (slots < sizes.slots)
    reads = live if fresh is None else live & ~fresh
    states = state.new_zeros(sizes.sequences, *state.shape[1:], dtype=torch.float32)
    caches = window.new_zeros(sizes.sequences, sizes.channels, 4)
    states[reads] = state[slots[reads].long()].float()
    caches[reads, :, 1:] = window[slots[reads].long()].transpose(1, 2)
    return live, states, caches


def through_rows(
    core: Core, q: Tensor, k: Tensor, *, state: Tensor, window: Tensor, cu_seqlens: Tensor, slots: Tensor, fresh: Tensor | None,
    v: Tensor, f: Tensor, beta: Tensor, gate: Tensor, **arguments: Any,
) -> Tensor:  # fmt: skip
    """`kda.prefill` with a peer's core between FLA's convolution and norm.

    Copies: q, k and v side by side; f, beta and gate when they are strided; states and windows into rows and back. Waits for
    the device, to count the live slots. Padding runs on rows of its own, whose results are dropped.
    """
    given: dict[str, Any] = dict(v=v, f=f, beta=beta, gate=gate, state=state, window=window, slots=slots, fresh=fresh)
    sizes = validate.kda_prefill(q, k, **given, cu_seqlens=cu_seqlens, **arguments)
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        interpreter.require("q")
        validate.values(slots, sizes.slots)
        validate.offsets(cu_seqlens, sizes.tokens)
    live, states, caches = _rows(sizes, state, window, slots, fresh)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    with torch.no_grad(), torch.cuda.device_of(q):
        if sizes.tokens:
            y, states, caches = _chain(
                core, sizes, torch.cat([q, k, v], dim=1), f.contiguous(), beta.contiguous(), gate.contiguous(), states, caches,
                cu_seqlens=cu_seqlens.long(), **arguments,
            )  # fmt: skip
            counted = live.repeat_interleave(cu_seqlens.diff().long(), output_size=sizes.tokens)
            out = torch.where(counted[:, None], y.flatten(1), out)
        state[slots[live].long()] = states[live].to(state.dtype)
        window[slots[live].long()] = caches[live, :, 1:].transpose(1, 2).to(window.dtype)
    return out


def prefill(
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
    cu_seqlens: Tensor,
    slots: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda.prefill` with FLA's kernels; arguments, pools, errors and return value as there, copies as in `through_rows`.

    K at most 256. a_log is not clamped. CPU tensors only in Triton's interpreter.
    """
    return through_rows(
        chunk_core, q, k, v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, cu_seqlens=cu_seqlens, slots=slots, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip


def _prepared(
    given: dict[str, Any], ends: Tensor
) -> tuple[validate.KdaSizes, dict[str, Any], Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Sizes, what is left of the arguments, states, caches, and contiguous f, beta and gate."""
    arguments = {"fresh": None, "norm_eps": 1e-5, **given}
    sizes = validate.kda_prefill(**arguments)
    pools = (arguments.pop(name) for name in ("state", "window", "slots", "fresh"))
    _, states, caches = _rows(sizes, *pools)
    f, beta, gate = (arguments.pop(name).contiguous() for name in ("f", "beta", "gate"))
    return sizes, arguments | {"cu_seqlens": ends}, states, caches, (f, beta, gate)


def prepared(core: Core, ends: Tensor, **given: Any) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """The peer's launches alone, for timing: rows gathered and inputs contiguous beforehand. No padding; nothing is stored back.

    ends: cu_seqlens as int64, one tensor for all layers: FLA keeps what it derives of it on the host by identity.
    """
    sizes, arguments, states, caches, (f, beta, gate) = _prepared(given, ends)
    qkv = torch.cat([arguments.pop(name) for name in "qkv"], dim=1)
    return functools.partial(torch.no_grad()(_chain), core, sizes, qkv, f, beta, gate, states, caches, **arguments)


def prepared_core(core: Core, ends: Tensor, **given: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """As `prepared`, without convolution and norm."""
    sizes, arguments, states, _, (f, beta, _) = _prepared(given, ends)
    q, k, v = (arguments[name].unflatten(1, (sizes.heads, -1)).contiguous()[None] for name in "qkv")
    given = {name: arguments[name] for name in ("a_log", "dt_bias", "lower_bound", "cu_seqlens")}
    return functools.partial(torch.no_grad()(core), q, k, v, f[None].unflatten(2, (sizes.heads, -1)), beta[None], states, **given)
