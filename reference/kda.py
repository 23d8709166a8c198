"""Kimi Delta Attention, the cell: everything between the input projections and the output projection.

Computes in the dtype of its inputs, at least FP32: inputs and pools in FP64 give the gold, with nothing rounded on the
way to the pools or the output. Source: spec of the model, section 4 (Kimi Linear; `fla.ops.kda`, transformers `glm5_next`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import validate
from reference.points import At, exact
from reference.precision import full_precision

L2_EPS = 1e-6  # added to the sum of squares, inside the root
MAX_A_LOG = 88.0  # exp(a_log) stays finite in FP32


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension; a zero row stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def log_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Natural-log decay g <= 0 of each key channel, [N, H, K].

    Bounded: g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)). Softplus: g = -exp(a_log) * softplus(f + dt_bias).
    f [N, H, K], a_log [H], dt_bias [H, K].
    """
    rate = a_log.clamp(max=MAX_A_LOG).exp()[:, None]
    x = f + dt_bias
    if lower_bound is None:
        return -rate * F.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


def step(
    qkv: Tensor,
    f: Tensor,
    beta: Tensor,
    gate: Tensor,
    state: Tensor,
    window: Tensor,
    *,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    lower_bound: float | None,
    norm_eps: float,
    at: At = exact,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of the cell for each of N sequences: `(out [N, H*V], state, window)`, nothing modified.

    qkv [N, 2*H*K + H*V] raw; f [N, H*K] raw gate; beta [N, H] logits; gate [N, H*V]; state [N, H, V, K]; window
    [N, 3, 2*H*K + H*V], oldest first. All in the dtype of the computation.
    """
    sequences, heads, value_dim, key_dim = state.shape
    width = heads * key_dim

    taps = torch.cat([window, qkv[:, None]], dim=1)  # [N, 4, channels]
    conv = at("conv", F.silu((taps * conv_weight.T).sum(1)))
    q, k, v = conv.split([width, width, heads * value_dim], dim=-1)
    q = at("q", l2norm(q.view(sequences, heads, key_dim)) * key_dim**-0.5)
    k = at("k", l2norm(k.view(sequences, heads, key_dim)))
    v = v.view(sequences, heads, value_dim)

    g = at("g", log_decay(f.view(sequences, heads, key_dim), a_log, dt_bias.view(heads, key_dim), lower_bound))
    decay = at("decay", g.exp())
    beta = at("beta", beta.sigmoid())

    state = state * decay[:, :, None, :]  # decay first, then read
    read = at("read", torch.einsum("nhvk,nhk->nhv", state, k))
    delta = at("delta", beta[..., None] * (v - read))
    state = at("state", state + delta[..., None] * k[:, :, None, :])
    core = at("core", torch.einsum("nhvk,nhk->nhv", state, q))  # from the updated state

    norm = at("norm", rms_norm(core, norm_weight, norm_eps))
    gate = at("gate", gate.view(sequences, heads, value_dim).sigmoid())
    out = at("out", norm * gate)
    return out.reshape(sequences, heads * value_dim), state, taps[:, 1:]


@full_precision
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
    at: At = exact,
) -> Tensor:
    """One token for each sequence: S <- diag(exp g) S; u = beta (v - k^T S); S <- S + k u^T; out = RMS(q^T S) sigmoid(gate).

    In order: SiLU of the depthwise convolution over the window and the new inputs; q and k divided by sqrt(sum of squares +
    1e-6), q times K^-0.5; g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)), or -exp(a_log) * softplus(f + dt_bias);
    beta = sigmoid; the recurrence; RMS norm over V with norm_eps and norm_weight, times sigmoid(gate). All of it is `step`.

    q, k [N, H*K], v [N, H*V]: raw projections, before convolution. f [N, H*K]: raw decay gate. beta [N, H]: logits.
    gate [N, H*V]: raw output gate. conv_weight [2*H*K + H*V, 4], newest token last; a_log [H], dt_bias [H*K] FP32;
    norm_weight [V]. lower_bound: of the bounded gate (negative), None for softplus.
    state [slots, H, V, K] and window [slots, 3, 2*H*K + H*V] (raw inputs, oldest first, sections q, k, v) are updated in
    place at `slots` int32 [N]. A slot outside the pool is padding: nothing read, nothing written, zeros returned.
    fresh bool [N]: start from zero whatever the slot holds.
    Returns [N, H*V] in the dtype of q. ValueError or TypeError before anything is touched.
    """
    weights = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate.kda_decode(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, slots=slots, fresh=fresh,
        lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.values(slots, sizes.slots)

    live, row_state, row_window = load_rows(state, window, slots, fresh, compute_dtype(q, state))
    out = q.new_zeros(sizes.sequences, sizes.heads * sizes.value_dim)
    qkv, f, beta, gate = (x[live].to(row_state.dtype) for x in (torch.cat([q, k, v], dim=-1), f, beta, gate))
    weights = {name: weight.to(row_state.dtype) for name, weight in weights.items()}
    y, row_state, row_window = step(qkv, f, beta, gate, row_state, row_window, **weights, lower_bound=lower_bound, norm_eps=norm_eps, at=at)
    out[live] = y.to(out.dtype)
    store_rows(state, window, slots[live], row_state, row_window)
    return out


@full_precision
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
    at: At = exact,
) -> Tensor:
    """`decode` token by token over sequences packed in `cu_seqlens` int32 [N+1]; returns [T, H*V].

    Arguments as in `decode`, with T tokens in the activations and N sequences in slots and fresh. An empty sequence keeps
    its state, or leaves zeros when it is fresh.
    """
    weights = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate.kda_prefill(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, cu_seqlens=cu_seqlens, slots=slots, fresh=fresh,
        lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.values(slots, sizes.slots)
    validate.offsets(cu_seqlens, sizes.tokens)

    live, row_state, row_window = load_rows(state, window, slots, fresh, compute_dtype(q, state))
    starts, ends = cu_seqlens[:-1][live].long(), cu_seqlens[1:][live].long()
    out = q.new_zeros(sizes.tokens, sizes.heads * sizes.value_dim)
    qkv, f, beta, gate = (x.to(row_state.dtype) for x in (torch.cat([q, k, v], dim=-1), f, beta, gate))
    weights = {name: weight.to(row_state.dtype) for name, weight in weights.items()}
    for offset in range(int((ends - starts).max()) if live.any() else 0):
        active = starts + offset < ends
        token = starts[active] + offset
        y, row_state[active], row_window[active] = step(
            qkv[token], f[token], beta[token], gate[token], row_state[active], row_window[active], **weights,
            lower_bound=lower_bound, norm_eps=norm_eps, at=at,
        )  # fmt: skip
        out[token] = y.to(out.dtype)
    store_rows(state, window, slots[live], row_state, row_window)
    return out


def compute_dtype(q: Tensor, state: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(q.dtype, state.dtype), torch.float32)


def load_rows(state: Tensor, window: Tensor, slots: Tensor, fresh: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Which sequences have a slot, and their rows of the pools; fresh ones by selection, since NaN * 0 is NaN."""
    live = (slots >= 0) & (slots < state.shape[0])
    row_state, row_window = state[slots[live]].to(dtype), window[slots[live]].to(dtype)
    if fresh is not None:
        row_state[fresh[live]] = 0
        row_window[fresh[live]] = 0
    return live, row_state, row_window


def store_rows(state: Tensor, window: Tensor, slots: Tensor, row_state: Tensor, row_window: Tensor) -> None:
    state[slots] = row_state.to(state.dtype)
    window[slots] = row_window.to(window.dtype)
