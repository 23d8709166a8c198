"""The eager baseline of `kda.verify` and `kda.commit`: `eager.decode` token by token over FP32 copies of the rows.

Rounds where `eager.decode` does: the convolution's output and the core.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.peers import eager
from reference import kda_offsets, validate, validate_verify
from reference.kda_replay import Replay
from reference.kda_verify import checked_offsets


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
    offsets: kda_offsets.Offsets | None = None,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda_verify.verify` in eager torch; arguments, pools, caches, errors and return value as there."""
    weights = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate_verify.kda_verify(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, replay=replay, slots=slots, accepted=accepted,
        offsets=offsets, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        checked_offsets(sizes, slots, accepted, offsets, fresh)
    pending, cu_seqlens = kda_offsets.offsets(accepted, sizes.drafts) if offsets is None else offsets
    out = q.new_zeros(sizes.tokens, sizes.heads * sizes.value_dim)
    if out.numel() == 0 or sizes.slots == 0:
        return out

    live = (slots >= 0) & (slots < sizes.slots)
    every = torch.arange(sizes.sequences, dtype=torch.int32, device=q.device)
    own = torch.where(live, every, -1)  # slots of the copies
    index, rows = slots[live].long(), torch.where(live, slots, 0).long()
    first = torch.where(live, cu_seqlens[:-1] + pending, every * (1 + sizes.drafts)).long()
    if fresh is not None:
        pending = pending.masked_fill(fresh, 0)
    copies: dict[str, Any] = dict(state=state[rows].float(), window=window[rows])
    arguments: dict[str, Any] = dict(**weights, lower_bound=lower_bound, norm_eps=norm_eps)
    _replayed(replay, rows, pending, own, copies, arguments)

    for i in range(1 + sizes.drafts):
        token = first + i
        new_q, new_k, new_v, new_f, new_beta, new_gate = (x[token] for x in (q, k, v, f, beta, gate))
        out[token] = eager.decode(
            new_q, new_k, v=new_v, f=new_f, beta=new_beta, gate=new_gate, **arguments, **copies, slots=own,
            fresh=fresh if i == 0 else None,
        )  # fmt: skip
        if i == 0:
            state[index], window[index] = copies["state"][live].to(state.dtype), copies["window"][live]
        else:
            replay.qkv[index, i - 1] = torch.cat([new_q, new_k, new_v], dim=1)[live]
            replay.f[index, i - 1], replay.beta[index, i - 1] = new_f[live], new_beta[live]
    return out


def _replayed(replay: Replay, rows: Tensor, pending: Tensor, own: Tensor, copies: dict[str, Any], arguments: dict[str, Any]) -> None:
    """The first `pending` drafts in the caches at `rows` through `copies` of the pools, at the slots `own`; -1 is nobody."""
    heads, value_dim, key_dim = copies["state"].shape[1:]
    for i in range(replay.drafts):
        q, k, v = replay.qkv[rows, i].split([heads * key_dim, heads * key_dim, heads * value_dim], dim=1)
        eager.decode(
            q, k, v=v, f=replay.f[rows, i], beta=replay.beta[rows, i], gate=torch.zeros_like(v), **arguments, **copies,
            slots=torch.where(pending > i, own, -1),
        )  # fmt: skip


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
    """`reference.kda_verify.commit` in eager torch; arguments, pools and errors as there."""
    arguments: dict[str, Any] = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound)
    sizes = validate_verify.kda_commit(state, window, replay=replay, slots=slots, accepted=accepted, **arguments)
    validate.kernel_dtypes(window.dtype, state.dtype, "window")
    if state.device.type == "cpu":
        checked_offsets(sizes, slots, accepted)
    live = (slots >= 0) & (slots < sizes.slots) & (accepted > 1)
    rows, pending = slots[live].long(), accepted[live] - 1
    if len(rows) == 0:
        return
    copies: dict[str, Any] = dict(state=state[rows].float(), window=window[rows])
    own = torch.arange(len(rows), dtype=torch.int32, device=state.device)
    norm_weight = window.new_ones(sizes.value_dim)  # of outputs that are nobody's
    _replayed(replay, rows, pending, own, copies, {**arguments, "norm_weight": norm_weight, "norm_eps": 1.0})
    state[rows], window[rows] = copies["state"].to(state.dtype), copies["window"]
