"""The fused verify and commit kernels in the interpreter: judged by the gate, bitwise against the decode kernel, and by public bugs."""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity import limits, metrics
from parity.buffers import same_bits
from reference import kda_verify as reference
from reference import validate_verify
from reference.kda_offsets import VerifyOffsets
from reference.kda_replay import Replay
from reference.points import Contract, rounding

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kda_decode, kda_verify
from optimized.peers import eager_verify
from optimized.tiles import Tile
from tests.optimized.test_kda_decode import ACTIVATIONS, DTYPES, NAN, Cell, cell, int32

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

CACHES = ("qkv", "f", "beta")
RECURRENCE = ("conv_weight", "a_log", "dt_bias", "lower_bound")
BF16, FP32 = torch.bfloat16, torch.float32
NAMED = {"bf16": BF16, "fp16": torch.float16, "fp32": FP32}
Verify = Callable[..., Tensor]


def drafted(slots: tuple[int, ...], accepted: tuple[int, ...], drafts: int = 2, **changed: Any) -> Cell:
    """Arguments of one call of `verify`: what is pending lies in the caches, and everything else in them is NaN."""
    given = cell(*range(len(slots) * (1 + drafts)), **changed) | dict(slots=int32(*slots), accepted=int32(*accepted))
    replay = Replay.empty(given["state"], given["window"], drafts)
    generator = torch.Generator().manual_seed(changed.get("seed", 0) + 1)
    for name in CACHES:
        cache = getattr(replay, name)
        cache.fill_(NAN)
        for slot, count in zip(slots, accepted, strict=True):
            if 0 <= slot < len(cache) and 1 < count <= 1 + drafts:
                cache[slot, : count - 1] = torch.randn(count - 1, cache.shape[2], generator=generator).to(cache.dtype)
    return given | {"replay": replay}


def converted(given: Cell, dtype: torch.dtype) -> Cell:
    """The same call in another dtype, over pools and caches of its own."""
    new = {name: x.to(dtype, copy=True) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}
    new["state"] = new["state"].contiguous()
    replay = given["replay"]
    return new | {"replay": Replay(*(getattr(replay, name).to(dtype, copy=True) for name in CACHES))}


def copied(given: Cell) -> Cell:
    replay = given["replay"]
    pools = {name: given[name].clone() for name in ("state", "window")}
    return {**given, **pools, "replay": Replay(*(getattr(replay, name).clone() for name in CACHES))}


def away(verify: Verify, given: Cell, contract: Contract | None = None) -> float:
    """Call it; how many times its limit the worst of output and state is from FP64 gold.

    Infinite when the window, a cache of a sequence or a row of nobody isn't exact.
    """
    dtype, heads, before = given["q"].dtype, given["beta"].shape[1], given["state"].clone()
    rounds = (contract or Contract()).resolve(dtype)
    gold, single = converted(given, torch.float64), converted(given, FP32)
    golds = [(reference.verify(**x, at=rounding(rounds)), x["state"]) for x in (gold, single)]
    out = verify(**given)

    live = (given["slots"] >= 0) & (given["slots"] < len(before))
    rows, others = given["slots"][live].long(), torch.ones(len(before), dtype=torch.bool)
    others[rows] = False
    tokens = live.repeat_interleave(len(out) // max(len(live), 1))
    exact = torch.equal(given["window"].double()[rows], gold["window"][rows]) and same_bits(given["state"][others], before[others])
    for name in CACHES:
        exact &= torch.equal(getattr(given["replay"], name)[rows].double(), getattr(gold["replay"], name)[rows])
    if not exact or bool((out[~tokens] != 0).any()):
        return torch.inf
    worst = 0.0
    for candidate, (x, floor) in (
        (out[tokens].unflatten(1, (heads, -1)), [y[0][tokens].unflatten(1, (heads, -1)) for y in golds]),
        (given["state"][rows], [y[1][rows] for y in golds]),
    ):
        m = metrics.moments(candidate, x, x, floor, candidate.dtype)
        worst = max(worst, metrics.noise_ratio(m).over(limits.boundary(candidate.dtype)))
    return worst


def launched(tile: Tile) -> Verify:
    def verify(**given: Any) -> Tensor:
        given = {"offsets": None, "fresh": None, **given}
        q, k = given.pop("q"), given.pop("k")
        return kda_verify.launch(tile, validate_verify.kda_verify(q, k, **given), q, k, **given)

    return verify


def commit(given: Cell, module: Any = kda_verify, **changed: Any) -> None:
    arguments = {name: given[name] for name in (*RECURRENCE, "replay", "slots", "accepted")} | changed
    module.commit(given["state"], given["window"], **arguments)


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5, 6, 7])
def test_every_draft_count_is_within_the_gate(drafts: int) -> None:
    assert away(kda_verify.verify, drafted((2, 0), (1 + drafts, drafts), drafts, heads=1)) <= 1


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_dtypes_and_both_gates_are_within_the_gate(dtype: str, state_dtype: str) -> None:
    for lower_bound in (-5.0, None):
        given = drafted((3, 1), (3, 2), heads=1, dtype=NAMED[dtype], state_dtype=NAMED[state_dtype], lower_bound=lower_bound)
        assert away(kda_verify.verify, given) <= 1


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_head_counts_are_within_the_gate(heads: int) -> None:
    assert away(kda_verify.verify, drafted((1,), (2,), 1, pool=2, heads=heads, key_dim=4, value_dim=2)) <= 1


@pytest.mark.parametrize("tile", [Tile(128, 4, 1, 8), Tile(128, 8, 1, 16), Tile(128, 1, 1, 64)], ids=str)
def test_every_chunk_is_within_the_gate(tile: Tile) -> None:
    assert away(launched(tile), drafted((3, 0), (2, 3), heads=1, key_dim=32, value_dim=24)) <= 1


@pytest.mark.parametrize("drafts", [1, 3])
def test_rounds_are_bitwise_the_decode_kernel_on_the_accepted_tokens(drafts: int) -> None:
    """FP32 pools: every output, drafts included, and after a commit the pools; the counts run through all acceptances."""
    width, slots = 1 + drafts, (2, 0)
    given, pools = drafted(slots, (0, 0), drafts, heads=1), drafted(slots, (0, 0), drafts, heads=1)
    for step in range(width):
        x = {name: cell(*range(2 * width), heads=1, seed=step)[name] for name in ACTIVATIONS}
        out = kda_verify.verify(**{**given, **x})
        given["accepted"] = int32(step + 1, width - step)
        for n, slot in enumerate(slots):
            ahead = {name: pools[name].clone() for name in ("state", "window")}
            for i in range(width):
                token = {name: x[name][n * width + i : n * width + i + 1] for name in ACTIVATIONS}
                rest = {name: pools[name] for name in (*RECURRENCE, "norm_weight", "norm_eps")}
                assert same_bits(kda_decode.decode(**token, **rest, **ahead, slots=int32(slot))[0], out[n * width + i])
                if i + 1 == given["accepted"][n]:
                    for name, pool in ahead.items():
                        pools[name][slot] = pool[slot]
    commit(given)
    assert all(same_bits(given[name], pools[name]) for name in ("state", "window"))


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_commit_follows_the_reference(state_dtype: torch.dtype) -> None:
    given = drafted((2, -1, 0, 1, 3), (3, 3, 1, 2, 0), heads=1, pool=5, state_dtype=state_dtype)
    gold, single, before = converted(given, torch.float64), converted(given, FP32), copied(given)
    for x in (gold, single):
        commit(x, reference)
    commit(given)
    m = metrics.moments(given["state"], gold["state"], gold["state"], single["state"], state_dtype)
    assert metrics.noise_ratio(m).over(limits.boundary(state_dtype)) <= 1
    assert torch.equal(given["window"].double(), gold["window"])
    unchanged = [slot for slot in range(5) if same_bits(given["state"][slot], before["state"][slot])]
    assert unchanged == [0, 3, 4]
    assert all(same_bits(getattr(given["replay"], name), getattr(before["replay"], name)) for name in CACHES)


def test_offsets_of_a_forward_give_the_bits_that_the_counts_give() -> None:
    given = drafted((3, -1, 1), (3, 0, 2))
    shared, producer = copied(given), VerifyOffsets(int32(0, 2, 0, 3), [given["replay"]])
    producer.reset(given["slots"], contexts=0, rows=9)
    out = kda_verify.verify(**shared, offsets=producer.get())
    assert same_bits(out, kda_verify.verify(**given)) and same_bits(shared["state"], given["state"])


def test_programs_in_reverse_order_give_the_same_bits() -> None:
    forward = drafted((3, 1), (3, 2))
    backward = copied(forward)
    out = kda_verify.verify(**forward)
    with interpreter.program_order(reverse=True):
        assert same_bits(kda_verify.verify(**backward), out)
        commit(backward)
    commit(forward)
    assert all(same_bits(forward[name], backward[name]) for name in ("state", "window"))


def test_each_is_one_launch() -> None:
    given = drafted((3, 1), (3, 2), heads=1)
    with interpreter.launches() as seen:
        kda_verify.verify(**given)
        commit(given)
    assert seen == {"kda_verify_kernel": 1, "kda_commit_kernel": 1}


@pytest.mark.parametrize("poison", [NAN, 1e4])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(60, 40), (12, 6)])
def test_widths_that_are_no_power_of_two_read_nothing_beside_their_rows(key_dim: int, value_dim: int, poison: float) -> None:
    """Inputs, pools and caches are followed by poison in their rows, which stays."""
    given = drafted((2, 0), (3, 2), heads=1, key_dim=key_dim, value_dim=value_dim)

    def beside(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 130), poison, dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    given |= {name: beside(given[name]) for name in (*ACTIVATIONS, "window")}
    given["state"] = beside(given["state"].flatten(1)).unflatten(1, given["state"].shape[1:])
    given["replay"] = Replay(*(beside(getattr(given["replay"], name)) for name in CACHES))
    assert away(kda_verify.verify, given) <= 1
    for x in (given["window"], *(getattr(given["replay"], name) for name in CACHES)):
        gap = x.as_strided((*x.shape[:-1], 130), x.stride(), x.shape[-1])
        assert same_bits(gap, torch.full_like(gap, poison))


def test_one_wide_projection_and_a_tap_innermost_window_are_read_in_place() -> None:
    given = drafted((2, 0), (3, 2))
    strided = copied(given)
    widths = [given[name].shape[1] for name in ACTIVATIONS]
    strided |= zip(ACTIVATIONS, torch.cat([given[name] for name in ACTIVATIONS], dim=1).split(widths, dim=1), strict=True)
    strided["window"] = given["window"].transpose(1, 2).contiguous().transpose(1, 2)
    out = kda_verify.verify(**strided)
    assert same_bits(out, kda_verify.verify(**given))
    assert all(same_bits(strided[name].contiguous(), given[name]) for name in ("state", "window"))


@pytest.mark.parametrize("slots", [(), (-1,), (4, -1)])
def test_a_batch_of_nobody_leaves_pools_and_caches_as_they_are(slots: tuple[int, ...]) -> None:
    given = drafted(slots, tuple(9 for _ in slots))
    before = copied(given)
    out = kda_verify.verify(**given)
    commit(given)
    assert out.shape == (3 * len(slots), 8) and bool((out == 0).all())
    assert all(same_bits(given[name], before[name]) for name in ("state", "window"))
    assert all(same_bits(getattr(given["replay"], name), getattr(before["replay"], name)) for name in CACHES)


@pytest.mark.parametrize("verify", [kda_verify.verify, eager_verify.verify], ids=["triton", "torch"])
def test_the_signature_is_the_references_without_its_points(verify: Verify) -> None:
    expected = inspect.signature(inspect.unwrap(reference.verify)).parameters
    assert inspect.signature(verify).parameters == {k: p for k, p in expected.items() if k != "at"}


def test_commits_signature_is_the_references_without_its_points() -> None:
    expected = inspect.signature(inspect.unwrap(reference.commit)).parameters
    assert inspect.signature(kda_verify.commit).parameters == {k: p for k, p in expected.items() if k != "at"}


def test_a_cpu_tensor_outside_the_interpreter_is_refused_before_any_pool_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "active", lambda: False)
    given = drafted((1,), (2,))
    before = copied(given)
    for call in (lambda: kda_verify.verify(**given), lambda: commit(given)):
        with pytest.raises(ValueError, match="state: expected a CUDA tensor, got one on cpu; set TRITON_INTERPRET=1"):
            call()
    assert same_bits(given["state"], before["state"])
