"""The prefill kernels in the interpreter: against the chunk reference under their contract, and against the recurrence."""

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from optimized.prefill_tiles import PrefillTile, prefill_tile
from parity.buffers import same_bits
from reference import kda, validate

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kda_prefill
from tests.optimized.prompts import ACTIVATIONS, NAN, POOLS, Prompt, away, copied, int32, prompt, relative

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = (1, 2, 3, 6, 8, 12, 24)  # the others on a GPU: a program a head is slow here


def within(given: Prompt) -> bool:
    return away(kda_prefill.prefill, given, kda_prefill.CONTRACT) <= 1


@pytest.mark.parametrize("lower_bound", [-5.0, -40.0, None])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, BF16), (FP32, FP32), (FP32, BF16)])
def test_dtypes_and_gates_are_within_the_noise(dtype: torch.dtype, state_dtype: torch.dtype, lower_bound: float | None) -> None:
    """-40 is a bounded gate whose chunk can't be split at its middle."""
    fresh = torch.tensor([False, True])
    assert within(prompt([18, 5], dtype=dtype, state_dtype=state_dtype, lower_bound=lower_bound, fresh=fresh))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 65])
def test_lengths_around_the_edges_of_chunks(length: int) -> None:
    assert within(prompt([length, 2], heads=1, dtype=FP32))


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count(heads: int) -> None:
    assert within(prompt([2], pool=2, heads=heads, key_dim=4, value_dim=2, dtype=FP32))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("poison", [NAN, 1e4])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(60, 40), (20, 33)])
def test_widths_that_are_no_power_of_two_read_nothing_beside_their_rows(
    key_dim: int, value_dim: int, poison: float, lower_bound: float | None
) -> None:
    """Every input is a view of rows with poison between them; the gaps stay as they are."""
    given = prompt([18], heads=1, key_dim=key_dim, value_dim=value_dim, lower_bound=lower_bound)
    for name in (*ACTIVATIONS, *POOLS):
        width = given[name][0].numel()
        beside = torch.full((len(given[name]), width + 136), poison, dtype=given[name].dtype)
        beside[:, :width] = given[name].flatten(1)
        given[name] = beside[:, :width].unflatten(1, given[name].shape[1:])
    for name in ("conv_weight", "a_log", "dt_bias", "norm_weight"):
        flat = given[name].flatten()
        given[name] = torch.cat([flat, torch.full((256,), poison, dtype=flat.dtype)])[: len(flat)].view(given[name].shape)
    assert within(given)
    for name in POOLS:
        width = given[name][0].numel()
        gap = given[name].as_strided((len(given[name]) - 1, 136), (width + 136, 1), width)
        assert same_bits(gap, torch.full_like(gap, poison)), name


def test_a_window_with_the_taps_innermost_is_read_and_written_as_a_view() -> None:
    given = prompt([1, 2, 20, 0], pool=6)
    given["window"] = given["window"].transpose(1, 2).contiguous().transpose(1, 2)
    assert within(given)


def test_columns_of_one_wide_projection_are_read_in_place() -> None:
    given = prompt([20], heads=3)
    widths = {name: given[name].shape[1] for name in ACTIVATIONS}
    wide = torch.cat([torch.full((20, 5), NAN), *(given[name].float() for name in ACTIVATIONS), torch.full((20, 3), NAN)], 1).to(BF16)
    parts = wide[:, 5:-3].split(list(widths.values()), dim=1)
    given |= dict(zip(widths, parts, strict=True))
    before = wide.clone()
    assert within(given) and same_bits(wide, before)


def test_rows_of_a_projection_beyond_31_bits_are_reached() -> None:
    """Tokens 2^30 elements apart on a base that is touched nowhere else."""
    given = prompt([3], heads=1)
    far = torch.empty(2**31 + 512, dtype=BF16)
    for name in ("q", "v", "f", "gate"):
        offset = 64 * list(given).index(name)
        rows = far.as_strided(given[name].shape, (2**30, 1), offset)
        given[name] = rows.copy_(given[name])
    assert within(given)


@pytest.mark.parametrize("split", [0, 1, 2, 3, 15, 16, 17, 33, 68, 69, 70])
def test_a_prompt_in_two_pieces_is_the_prompt_in_one_within_the_noise(split: int) -> None:
    given = prompt([70], heads=1)
    whole, pieces = copied(given), []
    expected = kda_prefill.prefill(**whole)
    healthy = relative(expected, kda.prefill(**copied(given, torch.float64)))
    for part in (slice(0, split), slice(split, 70)):
        rows = {name: given[name][part] for name in ACTIVATIONS} | {"cu_seqlens": int32(0, len(given["q"][part]))}
        pieces.append(kda_prefill.prefill(**{**given, **rows}))
    assert relative(torch.cat(pieces), expected) <= 2 * healthy
    assert relative(given["state"], whole["state"]) <= 2 * healthy
    assert same_bits(given["window"], whole["window"])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_changed_token_changes_no_earlier_output_and_no_other_sequence(lower_bound: float | None) -> None:
    given = prompt([20, 20], heads=1, lower_bound=lower_bound)
    first = copied(given)
    out = kda_prefill.prefill(**first)
    for token in (9, 17):
        other = copied(given)
        for name in ACTIVATIONS:
            other[name] = given[name].clone()
            other[name][token] += 3
        changed = kda_prefill.prefill(**other)
        assert same_bits(changed[:token], out[:token]) and not same_bits(changed[token], out[token])
        assert same_bits(changed[20:], out[20:]) and same_bits(other["state"][2], first["state"][2])


def test_padding_reads_nothing_writes_nothing_and_returns_zeros() -> None:
    given = prompt([17, 3, 18, 0], [2, -1, 4, -(2**31)])
    for name in ACTIVATIONS:
        given[name][17:] = NAN
    for name in POOLS:
        given[name][[0, 1, 3]] = NAN
    before = copied(given)
    out = kda_prefill.prefill(**given)
    assert bool((out[17:] == 0).all()) and bool(out[:17].isfinite().all())
    for name in POOLS:
        assert [slot for slot in range(4) if not same_bits(given[name][slot], before[name][slot])] == [2], name


@pytest.mark.parametrize("value", [NAN, torch.inf])
def test_a_fresh_sequence_starts_from_zero_whatever_its_slot_holds(value: float) -> None:
    fresh = torch.tensor([True, False, True, True])
    outs = []
    for fill in (0.0, value):
        given = prompt([5, 2, 0, 1], fresh=fresh)
        for name in POOLS:
            given[name][[3, 1, 0]] = fill
        outs.append([kda_prefill.prefill(**given), *(given[name] for name in POOLS)])
    assert all(same_bits(x, y) for x, y in zip(*outs, strict=True))
    assert bool((outs[1][1][1] == 0).all()) and bool((outs[1][2][1] == 0).all())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_leave_every_pool_as_it_is(lengths: list[int]) -> None:
    given = prompt(lengths)
    given["state"][:], before = NAN, copied(given)
    before["state"] = given["state"].clone()
    assert kda_prefill.prefill(**given).shape == (0, 16)
    assert all(same_bits(given[name], before[name]) for name in POOLS)


def test_no_input_is_modified() -> None:
    given = prompt([17, 2], fresh=torch.tensor([False, True]))
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor) and name not in POOLS}
    kda_prefill.prefill(**given)
    assert all(same_bits(given[name], x) for name, x in before.items())


TILES = [PrefillTile(rows, 4, 2, prepare_warps=warps) for rows in (16, 32, 64) for warps in (1, 2, 8)]


def test_every_tile_gives_the_same_bits_but_for_the_parts_of_a_gram_sum() -> None:
    given = prompt([20], heads=1, key_dim=32, value_dim=40)
    found: dict[int, list[list[Tensor]]] = {}
    for tile in TILES:
        copy = copied(given) | {"fresh": None}
        sizes = validate.kda_prefill(**copy)
        out = kda_prefill.launch(tile, sizes, **copy)
        found.setdefault(tile.prepare_warps, []).append([out, *(copy[name] for name in POOLS)])
    for results in found.values():
        assert all(same_bits(x, y) for result in results for x, y in zip(result, results[0], strict=True))
    for parts in (1, 2):  # of K in the scan: another order of the same sums

        def launched(parts: int = parts, **x: Any) -> Tensor:
            return kda_prefill.launch(PrefillTile(16, 4, 2, parts=parts), validate.kda_prefill(**x), **x)

        assert away(launched, copied(given) | {"fresh": None}, kda_prefill.CONTRACT) <= 1


def test_programs_in_any_order_give_the_same_bits() -> None:
    given = prompt([17, 1, 0, 33], pool=5)
    results = []
    for reverse in (False, True):
        copy = copied(given)
        with interpreter.program_order(reverse):
            results.append([kda_prefill.prefill(**copy), *(copy[name] for name in POOLS)])
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


def test_three_launches_whatever_the_lengths() -> None:
    for lengths in ([40], [1, 0, 2]):
        with interpreter.launches() as seen:
            kda_prefill.prefill(**prompt(lengths))
        assert seen == {f"kda_prefill_{part}_kernel": 1 for part in ("prepare", "scan", "norm")}


def test_the_signature_is_the_references_without_its_points() -> None:
    expected = inspect.signature(inspect.unwrap(kda.prefill)).parameters
    assert inspect.signature(kda_prefill.prefill).parameters == {name: p for name, p in expected.items() if name != "at"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"slots": int32(1, 1)}, "slots: expected distinct slots"),
    ({"cu_seqlens": int32(0, 3, 4)}, "cu_seqlens: expected offsets that rise from 0 to 5"),
    ({"cu_seqlens": int32(0, 6, 5)}, "cu_seqlens: expected offsets that rise"),
    ({"cu_seqlens": int32(1, 3, 5)}, "cu_seqlens: expected offsets that rise"),
    ({"cu_seqlens": int32(0, 5)}, r"cu_seqlens: expected shape \[3\]"),
    ({"cu_seqlens": torch.tensor([0, 3, 5])}, "cu_seqlens: expected dtype int32"),
    ({"fresh": int32(0, 1)}, "fresh: expected dtype bool"),
    ({"lower_bound": 5.0}, "lower_bound: expected a negative"),
    ({"state": torch.zeros(4, 2, 8, 16, dtype=FP16)}, "state: expected dtype float32 or bfloat16"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_input_is_refused_before_any_pool_changes(changed: dict[str, Any], message: str) -> None:
    given = prompt([3, 2]) | changed
    before = copied(given)
    with pytest.raises((ValueError, TypeError), match=message):
        kda_prefill.prefill(**given)
    assert all(same_bits(given[name], before[name]) for name in POOLS)


def test_a_cpu_tensor_outside_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "active", lambda: False)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got one on cpu"):
        kda_prefill.prefill(**prompt([2]))


def test_a_tile_for_every_architecture_and_a_clear_word_for_none() -> None:
    assert prefill_tile("sm90", BF16, 16).rows < prefill_tile("sm90", BF16, 64).rows
    with pytest.raises(ValueError, match=r"none for sm70 with torch.bfloat16 activations; add a row"):
        prefill_tile("sm70", BF16, 1)
