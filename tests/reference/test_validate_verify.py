"""The input contract of verify and commit, on the reference and on every implementation: what is refused touches nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity.buffers import same_bits
from reference import kda_verify
from reference.kda_replay import Replay
from tests.reference.test_kda import cell, int32

CACHES = ("qkv", "f", "beta")
COMMIT = ("state", "window", "replay", "conv_weight", "a_log", "dt_bias", "slots", "accepted", "lower_bound")
Change = Callable[[Any], Any]

interpreted = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")
every = pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreted), "torch"])


def module(name: str) -> Any:
    if name == "torch":
        from optimized.peers import eager_verify

        return eager_verify
    if name == "triton":
        from optimized import kda_verify as optimized

        return optimized
    return kda_verify


def arguments() -> dict[str, Any]:
    """Two sequences with two drafts each."""
    given = cell(6, 4, torch.float32)
    replay = Replay.empty(given["state"], given["window"], 2)
    for name in CACHES:
        getattr(replay, name).fill_(1)
    return given | dict(replay=replay, slots=int32(3, 1), accepted=int32(2, 0), offsets=(int32(1, 0), int32(-1, 3, 6)), fresh=None)


def cache(name: str, change: Change) -> Change:
    return lambda replay: replace(replay, **{name: change(getattr(replay, name))})


BAD: list[tuple[str, str, type[Exception], str, Change]] = [
    ("q", "a row too many", ValueError, "q", lambda x: torch.cat([x, x[:1]])),
    ("replay", "none", TypeError, "replay", lambda x: None),
    ("replay", "a tuple", TypeError, "replay", lambda x: (x.qkv, x.f, x.beta)),
    ("replay", "no drafts", ValueError, "replay.qkv", cache("qkv", lambda x: x[:, :0])),
    ("replay", "two dimensions", ValueError, "replay.qkv", cache("qkv", lambda x: x[0])),
    ("replay", "a draft too few in f", ValueError, "replay.f", cache("f", lambda x: x[:, :1])),
    *(("replay", f"a slot too few in {n}", ValueError, f"replay.{n}", cache(n, lambda x: x[1:])) for n in CACHES),
    *(("replay", f"another dtype in {n}", TypeError, f"replay.{n}", cache(n, lambda x: x.bfloat16())) for n in CACHES),
    *(("replay", f"a list in {n}", (ValueError, TypeError), f"replay.{n}", cache(n, lambda x: x.tolist())) for n in CACHES),
    *(("replay", f"another device in {n}", ValueError, f"replay.{n}", cache(n, lambda x: x.to("meta"))) for n in CACHES),
    *(("replay", f"one slot expanded in {n}", ValueError, f"replay.{n}", cache(n, lambda x: x[:1].expand(4, -1, -1))) for n in CACHES),
    *(
        ("replay", f"elements apart in {n}", ValueError, f"replay.{n}", cache(n, lambda x: torch.stack([x, x], dim=-1)[..., 0]))
        for n in CACHES
    ),
    ("accepted", "64 bits", TypeError, "accepted", lambda x: x.long()),
    ("accepted", "one too few", ValueError, "accepted", lambda x: x[:1]),
    ("accepted", "elements apart", ValueError, "accepted", lambda x: torch.stack([x, x], dim=-1)[..., 0]),
    ("accepted", "more than 1+S", ValueError, "accepted", lambda x: int32(4, 0)),
    ("accepted", "negative", ValueError, "accepted", lambda x: int32(2, -1)),
    ("slots", "a slot twice", ValueError, "slots", lambda x: int32(1, 1)),
    ("slots", "one too few", ValueError, "q", lambda x: x[:1]),
    ("offsets", "a list", TypeError, "offsets", list),
    ("offsets", "three", TypeError, "offsets", lambda x: (*x, x[0])),
    ("offsets", "64 bits", TypeError, "pending", lambda x: (x[0].long(), x[1])),
    ("offsets", "one offset too few", ValueError, "cu_seqlens", lambda x: (x[0], x[1][1:])),
    ("offsets", "pending drafts of another step", ValueError, "offsets: pending", lambda x: (int32(0, 0), x[1])),
    ("offsets", "rows that aren't shifted", ValueError, "offsets: cu_seqlens", lambda x: (x[0], int32(0, 3, 6))),
    ("fresh", "a flag too few", ValueError, "fresh", lambda x: torch.tensor([True])),
    ("window", "an overlap", ValueError, "window", lambda x: x[:1].expand(4, -1, -1)),
    ("lower_bound", "positive", ValueError, "lower_bound", lambda x: 5.0),
]


def refused(call: Callable[[], object], given: dict[str, Any], kind: type[Exception]) -> str:
    """The message; pools and caches stay as they are."""
    before = {n: given[n].clone() for n in ("state", "window")} | {n: getattr(given["replay"], n).clone() for n in CACHES}
    with pytest.raises(kind) as raised:
        call()
    after = {n: given[n] for n in ("state", "window")} | {n: getattr(given["replay"], n) for n in CACHES}
    assert [n for n, x in before.items() if not same_bits(x, after[n])] == []
    return str(raised.value)


@every
@pytest.mark.parametrize(("argument", "what", "kind", "named", "change"), BAD, ids=[f"{case[0]}-{case[1]}" for case in BAD])
def test_what_verify_refuses_is_named_and_touches_nothing(
    name: str, argument: str, what: str, kind: type[Exception], named: str, change: Change
) -> None:
    given = arguments()
    message = refused(lambda: module(name).verify(**{**given, argument: change(given[argument])}), given, kind)
    assert message.startswith(f"{named}: expected ") and ", got " in message and "; " in message


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize(
    ("argument", "what", "kind", "named", "change"),
    [case for case in BAD if case[0] in COMMIT and case[3] != "q" and "another dtype" not in case[1]],
    ids=lambda x: str(x) if isinstance(x, str) else "",
)
def test_what_commit_refuses_is_named_and_touches_nothing(
    name: str, argument: str, what: str, kind: type[Exception], named: str, change: Change
) -> None:
    given = arguments()
    changed = {n: given[n] for n in COMMIT} | {argument: change(given[argument])}
    message = refused(lambda: module(name).commit(changed.pop("state"), changed.pop("window"), **changed), given, kind)
    assert message.startswith(f"{named}: expected ") and ", got " in message and "; " in message


@every
def test_padding_and_fresh_sequences_may_have_any_count(name: str) -> None:
    given = arguments() | dict(slots=int32(-1, 1), accepted=int32(-5, 77), offsets=None, fresh=torch.tensor([False, True]))
    assert module(name).verify(**given).isfinite().all()


@pytest.mark.parametrize(
    ("argument", "kind", "change"),
    [
        ("slots", TypeError, lambda x: x[:, 0]),
        ("slots", TypeError, lambda x: x[:, :1]),
        ("slots", ValueError, lambda x: torch.where(x == 2, 1, x)),
        ("slots", ValueError, lambda x: torch.where(x == 2, -1, x)),
        ("window", ValueError, lambda x: x[:, :3]),
        ("accepted", ValueError, lambda x: int32(4, 0)),
        ("accepted", TypeError, lambda x: x.long()),
        ("q", ValueError, lambda x: torch.cat([x, x[:1]])),
    ],
)
def test_what_snapshots_refuse_is_named(argument: str, kind: type[Exception], change: Change) -> None:
    given = cell(6, 6, torch.float32)
    taken: Tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    given |= dict(window=given["window"].repeat(1, 2, 1)[:, :5].clone(), slots=taken, accepted=int32(2, 0))
    before = given["state"].clone()
    with pytest.raises(kind, match=rf"^{argument}: expected .*, got .*; "):
        kda_verify.verify_snapshots(**{**given, argument: change(given[argument])})
    assert same_bits(given["state"], before)
