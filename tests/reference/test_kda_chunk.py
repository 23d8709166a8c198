"""The chunk form against the recurrence: every chunk, both gates, cut sequences, pools."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference import kda, kda_chunk
from reference.points import KDA_CHUNK, ChunkForm, tapped
from tests.reference.test_kda import ACTIVATIONS, NAN, cell, copied, int32

LENGTHS = [17, 0, 1, 33]


def both(arguments: dict, **given: object) -> tuple[list[Tensor], list[Tensor]]:
    """Output, state and window of the chunk form and of the recurrence."""
    form = {"form": given.pop("form")} if "form" in given else {}
    results = []
    for prefill, more in ((kda_chunk.prefill, form), (kda.prefill, {})):
        pools = copied(arguments)
        results.append([prefill(**{**pools, **given}, **more), pools["state"], pools["window"]])
    return results[0], results[1]


def packed(lengths: list[int], **changed: object) -> dict:
    ends = int32(*torch.tensor([0, *lengths]).cumsum(0).tolist())
    return cell(sum(lengths), 6) | {"cu_seqlens": ends, "slots": int32(5, 0, 3, 1)[: len(lengths)]} | changed


def near(got: Tensor, expected: Tensor, eps: float) -> bool:
    return bool((got - expected).norm() <= eps * expected.norm())


@pytest.mark.parametrize("lower_bound", [-5.0, -1000.0, None])
@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 64])
def test_every_chunk_is_the_recurrence_in_fp64(chunk: int, lower_bound: float | None) -> None:
    fresh = torch.tensor([False, True, True, False])
    got, expected = both(packed(LENGTHS), form=ChunkForm(chunk), lower_bound=lower_bound, fresh=fresh)
    assert all(near(x, y, 1e-12) for x, y in zip(got[:2], expected[:2], strict=True))
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_fp32_is_a_few_roundings_away(lower_bound: float | None) -> None:
    single = {name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in packed(LENGTHS).items()}
    double = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in single.items()}
    got, _ = both(single, lower_bound=lower_bound)
    _, expected = both(double, lower_bound=lower_bound)
    assert got[0].dtype == torch.float32 and all(near(x.double(), y, 3e-6) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("log_decay", [-1.0, -2.0, -5.0, -8.0, -100.0, -1000.0])
@pytest.mark.parametrize("once", [True, False])
def test_strong_decays_stay_finite_and_right(log_decay: float, once: bool) -> None:
    """Known failure 02: constant, and a single strong one among mild ones."""
    arguments = packed([64], lower_bound=None, a_log=torch.zeros(2).double(), dt_bias=torch.zeros(12).double())
    arguments["f"] = torch.full_like(arguments["f"], -1.0 if once else -log_decay)
    arguments["f"][23] = -log_decay
    for chunk in (16, 64):
        got, expected = both(arguments, form=ChunkForm(chunk))
        assert all(near(x, y, 1e-12) for x, y in zip(got, expected, strict=True))


def test_an_infinite_decay_forgets_everything_before_it() -> None:
    arguments = packed([20], lower_bound=None)
    arguments["f"][7] = torch.inf
    got, expected = both(arguments)
    assert all(near(x, y, 1e-12) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("split", [0, 1, 15, 16, 17, 69, 70])
def test_a_prompt_in_two_pieces_is_the_prompt_in_one(split: int) -> None:
    arguments = cell(70, 1)
    whole, fresh = copied(arguments), torch.tensor([True])
    expected = kda_chunk.prefill(**whole, cu_seqlens=int32(0, 70), slots=int32(0), fresh=fresh)
    outs = []
    for rows, new in ((slice(0, split), fresh), (slice(split, 70), None)):
        part = {name: arguments[name][rows] for name in ACTIVATIONS}
        outs.append(kda_chunk.prefill(**{**arguments, **part}, cu_seqlens=int32(0, len(part["q"])), slots=int32(0), fresh=new))
    assert near(torch.cat(outs), expected, 1e-12) and near(arguments["state"], whole["state"], 1e-12)
    assert torch.equal(arguments["window"], whole["window"])


@pytest.mark.parametrize("outside", [-1, 6, -(2**31)])
def test_padding_reads_nothing_writes_nothing_and_returns_zeros(outside: int) -> None:
    arguments = packed([3, 18], slots=int32(2, outside))
    for name in ACTIVATIONS:
        arguments[name][3:] = NAN
    arguments["state"][[0, 1, 3, 4, 5]], arguments["window"][[0, 1, 3, 4, 5]] = NAN, NAN
    out = kda_chunk.prefill(**arguments)
    assert (out[3:] == 0).all() and out[:3].isfinite().all() and arguments["state"][2].isfinite().all()
    assert arguments["state"][[0, 1, 3, 4, 5]].isnan().all() and arguments["window"][[0, 1, 3, 4, 5]].isnan().all()


def test_no_tokens_and_no_sequences_are_legal() -> None:
    for lengths in ([], [0], [0, 0]):
        arguments = packed(lengths)
        before = copied(arguments)
        assert kda_chunk.prefill(**arguments).shape == (0, 8)
        assert torch.equal(arguments["state"], before["state"])


@pytest.mark.parametrize("scale", ["q", "products"])
@pytest.mark.parametrize("beta", ["inverse", "operands"])
def test_every_form_is_the_recurrence_in_fp64(scale: Any, beta: Any) -> None:
    got, expected = both(packed([40, 3]), form=ChunkForm(16, scale, beta))
    assert all(near(x, y, 1e-12) for x, y in zip(got, expected, strict=True))


def test_a_form_says_what_its_rounding_points_hold() -> None:
    arguments = packed([5])
    ours: dict[str, Tensor] = {}
    other: dict[str, Tensor] = {}
    for values, form in ((ours, ChunkForm()), (other, ChunkForm(scale="products", beta="operands"))):
        kda_chunk.prefill(**copied(arguments), form=form, at=tapped(values))
    scale, beta = ours["q"].shape[-1] ** -0.5, ours["beta"]
    for point, factor in (("q", 1 / scale), ("q_in", 1 / scale), ("k_in", beta[:, :, None]), ("v_in", beta[:, :, None]), ("aqk", 1.0)):
        assert near(other[point], ours[point] * factor, 1e-12), point
    assert near(other["inv"] * beta.T[:, None, :], ours["inv"], 1e-12)


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"chunk": -1}, {"chunk": 2.0}, {"scale": "k"}, {"beta": "none"}])
def test_a_form_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected "):
        ChunkForm(**wrong)


def test_the_points_stand_in_the_order_of_computation() -> None:
    values: dict[str, Tensor] = {}
    kda_chunk.prefill(**packed([5]), at=tapped(values))
    assert tuple(values) == KDA_CHUNK


def test_the_deltas_are_those_of_the_recurrence() -> None:
    values: dict[str, Tensor] = {}
    deltas: list[Tensor] = []

    def at(name: str, x: Tensor) -> Tensor:
        if name == "delta":
            deltas.append(x)
        return x

    arguments = packed([9])
    kda_chunk.prefill(**copied(arguments), at=tapped(values))
    kda.prefill(**arguments, at=at)
    assert near(values["dl"], torch.cat(deltas), 1e-12)
