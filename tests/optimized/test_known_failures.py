"""Public kernel bugs as checks: each holds for the fused kernel and for the reference, and catches a twin that has the bug.

Numbers are entries of the list of known failures. 01 and 09 to 13 are of prefill, 20 of CUDA graphs.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity.buffers import same_bits
from reference import kda

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kda_decode
from tests.optimized.test_kda_decode import ACTIVATIONS, NAN, Cell, Decode, away, cell, int32
from tests.optimized.twins import (
    clamped_softplus_gate,
    cleared_by_multiplication,
    converted_window,
    first_ranks_gates,
    inverse_decay_on_its_own,
    key_major_pool,
    mean_norm,
    naive_gate,
    offsets_of_32_bits,
    padding_as_the_last_slot,
    rounded,
    stale,
    the_whole_index_buffer,
    unmasked_lanes,
    with_points,
)

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

FP32, BF16 = torch.float32, torch.bfloat16
Check = Callable[[Decode], None]


def forgetful(log_decay: float | Tensor, **changed: Any) -> Cell:
    """A cell with softplus gate whose log decay is the given one, a state of ones, and k exactly zero: the new state is the decay."""
    given = cell(1, dtype=FP32, lower_bound=None, **changed)
    for name in ("k", "window", "a_log", "dt_bias"):
        given[name].zero_()
    given["f"] = torch.expm1(-torch.as_tensor(log_decay, dtype=torch.float64)).log().expand(given["f"].shape).float().contiguous()
    given["state"].fill_(1)
    return given


def gates(**changed: Tensor | float | None) -> Cell:
    """As `forgetful`, with the given raw gate and parameters instead."""
    given = forgetful(-1.0)
    for name, value in changed.items():
        given[name] = value.expand_as(given[name]).contiguous() if isinstance(value, Tensor) else value
    return given


def strong_decays_stay_finite(decode: Decode) -> None:
    """02: decays down to exp(-1000), constant, and one among mild ones, through both gates."""
    strong = torch.tensor([-1.0, -2, -5, -8, -100, -1000, -0.1, -0.1] * 2)
    for lower_bound in (None, -1000.0):
        given = cell(1, 2, dtype=FP32, lower_bound=lower_bound)
        given["a_log"].zero_()
        given["dt_bias"].zero_()
        given["f"] = torch.stack([-strong, torch.full((16,), 1000.0)])
        for _ in range(3):
            assert away(decode, given) <= 1
            assert given["state"].isfinite().all()


def the_bounded_gate_is_a_scaled_sigmoid(decode: Decode) -> None:
    """03: with exp(A_log) = 4, at x where the clamped softplus gives other values."""
    raw = torch.tensor([-8.0, -2, 0, 2, 8, -0.5, 0.5, 1]).repeat(2)
    given = gates(f=raw, a_log=torch.tensor(4.0).log(), lower_bound=-5.0)
    assert away(decode, given) <= 1
    printed = [f"{x:.3f}" for x in given["state"][1, 0, 0, 1:4].double().log().tolist()]
    assert printed == ["-0.002", "-2.500", "-4.998"]


def large_gate_inputs_stay_finite(decode: Decode) -> None:
    """04: softplus of 100 is 100."""
    assert away(decode, gates(f=torch.tensor(100.0), a_log=torch.tensor(-5.0))) <= 1


def small_gate_inputs_keep_their_digits(decode: Decode) -> None:
    """04: softplus of -20 is 2.06e-9, not 0, which a rate of exp(15) shows."""
    assert away(decode, gates(f=torch.tensor(-20.0), a_log=torch.tensor(15.0))) <= 1


def an_overflowing_rate_is_finite(decode: Decode) -> None:
    """04: exp(90) times an underflowed softplus."""
    given = gates(f=torch.tensor(-200.0), a_log=torch.tensor(90.0))
    assert away(decode, given) <= 1
    assert torch.equal(given["state"][1], torch.ones(2, 4, 8))


def small_keys_are_normed_by_their_sum(decode: Decode) -> None:
    """05: amplitudes down to 1e-4, where an epsilon added to the mean is 0.87 off."""
    for amplitude in (1e-2, 1e-3, 1e-4):
        given = cell(0, 2, dtype=FP32, key_dim=16)
        for name in ("q", "k", "window"):
            given[name] *= amplitude
        assert away(decode, given) <= 1


def a_zero_row_gives_exactly_zero(decode: Decode) -> None:
    """05: a query of zeros reads nothing, and is not 0 / 0."""
    given = cell(0, 2)
    given["q"].zero_()
    given["window"].zero_()
    assert torch.equal(decode(**given), torch.zeros(2, 8, dtype=BF16))


def slow_decays_are_not_rounded(decode: Decode) -> None:
    """06a: a decay of .99992, which BF16 rounds to 1. k is zero, so beta has no say."""
    given = forgetful(-8e-5)
    for _ in range(4):
        assert away(decode, given) <= 1


def beta_is_not_rounded(decode: Decode) -> None:
    """06b: nothing decays, so beta alone has a say."""
    given = cell(1, 2, dtype=FP32)
    given["f"].fill_(-1e4)
    for _ in range(4):
        assert away(decode, given) <= 1


def heads_of_8() -> Cell:
    """A cell whose A_log and dt_bias differ by head."""
    a_log, dt_bias = torch.arange(8.0).log1p(), torch.arange(32.0) / 32 - 0.5
    return cell(1, pool=2, heads=8, key_dim=4, value_dim=2, a_log=a_log, dt_bias=dt_bias)


def sharded(decode: Decode, local: int) -> Decode:
    """`decode` of `heads_of_8` as ranks of `local` heads run it, outputs side by side; parameters and state are slices."""
    widths = dict(q=4, k=4, v=2, f=4, beta=1, gate=2)

    def run(**given: Any) -> Tensor:
        outs = []
        for first in range(0, 8, local):
            last = first + local
            channels = torch.cat(
                [torch.arange(first * 4, last * 4), torch.arange(first * 4, last * 4) + 32, torch.arange(first * 2, last * 2) + 64]
            )
            window = given["window"][:, :, channels]
            rank = {name: given[name][:, first * width : last * width] for name, width in widths.items()} | dict(
                a_log=given["a_log"][first:last], dt_bias=given["dt_bias"][first * 4 : last * 4],
                conv_weight=given["conv_weight"][channels], state=given["state"][:, first:last], window=window,
            )  # fmt: skip
            outs.append(decode(**{**given, **rank}))
            given["window"][:, :, channels] = window
        return torch.cat(outs, dim=1)

    return run


def ranks_use_their_own_heads(decode: Decode) -> None:
    """07: 8 heads on ranks of 1, 2, 4 and 8 are the unsharded run."""
    for local in (1, 2, 4, 8):
        assert away(sharded(decode, local), heads_of_8()) <= 1


def memory_after_a_row_of_gates_is_not_read(decode: Decode) -> None:
    """08: K of 60 and 100, V of 40; the raw gates are columns of a buffer that goes on with 1e4, or NaN."""
    for key_dim in (60, 100):
        outs = []
        for beside in (0.0, 1e4, NAN):
            given = cell(0, 2, heads=1, key_dim=key_dim, value_dim=40, lower_bound=None)
            wide = torch.full((2, 128), beside, dtype=BF16)
            wide[:, :key_dim] = given["f"]
            given["f"] = wide[:, :key_dim]
            outs.append(torch.cat([decode(**given).flatten().float(), given["state"].flatten()]))
        assert same_bits(outs[1], outs[0]) and same_bits(outs[2], outs[0])


def padding_leaves_the_last_slot_alone(decode: Decode) -> None:
    """14: slots [2, -1] of a pool of 5 whose last row is a live request's."""
    given, before = cell(2, -1, pool=5), cell(2, -1, pool=5)
    out = decode(**given)
    for name in ("state", "window"):
        changed = [slot for slot in range(5) if not same_bits(given[name][slot], before[name][slot])]
        assert changed == [2], name
    assert torch.equal(out[1], torch.zeros(8, dtype=BF16))


def entries_past_the_batch_are_not_used(decode: Decode) -> None:
    """15: an index buffer of 4 whose last entry still names live slot 7, and a batch of 3."""
    given, before = cell(4, 0, 2, 7, pool=8), cell(4, 0, 2, 7, pool=8)
    decode(**{**given, **{name: given[name][:3] for name in (*ACTIVATIONS, "slots")}})
    for name in ("state", "window"):
        assert [slot for slot in range(8) if not same_bits(given[name][slot], before[name][slot])] == [0, 2, 4], name


def offsets_of_large_pools_have_64_bits(decode: Decode) -> None:
    """16: slot 2 starts at element 2^31. The base is never touched between the rows."""
    given = cell(2, 1, pool=3, state_dtype=BF16)
    far = torch.empty(2**31 + 64, dtype=BF16).as_strided((3, 2, 4, 8), (2**30, 32, 8, 1))
    far.copy_(given["state"])
    given["state"] = far
    assert away(decode, given) <= 1


def the_state_is_stored_value_major(decode: Decode) -> None:
    """17: K = V and a state without symmetry, then from zero."""
    for scale in (1, 0):
        given = cell(1, 3, key_dim=8, value_dim=8)
        given["state"] *= scale
        assert away(decode, given) <= 1


def a_pool_of_another_dtype_is_refused(decode: Decode) -> None:
    """18a: a window of FP32 rows under BF16 activations; nothing is converted behind the caller's back."""
    given, before = cell(1), cell(1)
    given["window"] = given["window"].float()
    try:
        decode(**given)
    except TypeError as error:
        message = str(error)
    else:
        message = "accepted"
    assert message.startswith("window: expected dtype bfloat16, got float32; ")
    assert same_bits(given["state"], before["state"])


def an_fp32_pool_forgets_slowly_and_a_bf16_pool_never(decode: Decode) -> None:
    """18c: a decay of exp(-1e-4) is under half a BF16 step: the documented limit of a BF16 pool, and of it alone."""
    double, half = forgetful(-1e-4), forgetful(-1e-4, state_dtype=BF16)
    for _ in range(4):
        assert away(decode, double) <= 1
        assert away(decode, half) <= 1
    assert f"{double['state'][1].double().mean():.6f}" == "0.999600"
    assert torch.equal(half["state"][1], torch.ones(2, 4, 8, dtype=BF16))


def a_reused_slot_starts_clean(decode: Decode) -> None:
    """19, and the second half of 15: a new request on a slot that holds NaN, then infinity."""
    clean = cell(3, 0, fresh=torch.tensor([True, False]))
    clean["state"][3], clean["window"][3] = 0, 0
    out = decode(**clean)
    for value in (NAN, torch.inf):
        given = cell(3, 0, fresh=torch.tensor([True, False]))
        given["state"][3], given["window"][3] = value, value
        assert same_bits(decode(**given), out)
        assert all(same_bits(given[name], clean[name]) for name in ("state", "window"))


def a_snapshot_is_the_state_after_exactly_n_tokens(decode: Decode) -> None:
    """21: every snapshot of 5 tokens, restored into another slot, goes on as the cold run did; the window is part of it."""
    tokens = [cell(1, seed=seed) for seed in range(5)]
    pools = {name: tokens[0][name] for name in ("state", "window")}

    def run(i: int, slot: int) -> Tensor:
        shared = {**tokens[0], **{name: tokens[i][name] for name in ACTIVATIONS}, "slots": int32(slot)}
        before = {name: pool.clone() for name, pool in pools.items()}
        out = decode(**shared)
        assert away(lambda **given: replay(out, given, pools), {**shared, **before}) <= 1
        return out

    snapshots, outs = [], []
    for i in range(5):
        snapshots.append({name: pool[1].clone() for name, pool in pools.items()})
        outs.append(run(i, 1))
    for n in (1, 2, 4):
        for name, pool in pools.items():
            pool[3] = snapshots[n][name]
        for i in range(n, 5):
            assert same_bits(run(i, 3), outs[i])
        assert all(same_bits(pool[3], pool[1]) for pool in pools.values())


def replay(out: Tensor, given: Cell, pools: dict[str, Tensor]) -> Tensor:
    """What a call left, as a call on the pools it started from."""
    for name, pool in pools.items():
        given[name].copy_(pool)
    return out


TWINS: list[tuple[Check, Decode]] = [
    (strong_decays_stay_finite, inverse_decay_on_its_own),
    (the_bounded_gate_is_a_scaled_sigmoid, clamped_softplus_gate),
    (large_gate_inputs_stay_finite, naive_gate),
    (small_gate_inputs_keep_their_digits, naive_gate),
    (an_overflowing_rate_is_finite, naive_gate),
    (small_keys_are_normed_by_their_sum, mean_norm),
    (a_zero_row_gives_exactly_zero, with_points(q=lambda q: q / q.norm(dim=-1, keepdim=True))),
    (slow_decays_are_not_rounded, rounded(decay=BF16)),
    (beta_is_not_rounded, rounded(beta=BF16)),
    (ranks_use_their_own_heads, first_ranks_gates),
    (memory_after_a_row_of_gates_is_not_read, unmasked_lanes),
    (padding_leaves_the_last_slot_alone, padding_as_the_last_slot),
    (entries_past_the_batch_are_not_used, the_whole_index_buffer),
    (offsets_of_large_pools_have_64_bits, offsets_of_32_bits),
    (the_state_is_stored_value_major, key_major_pool),
    (a_pool_of_another_dtype_is_refused, converted_window),
    (an_fp32_pool_forgets_slowly_and_a_bf16_pool_never, rounded(state=BF16)),
    (a_reused_slot_starts_clean, cleared_by_multiplication),
    (a_snapshot_is_the_state_after_exactly_n_tokens, stale("window")),
    (a_snapshot_is_the_state_after_exactly_n_tokens, stale("state")),
]
CHECKS = list(dict.fromkeys(check for check, _ in TWINS))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_holds(check: Check) -> None:
    check(kda_decode.decode)


@pytest.mark.parametrize(("check", "twin"), TWINS, ids=lambda function: function.__name__.strip("<>"))
def test_only_the_twin_with_the_bug_is_caught(check: Check, twin: Decode) -> None:
    check(kda.decode)
    with pytest.raises(AssertionError):
        check(twin)


def test_the_two_gate_roundings_are_told_apart() -> None:
    """06: the check of the decay doesn't see a rounded beta, and the check of beta no rounded decay."""
    slow_decays_are_not_rounded(rounded(beta=BF16))
    beta_is_not_rounded(rounded(decay=BF16))


@pytest.mark.parametrize("local", [1, 4])
def test_ranks_give_the_bits_of_the_unsharded_kernel(local: int) -> None:
    """07: a program owns one head, so sharding changes no sum."""
    given, whole = heads_of_8(), heads_of_8()
    assert same_bits(sharded(kda_decode.decode, local)(**given), kda_decode.decode(**whole))
    assert all(same_bits(given[name], whole[name]) for name in ("state", "window"))
