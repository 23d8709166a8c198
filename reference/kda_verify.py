"""KDA under speculative decoding: 1+S tokens of each sequence, of which the sampler accepts a prefix afterwards.

Contract B, `verify` and `commit`: the pools hold the state after the last golden token, the drafts after it wait in replay
caches, and the next call replays those that were accepted. Contract A, `verify_snapshots`: a state for each token, one of
which the next call starts from. Source: spec of the model, section 5 (TensorRT-LLM; vLLM, flashinfer).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference import kda, kda_offsets, validate, validate_verify
from reference.kda_replay import Replay
from reference.points import At, exact
from reference.precision import full_precision

Advance = Callable[..., tuple[Tensor, Tensor, Tensor]]


@full_precision
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
    at: At = exact,
) -> Tensor:
    """The golden token and S drafts of each sequence, as `kda.decode` would one by one after the accepted drafts of the last call.

    For each sequence: replay the first accepted - 1 drafts in its caches; process the golden token, and store state and
    window; process the drafts, storing nothing but their raw inputs, in the caches. Rejected drafts leave no trace.

    q, k [N*(1+S), H*K], v, f, beta, gate: as in `kda.decode`, with the 1+S tokens of a sequence in adjacent rows. Weights and
    pools as there. replay: of the pools' slots, updated in place; its S is the call's. accepted int32 [N]: tokens that were
    accepted of the last verify, 1..1+S with its golden token, 0 before the first; what it left pending is accepted - 1.
    offsets: a forward's shared `kda_offsets.offsets(accepted, S)`, or None to take them from accepted here; the tokens of
    sequence n begin at row cu_seqlens[n] + pending[n]. fresh bool [N]: start from zero, with nothing pending, whatever slot
    and accepted hold. A slot outside the pool is padding: nothing read, nothing written, zeros returned.
    Returns [N*(1+S), H*V] in the dtype of q. ValueError or TypeError before anything is touched. Afterwards the pools are not
    to be decoded from, copied or exported before `commit`.
    """
    weights: dict[str, Any] = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate_verify.kda_verify(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, replay=replay, slots=slots, accepted=accepted,
        offsets=offsets, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    pending, cu_seqlens = checked_offsets(sizes, slots, accepted, offsets, fresh)

    live, row_state, row_window = kda.load_rows(state, window, slots, fresh, kda.compute_dtype(q, state))
    rows, first = slots[live].long(), (cu_seqlens[:-1] + pending)[live].long()
    pending = (pending if fresh is None else pending.masked_fill(fresh, 0))[live]
    dtype = row_state.dtype
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    advance: Advance = partial(kda.step, **weights, lower_bound=lower_bound, norm_eps=norm_eps, at=at)
    row_state, row_window = _replayed(replay, rows, pending, row_state, row_window, advance)

    out = q.new_zeros(sizes.tokens, sizes.heads * sizes.value_dim)
    raw = torch.cat([q, k, v], dim=-1)
    for i in range(1 + sizes.drafts):
        token = first + i
        y, row_state, row_window = advance(*(x[token].to(dtype) for x in (raw, f, beta, gate)), row_state, row_window)
        out[token] = y.to(out.dtype)
        if i == 0:
            kda.store_rows(state, window, slots[live], row_state, row_window)
        else:
            replay.qkv[rows, i - 1], replay.f[rows, i - 1], replay.beta[rows, i - 1] = raw[token], f[token], beta[token]
    return out


@full_precision
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
    at: At = exact,
) -> None:
    """Flush the pending drafts of `slots` into the pools, so that plain decode, a copy or an export may follow.

    state and window are updated in place where accepted is 2 or more, and stay bitwise as they are elsewhere. Arguments as in
    `verify`, for one layer. accepted is the layers' in common and isn't touched: when every layer has committed, the caller
    sets the counts to 0 (`VerifyOffsets.clear`), or the next verify would replay the drafts a second time.
    """
    weights: dict[str, Any] = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias)
    sizes = validate_verify.kda_commit(state, window, replay=replay, **weights, slots=slots, accepted=accepted, lower_bound=lower_bound)
    pending, _ = checked_offsets(sizes, slots, accepted)
    slots = torch.where(pending > 0, slots, -1)
    live, row_state, row_window = kda.load_rows(state, window, slots, None, kda.compute_dtype(window, state))
    weights = {name: weight.to(row_state.dtype) for name, weight in weights.items()}
    weights["norm_weight"] = row_state.new_ones(sizes.value_dim)
    advance: Advance = partial(kda.step, **weights, lower_bound=lower_bound, norm_eps=1.0, at=at)
    rows = slots[live].long()
    kda.store_rows(state, window, rows, *_replayed(replay, rows, pending[live], row_state, row_window, advance))


def checked_offsets(
    sizes: validate.KdaSizes, slots: Tensor, accepted: Tensor, given: kda_offsets.Offsets | None = None, fresh: Tensor | None = None
) -> kda_offsets.Offsets:
    """The offsets that were given, or those of `accepted`; the values of all four are checked."""
    validate.values(slots, sizes.slots)
    validate_verify.accepted(accepted, slots, sizes.slots, sizes.drafts, fresh)
    own = kda_offsets.offsets(accepted, sizes.drafts)
    if given is not None:
        validate_verify.shared_offsets(given, own, slots, sizes.slots)
    return own if given is None else given


def _replayed(replay: Replay, rows: Tensor, pending: Tensor, state: Tensor, window: Tensor, advance: Advance) -> tuple[Tensor, Tensor]:
    """Rows of state and window after the first `pending` drafts in the caches at `rows`; the tokens' outputs are nobody's."""
    for i in range(int(pending.max()) if len(pending) else 0):
        active = pending > i
        raw, f, beta = (x[rows[active], i].to(state.dtype) for x in (replay.qkv, replay.f, replay.beta))
        gate = state.new_zeros(len(raw), state.shape[1] * state.shape[2])
        _, state[active], window[active] = advance(raw, f, beta, gate, state[active], window[active])
    return state, window


@full_precision
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
    at: At = exact,
) -> Tensor:
    """`verify` under contract A: every token's state is stored, and the next call starts from that of the last accepted token.

    slots int32 [N, 1+S]: the state after token i of sequence n goes to slots[n, i]; the call starts from slots[n, accepted - 1],
    from slots[n, 0] where accepted is 0. window [slots, 3+S, 2*H*K + H*V] at slots[n, 0]: starts from its rows accepted - 1
    to accepted + 1, and then holds the last two of these and the 1+S new inputs. A sequence whose first slot lies outside the
    pool is padding. Everything else as in `verify`.
    """
    weights: dict[str, Any] = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate_verify.kda_snapshots(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, slots=slots, accepted=accepted, fresh=fresh,
        lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate_verify.snapshots(slots, sizes.slots)
    validate_verify.accepted(accepted, slots[:, 0], sizes.slots, sizes.drafts, fresh)

    live = (slots[:, 0] >= 0) & (slots[:, 0] < sizes.slots)
    first = accepted if fresh is None else accepted.masked_fill(fresh, 0)
    first, rows = (first[live] - 1).clamp(min=0).long(), slots[live].long()
    every, taps = torch.arange(len(rows), device=q.device), torch.arange(3, device=q.device)
    dtype = kda.compute_dtype(q, state)
    row_state = state[rows[every, first]].to(dtype)
    row_window = window[rows[:, :1], first[:, None] + taps]
    if fresh is not None:
        row_state[fresh[live]], row_window[fresh[live]] = 0, 0

    token = torch.arange(sizes.tokens, device=q.device).view(sizes.sequences, 1 + sizes.drafts)[live]
    raw = torch.cat([q, k, v], dim=-1)
    window[rows[:, 0]] = torch.cat([row_window[:, 1:], raw[token]], dim=1)
    out, row_window = q.new_zeros(sizes.tokens, sizes.heads * sizes.value_dim), row_window.to(dtype)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    advance: Advance = partial(kda.step, **weights, lower_bound=lower_bound, norm_eps=norm_eps, at=at)
    for i in range(1 + sizes.drafts):
        y, row_state, row_window = advance(*(x[token[:, i]].to(dtype) for x in (raw, f, beta, gate)), row_state, row_window)
        out[token[:, i]] = y.to(out.dtype)
        state[rows[:, i]] = row_state.to(state.dtype)
    return out
