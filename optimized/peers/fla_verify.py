"""FLA's recurrence under contract A: a state for each token, one of which the next call starts from.

The recurrence and the gated norm are fla-core's; it has no convolution over a window with drafts, so that one is torch. Rounds
where the chain stores: the convolution's output and the core. Source: `fla.ops.kda.fused_recurrent`, flash-linear-attention 0.6.0.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized import interpreter
from optimized.peers.fla import _row_inside
from reference import validate, validate_verify

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its greetings, as in `fla`
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd


def verify_snapshots(
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
    accepted: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda_verify.verify_snapshots` with FLA's kernels; arguments, pools, errors and return value as there."""
    sizes = validate_verify.kda_snapshots(
        q, k, v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, slots=slots, accepted=accepted, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        interpreter.require("q")
        validate_verify.snapshots(slots, sizes.slots)
        validate_verify.accepted(accepted, slots[:, 0], sizes.slots, sizes.drafts, fresh)
    n, width, heads = sizes.sequences, 1 + sizes.drafts, sizes.heads
    if q.numel() == 0 or sizes.slots == 0:
        return torch.zeros_like(v)

    live = (slots[:, 0] >= 0) & (slots[:, 0] < sizes.slots)
    new = torch.zeros_like(live) if fresh is None else fresh
    accepted = accepted.masked_fill(new, 0).clamp(min=1)
    state[slots[live & new, 0].long()] = 0
    qkv = _heads_of(sizes, _convolved(_raw(sizes, q, k, v), conv_weight, window, slots[:, 0], accepted, live, new))
    row = heads * sizes.value_dim * sizes.key_dim
    if sizes.slots <= 1:  # the stride of a single slot may be anything
        state = state.as_strided(state.shape, (row, *state.stride()[1:]))
    scratch = state.new_empty(state.stride(0) + row)  # FLA's kernel can't skip padding
    out = _chain(
        sizes, qkv, f.contiguous(), beta.contiguous(), gate.contiguous(), torch.arange(0, (n + 1) * width, width, device=q.device),
        torch.where(live[:, None], slots.long(), _row_inside(scratch, state)), torch.where(live, accepted, 1),
        a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight, state=state, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    return torch.where(live.repeat_interleave(width)[:, None], out.flatten(1), 0)


def _chain(
    sizes: validate.KdaSizes, qkv: list[Tensor], f: Tensor, beta: Tensor, gate: Tensor, cu_seqlens: Tensor, rows: Tensor,
    accepted: Tensor, *, a_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, state: Tensor, lower_bound: float | None, norm_eps: float,
) -> Tensor:  # fmt: skip
    """FLA's own launches over q, k, v [1, T, H, D]: the recurrence on `rows` of the pool, and the norm; [T, H, V]."""
    q, k, v = qkv
    heads_of = (sizes.tokens, sizes.heads, sizes.value_dim)
    core, _ = fused_recurrent_kda_fwd(
        q=q,
        k=k,
        v=v,
        g=f.view(1, sizes.tokens, sizes.heads, -1),
        beta=beta.view(1, sizes.tokens, sizes.heads),
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=state,
        inplace_final_state=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=rows,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
        out=torch.empty_like(v),
    )
    return rms_norm_gated(core.view(heads_of), gate.view(heads_of), norm_weight, None, activation="sigmoid", eps=norm_eps)


def prepared(
    q: Tensor, k: Tensor, *, v: Tensor, f: Tensor, beta: Tensor, gate: Tensor, conv_weight: Tensor, state: Tensor, window: Tensor,
    slots: Tensor, accepted: Tensor, **given: Any,
) -> Callable[[], Tensor]:  # fmt: skip
    """FLA's recurrence and norm alone, for timing: the convolution done and inputs contiguous beforehand. No padding."""
    sizes = validate_verify.kda_snapshots(
        q, k, v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, state=state, window=window, slots=slots, accepted=accepted,
        fresh=None, **given,
    )  # fmt: skip
    every, width = torch.ones_like(accepted, dtype=torch.bool), 1 + sizes.drafts
    conv = _convolved(_raw(sizes, q, k, v), conv_weight, window.clone(), slots[:, 0], accepted, every, ~every)
    ends = torch.arange(0, sizes.tokens + width, width, device=q.device)
    f, beta, gate = (x.contiguous() for x in (f, beta, gate))
    return functools.partial(_chain, sizes, _heads_of(sizes, conv), f, beta, gate, ends, slots.long(), accepted, state=state, **given)


def _raw(sizes: validate.KdaSizes, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k and v side by side, [N, 1+S, channels]."""
    return torch.cat([q, k, v], dim=1).view(sizes.sequences, 1 + sizes.drafts, -1)


def _heads_of(sizes: validate.KdaSizes, conv: Tensor) -> list[Tensor]:
    """q, k and v [1, T, H, D] out of [N, 1+S, channels], contiguous."""
    key = sizes.heads * sizes.key_dim
    parts = conv.flatten(0, 1).split([key, key, sizes.heads * sizes.value_dim], dim=1)
    return [part.reshape(1, sizes.tokens, sizes.heads, -1).contiguous() for part in parts]


def _convolved(raw: Tensor, weight: Tensor, window: Tensor, slots: Tensor, accepted: Tensor, live: Tensor, fresh: Tensor) -> Tensor:
    """SiLU of the convolution of raw [N, 1+S, channels] after each sequence's live taps; `window` is updated in place."""
    index, taps = torch.where(live, slots, 0).long(), torch.arange(3, device=raw.device)
    carried = window[index[:, None], (torch.where(live, accepted, 1) - 1)[:, None] + taps]
    carried = torch.where((live & ~fresh)[:, None, None], carried, 0)
    inputs = torch.cat([carried, raw], dim=1)
    window[index[live]] = inputs[live, 1:]
    return F.silu((inputs.unfold(1, 4, 1).float() * weight.float()).sum(-1)).to(raw.dtype)
