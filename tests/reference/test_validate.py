"""The input contract, on every implementation of `kda.decode`: what is refused touches nothing, legal layouts give equal bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter, registry
from parity.buffers import same_bits
from reference import kda, validate

ACTIVATIONS = ("q", "k", "v", "f", "beta", "gate")
WEIGHTS = ("conv_weight", "a_log", "dt_bias", "norm_weight")
POOLS = ("state", "window")
HEADS, KEY_DIM, VALUE_DIM, TOKENS, SLOTS = 2, 8, 4, 2, 4
QK, HV = HEADS * KEY_DIM, HEADS * VALUE_DIM
CHANNELS = 2 * QK + HV

Arguments = dict[str, Any]
Change = Callable[[Tensor], object]

interpreted = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")
OPTIMIZED = [
    pytest.param("triton", marks=interpreted),
    pytest.param("torch"),
]
every = pytest.mark.parametrize("name", [pytest.param("reference"), *OPTIMIZED])


def implementation(name: str) -> Callable[..., Tensor]:
    return kda.decode if name == "reference" else registry.find("kda.decode", name).load()


def arguments() -> Arguments:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    widths = dict(q=QK, k=QK, v=HV, f=QK, beta=HEADS, gate=HV)
    return {name: normal(TOKENS, width) for name, width in widths.items()} | dict(
        conv_weight=normal(CHANNELS, 4),
        a_log=normal(HEADS, dtype=torch.float32),
        dt_bias=normal(QK, dtype=torch.float32),
        norm_weight=normal(VALUE_DIM),
        state=normal(SLOTS, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float32),
        window=normal(SLOTS, 3, CHANNELS),
        slots=torch.tensor([3, 1], dtype=torch.int32),
        fresh=torch.tensor([False, True]),
        lower_bound=-5.0,
        norm_eps=1e-5,
    )


def every_other(x: Tensor) -> Tensor:
    """The same values, two elements apart in the last dimension."""
    return torch.stack([x, x], dim=-1)[..., 0]


def swapped_rows(x: Tensor) -> Tensor:
    """A pool with V innermost: the shape is right, the rows are not."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


BAD: list[tuple[str, str, type[Exception], str, Change]] = [
    *((name, "a row too many", ValueError, name, lambda x: torch.cat([x, x[:1]])) for name in ("q", "k", "v", "f", "gate", *WEIGHTS)),
    *((name, "a channel too many", ValueError, name, lambda x: torch.cat([x, x[..., :1]], dim=-1)) for name in (*ACTIVATIONS[:4], *POOLS)),
    *((name, "a list", TypeError, name, lambda x: x.tolist()) for name in (*ACTIVATIONS, *WEIGHTS, *POOLS, "slots", "fresh")),
    *((name, "integers", TypeError, name, lambda x: x.to(torch.int32)) for name in (*ACTIVATIONS, *WEIGHTS, *POOLS, "fresh")),
    *((name, "another float than q", TypeError, name, lambda x: x.half()) for name in ("k", "v", "window")),
    *((name, "a half", TypeError, name, lambda x: x.half()) for name in ("a_log", "dt_bias")),
    *(
        (name, "another device", ValueError, name, lambda x: x.to("meta"))
        for name in (*ACTIVATIONS[:4], "gate", *WEIGHTS, *POOLS, "slots", "fresh")
    ),
    *((name, "elements apart", ValueError, name, every_other) for name in (*ACTIVATIONS, *WEIGHTS, "state", "slots", "fresh")),
    ("beta", "one dimension", TypeError, "beta", lambda x: x[0]),
    ("beta", "no heads", ValueError, "q", lambda x: x[:, :0]),
    ("beta", "heads that don't divide q", ValueError, "q", lambda x: x.repeat(1, 3)[:, :3]),
    ("q", "three dimensions", TypeError, "q", lambda x: x[None]),
    ("state", "V innermost", ValueError, "state", swapped_rows),
    ("state", "three dimensions", TypeError, "state", lambda x: x[0]),
    ("state", "slots that share rows", ValueError, "state", lambda x: x[:1].expand(SLOTS, -1, -1, -1)),
    ("window", "expanded slots", ValueError, "window", lambda x: x[:1].expand(SLOTS, -1, -1)),
    ("window", "expanded taps", ValueError, "window", lambda x: x[:, :1].expand(-1, 3, -1)),
    ("window", "four taps", ValueError, "window", lambda x: torch.cat([x, x[:, :1]], dim=1)),
    ("slots", "64 bits", TypeError, "slots", lambda x: x.long()),
    ("slots", "a slot twice", ValueError, "slots", lambda x: torch.full_like(x, 2)),
    ("fresh", "a flag too few", ValueError, "fresh", lambda x: x[:1]),
    ("lower_bound", "positive", ValueError, "lower_bound", lambda x: 5.0),
    ("lower_bound", "zero", ValueError, "lower_bound", lambda x: 0.0),
    ("lower_bound", "not a number", ValueError, "lower_bound", lambda x: float("nan")),
    ("lower_bound", "a string", ValueError, "lower_bound", lambda x: "-5"),
    ("norm_eps", "zero", ValueError, "norm_eps", lambda x: 0.0),
    ("norm_eps", "an integer", ValueError, "norm_eps", lambda x: 1),
]


def refused(name: str, given: Arguments, pools: Arguments, kind: type[Exception]) -> str:
    """The message with which an implementation refuses; pools and inputs stay as they are, byte by byte."""
    before = {key: x.clone() for key, x in pools.items() if isinstance(x, Tensor)}
    q, k = given.pop("q"), given.pop("k")
    with pytest.raises(kind) as raised:
        implementation(name)(q, k, **given)
    assert type(raised.value) is kind
    assert [key for key, x in before.items() if not same_bits(x, pools[key])] == []
    return str(raised.value)


@every
@pytest.mark.parametrize(("argument", "what", "kind", "named", "change"), BAD, ids=[f"{case[0]}-{case[1]}" for case in BAD])
def test_what_is_refused_is_named_and_touches_nothing(
    name: str, argument: str, what: str, kind: type[Exception], named: str, change: Change
) -> None:
    given = arguments()
    message = refused(name, {**given, argument: change(given[argument])}, given, kind)
    head, expected, got = message.partition(": expected ")[0], message.partition(", got ")[0], message.partition(", got ")[2]
    assert head == named and len(expected) > len(f"{named}: expected ")
    value, semicolon, hint = got.rpartition("; ")
    assert value and semicolon and len(hint) > 10


@every
def test_decode_takes_one_token_for_each_slot(name: str) -> None:
    given = arguments() | {"fresh": None}
    message = refused(name, {**given, "slots": given["slots"][:1]}, given, ValueError)
    assert message.startswith("slots: expected one slot for each of 2 tokens, got 1; ")


@every
@pytest.mark.parametrize("argument", ["at_slot", "accepted"])
def test_an_unknown_keyword_is_refused_by_name(name: str, argument: str) -> None:
    given = arguments()
    assert f"unexpected keyword argument '{argument}'" in refused(name, {**given, argument: 1}, given, TypeError)


@every
def test_only_the_first_two_tensors_may_go_without_a_name(name: str) -> None:
    given = arguments()
    with pytest.raises(TypeError, match="positional argument"):
        implementation(name)(given["q"], given["k"], given["v"])


@pytest.mark.parametrize("name", OPTIMIZED)
@pytest.mark.parametrize(
    ("dtypes", "named"), [({"q": "float64", "k": "float64", "v": "float64", "window": "float64"}, "q"), ({"state": "float16"}, "state")]
)
def test_dtypes_of_the_reference_alone_are_refused_by_kernels(name: str, dtypes: dict[str, str], named: str) -> None:
    given = arguments()
    changed = {**given, **{key: given[key].to(getattr(torch, dtype)) for key, dtype in dtypes.items()}}
    assert refused(name, dict(changed), changed, TypeError).startswith(f"{named}: expected dtype ")


def wide_projection(given: Arguments) -> Arguments:
    """Every activation as columns of one projection, NaN between and after them."""
    parts = [torch.cat([given[name], torch.full((TOKENS, 3), torch.nan, dtype=torch.bfloat16)], dim=1) for name in ACTIVATIONS]
    columns = torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)
    return {name: column[:, :-3] for name, column in zip(ACTIVATIONS, columns, strict=True)}


def padded(pool: Tensor) -> Tensor:
    """The same pool with its slots five elements further apart."""
    row = pool[0].numel()
    base = torch.full((SLOTS, row + 5), torch.nan, dtype=pool.dtype)
    base[:, :row] = pool.flatten(1)
    return base[:, :row].unflatten(1, pool.shape[1:])


LAYOUTS: dict[str, Callable[[Arguments], Arguments]] = {
    "tap_innermost_window": lambda given: {"window": given["window"].transpose(1, 2).contiguous().transpose(1, 2)},
    "padded_slots": lambda given: {name: padded(given[name]) for name in POOLS},
    "columns_of_a_wide_projection": wide_projection,
    "channels_apart": lambda given: {"window": every_other(given["window"])},
}


@every
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_legal_layout_gives_the_bits_of_the_contiguous_one(name: str, layout: str) -> None:
    plain, given = arguments(), arguments()
    strange = LAYOUTS[layout](given)
    assert all(x.stride() != given[key].stride() for key, x in strange.items())
    given |= strange
    assert same_bits(implementation(name)(**given), implementation(name)(**plain))
    assert all(same_bits(given[key].contiguous(), plain[key]) for key in POOLS)
    assert not same_bits(plain["state"], arguments()["state"])


@pytest.mark.parametrize("ends", [[1, 2, 2], [0, 2, 1], [0, 1, 3], [0, 3, 2]])
def test_prefill_refuses_offsets_that_do_not_rise_from_zero_to_the_count_of_tokens(ends: list[int]) -> None:
    given = arguments()
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected offsets that rise from 0 to 2, got \[.*\]; "):
        kda.prefill(**given, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    assert same_bits(given["state"], arguments()["state"])


@pytest.mark.parametrize(("ends", "kind"), [([0, 2], ValueError), ([0.0, 1.0, 2.0], TypeError)])
def test_prefill_refuses_offsets_of_another_count_or_type(ends: list, kind: type[Exception]) -> None:
    dtype = torch.int32 if isinstance(ends[0], int) else torch.float32
    with pytest.raises(kind, match=r"^cu_seqlens: expected "):
        kda.prefill(**arguments(), cu_seqlens=torch.tensor(ends, dtype=dtype))


def test_prefill_refuses_strided_offsets() -> None:
    ends = torch.tensor([0, 7, 1, 7, 2, 7], dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected a contiguous tensor, got stride"):
        kda.prefill(**arguments(), cu_seqlens=ends)


def test_slots_outside_the_pool_may_repeat() -> None:
    validate.values(torch.tensor([-1, 2, -1, 9, 9], dtype=torch.int32), SLOTS)
    with pytest.raises(ValueError, match=r"^slots: expected distinct slots, got \[2\] more than once; "):
        validate.values(torch.tensor([2, 1, 2], dtype=torch.int32), SLOTS)
