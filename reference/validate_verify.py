"""The input contract of `kda.verify`, `kda.commit` and their offsets, beside `validate`'s of the cell."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reference.kda_replay import Replay
from reference.validate import (
    FLOATS,
    KdaSizes,
    _contiguous,
    _dimensions,
    _fail,
    _fresh,
    _kda_cell,
    _last_contiguous,
    _overlaps,
    _pools_and_weights,
    _tensor,
    values,
)  # fmt: skip


def kda_verify(
    q: Tensor,
    k: Tensor,
    *,
    replay: Replay,
    accepted: Tensor,
    offsets: tuple[Tensor, Tensor] | None,
    fresh: Tensor | None,
    f: Tensor,
    beta: Tensor,
    **arguments: Any,
) -> KdaSizes:
    """Structure of `kda.verify`: 1+S tokens for each sequence, S from the replay caches."""
    sizes = _kda_cell(q, k, f=f, beta=beta, **arguments)
    sizes = _replay(replay, sizes, q.dtype, f.dtype, beta.dtype, q.device)
    rows = sizes.sequences * (1 + sizes.drafts)
    if sizes.tokens != rows:
        hint = "a batch can't mix drafted and undrafted requests: verify and decode them in calls of their own"
        _fail("q", f"{rows} rows, 1+{sizes.drafts} for each of {sizes.sequences} slots", sizes.tokens, hint)
    _tensor("accepted", accepted, (sizes.sequences,), (torch.int32,), q.device)
    _contiguous(accepted=accepted)
    if offsets is not None:
        if not isinstance(offsets, tuple) or len(offsets) != 2:
            _fail("offsets", "the tuple (pending, cu_seqlens)", type(offsets).__name__, "pass what kda_offsets.offsets returned", TypeError)
        for name, x, size in zip(("pending", "cu_seqlens"), offsets, (sizes.sequences, sizes.sequences + 1), strict=True):
            _tensor(name, x, (size,), (torch.int32,), q.device)
            _contiguous(**{name: x})
    _fresh(fresh, sizes, q.device)
    return sizes


def kda_commit(
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
) -> KdaSizes:
    """Structure of `kda.commit`: the pools, the caches and the weights of the recurrence."""
    _dimensions(state, slots)
    slot_count, heads, value_dim, key_dim = state.shape
    for name, size in (("H", heads), ("V", value_dim), ("K", key_dim)):
        if size == 0:
            _fail("state", "a pool [slots, H, V, K] with heads, values and keys", f"{name} = 0", "pass the layer's own pool")
    if not isinstance(window, Tensor):
        _fail("window", "a tensor", type(window).__name__, "pass a torch.Tensor", TypeError)
    sizes = KdaSizes(0, slots.shape[0], heads, key_dim, value_dim, slot_count)
    if window.dtype not in FLOATS:
        _fail("window", "a floating dtype", window.dtype, "the window holds raw inputs in the activation dtype", TypeError)
    _pools_and_weights(sizes, window.dtype, state.device, conv_weight, a_log, dt_bias, state, window, slots, lower_bound)
    sizes = _replay(replay, sizes, window.dtype, None, None, state.device)
    _tensor("accepted", accepted, (sizes.sequences,), (torch.int32,), state.device)
    _contiguous(accepted=accepted)
    return sizes


def verify_offsets(accepted: Tensor, drafts: int) -> int:
    """Structure of `kda.verify_offsets`; the count of requests."""
    requests = len(accepted) if isinstance(accepted, Tensor) and accepted.ndim == 1 else 0
    _tensor("accepted", accepted, (requests,), (torch.int32,), accepted.device if isinstance(accepted, Tensor) else None)
    _contiguous(accepted=accepted)
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0:
        _fail("drafts", "a count of drafts", drafts, "pass the S of the replay caches")
    return requests


def _replay(
    replay: Replay, sizes: KdaSizes, qkv: torch.dtype, f: torch.dtype | None, beta: torch.dtype | None, device: torch.device
) -> KdaSizes:
    """Structure of the replay caches; the sizes, with the drafts."""
    if not isinstance(replay, Replay):
        _fail("replay", "a kda_replay.Replay", type(replay).__name__, "allocate one with Replay.empty(state, window, S)", TypeError)
    drafts = replay.qkv.shape[1] if isinstance(replay.qkv, Tensor) and replay.qkv.ndim == 3 else 0
    if drafts == 0:
        got = list(replay.qkv.shape) if isinstance(replay.qkv, Tensor) else type(replay.qkv).__name__
        _fail("replay.qkv", "a cache [slots, S, 2*H*K + H*V] with S >= 1", got, "without drafts, decode")
    key = sizes.heads * sizes.key_dim
    for name, x, width, dtype in (
        ("qkv", replay.qkv, sizes.channels, qkv), ("f", replay.f, key, f), ("beta", replay.beta, sizes.heads, beta)
    ):  # fmt: skip
        _tensor(f"replay.{name}", x, (sizes.slots, drafts, width), FLOATS if dtype is None else (dtype,), device)
        _last_contiguous(f"replay.{name}", x)
        if _overlaps(x):
            _fail(f"replay.{name}", "distinct elements", f"strides {x.stride()}", "an overlapping tensor can't hold a cache")
    return replace(sizes, drafts=drafts)


def accepted(counts: Tensor, slots: Tensor, slot_count: int, drafts: int, fresh: Tensor | None = None) -> None:
    """Accepted tokens lie in 0..1+S where something is replayed: not for padding, nor for fresh. Synchronises the device."""
    live = (slots >= 0) & (slots < slot_count)
    if fresh is not None:
        live = live & ~fresh
    wrong = counts[live & ((counts < 0) | (counts > 1 + drafts))].tolist()
    if wrong:
        _fail("accepted", f"counts in 0..{1 + drafts}, the golden token included", wrong, "pass the counts of the last verify")


def shared_offsets(offsets: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], slots: Tensor, slot_count: int) -> None:
    """A forward's offsets are those of this step's accepted counts, except for padding. Synchronises the device."""
    live = (slots >= 0) & (slots < slot_count)
    live = torch.cat([live, live.new_ones(1)])
    for name, x, expected in zip(("pending", "cu_seqlens"), offsets, own, strict=True):
        if not torch.equal(x[live[: len(x)]], expected[live[: len(x)]]):
            _fail(f"offsets: {name}", str(expected.tolist()), x.tolist(), "compute them anew in each step, from its accepted counts")


def generation_rows(rows: int, requests: int, drafts: int) -> None:
    """The rows of a generation batch: one for each request, or 1+S for each."""
    if rows not in (requests, requests * (1 + drafts)):
        hint = "a batch can't mix drafted and undrafted requests"
        _fail("rows", f"{requests} or {requests * (1 + drafts)}, 1 or 1+{drafts} for each of {requests} requests", rows, hint)


def no_pending(accepted: Tensor) -> None:
    """No draft is pending, so that plain decode, export or a copy may follow. Synchronises the device."""
    if bool((accepted > 1).any()):
        hint = "call kda_verify.commit in every layer, then clear the counts"
        _fail("accepted", "no pending drafts, counts of 0 or 1", accepted.tolist(), hint)


def kda_snapshots(
    q: Tensor, k: Tensor, *, window: Tensor, slots: Tensor, accepted: Tensor, fresh: Tensor | None, **arguments: Any
) -> KdaSizes:
    """Structure of `kda_verify.verify_snapshots`: slots [N, 1+S], a window of 3+S taps."""
    if not isinstance(slots, Tensor) or slots.ndim != 2 or slots.shape[1] < 2:
        got = list(slots.shape) if isinstance(slots, Tensor) else type(slots).__name__
        _fail("slots", "an int32 tensor [N, 1+S] with S >= 1", got, "one slot for each token's state", TypeError)
    sequences, width = slots.shape
    if not isinstance(window, Tensor) or window.ndim != 3 or window.shape[1] != 2 + width:
        got = list(window.shape) if isinstance(window, Tensor) else type(window).__name__
        _fail("window", f"a pool [slots, 3+{width - 1}, 2*H*K + H*V]", got, "three taps and one for each draft")
    sizes = replace(_kda_cell(q, k, window=window[:, :3], slots=slots[:, 0].contiguous(), **arguments), drafts=width - 1)
    if _overlaps(window):
        _fail("window", "distinct elements", f"strides {window.stride()}", "an expanded or overlapping tensor can't be updated in place")
    if sizes.tokens != sequences * width:
        _fail(
            "q", f"{sequences * width} rows, 1+{width - 1} for each of {sequences} sequences", sizes.tokens, "every sequence has 1+S tokens"
        )
    _tensor("accepted", accepted, (sequences,), (torch.int32,), q.device)
    _contiguous(slots=slots, accepted=accepted)
    _fresh(fresh, sizes, q.device)
    return sizes


def snapshots(slots: Tensor, slot_count: int) -> None:
    """All slots of a sequence lie in the pool, or the first doesn't; they are distinct. Synchronises the device."""
    live = slots[(slots[:, 0] >= 0) & (slots[:, 0] < slot_count)]
    if bool(((live < 0) | (live >= slot_count)).any()):
        _fail(
            "slots",
            f"slots in 0..{slot_count - 1} beside a first one that is",
            live.tolist(),
            "padding is a row whose first slot is outside",
        )
    values(live.flatten(), slot_count)
