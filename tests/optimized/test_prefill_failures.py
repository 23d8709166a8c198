"""Public bugs of prefill kernels as checks: each holds for ours and for the reference, and catches a twin that has the bug.

Numbers are entries of the list of known failures; 06a is a rounding of decode's, 20 is of CUDA graphs, 22 to 25 of drafts.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity.buffers import same_bits

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kda_prefill
from tests.optimized import prefill_twins as twins
from tests.optimized.prefill_twins import healthy
from tests.optimized.prompts import NAN, POOLS, Prefill, Prompt, away, copied, int32, predicted, prompt

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

FP32, BF16 = torch.float32, torch.bfloat16
Check = Callable[[Prefill], None]


def within(prefill: Prefill, given: Prompt) -> bool:
    return away(prefill, given, kda_prefill.CONTRACT) <= 1


def gates(length: int, f: float | Tensor, a_log: float = 0.0, **changed: Any) -> Prompt:
    """A prompt of these raw gates: biases are zero and rates exp(a_log)."""
    given = prompt([length], **{"heads": 1, "dtype": FP32, "lower_bound": None, **changed})
    given["dt_bias"].zero_()
    given["a_log"].fill_(a_log)
    given["f"] = torch.as_tensor(f, dtype=FP32).expand(given["f"].shape).contiguous()
    return given


def one_base_for_every_decay(prefill: Prefill) -> None:
    """01: where decays stay away from 1."""
    assert within(prefill, prompt([33], heads=1))


def strong_decays_stay_finite(prefill: Prefill) -> None:
    """02: constant decays down to exp(-1000), and a single strong one among mild ones; through both gates."""
    for strong in (5.0, 8.0, 1000.0):
        for once in (False, True):
            f = torch.full((18, 1), 0.1 if once else strong)
            f[9] = strong
            assert within(prefill, gates(18, f))
    for bound in (-5.0, -8.0, -1000.0):
        assert within(prefill, gates(18, 1000.0, lower_bound=bound))


def the_bounded_gate_is_a_scaled_sigmoid(prefill: Prefill) -> None:
    """03: with exp(A_log) = 4, at x where the clamped softplus gives other values."""
    f = torch.tensor([-8.0, -2, 0, 2, 8, -0.5, 0.5, 1]).repeat(2)
    assert within(prefill, gates(5, f, 1.3862944, lower_bound=-5.0))


def large_gate_inputs_stay_finite(prefill: Prefill) -> None:
    """04: softplus of 100 is 100."""
    assert within(prefill, gates(5, 100.0, -5.0))


def small_gate_inputs_keep_their_digits(prefill: Prefill) -> None:
    """04: softplus of -20 is 2.06e-9, not 0, which a rate of exp(15) shows."""
    assert within(prefill, gates(5, -20.0, 15.0))


def an_overflowing_rate_is_finite(prefill: Prefill) -> None:
    """04: exp(90) times an underflowed softplus."""
    assert within(prefill, gates(5, -200.0, 90.0))


def small_keys_are_normed_by_their_sum(prefill: Prefill) -> None:
    """05: amplitudes down to 1e-4, where an epsilon added to the mean is 0.87 off."""
    for amplitude in (1e-2, 1e-4):
        given = prompt([3], heads=1, dtype=FP32)
        for name in ("q", "k", "window"):
            given[name] *= amplitude
        assert within(prefill, given)


def a_zero_query_gives_exactly_zero(prefill: Prefill) -> None:
    """05: it reads nothing, and is not 0 / 0."""
    given = prompt([3], heads=1)
    given["q"].zero_()
    given["window"].zero_()
    assert torch.equal(prefill(**given), torch.zeros(3, 8, dtype=BF16))


def beta_is_not_rounded(prefill: Prefill) -> None:
    """06b: nothing decays, so beta alone has a say."""
    assert within(prefill, gates(20, -1e4))


def ranks_use_their_own_heads(prefill: Prefill) -> None:
    """07: gates that differ by head; the last two heads of four, as a rank of their own, are those of the whole."""
    own = dict(a_log=torch.arange(4.0).log1p(), dt_bias=torch.arange(16.0) / 16)
    given = prompt([3], pool=2, heads=4, key_dim=4, value_dim=2, dtype=FP32, **own)
    channels = torch.cat([torch.arange(8, 16), torch.arange(24, 32), torch.arange(36, 40)])
    rank = {name: given[name][:, -width:] for name, width in dict(q=8, k=8, v=4, f=8, beta=2, gate=4).items()} | dict(
        a_log=given["a_log"][2:], dt_bias=given["dt_bias"][8:], conv_weight=given["conv_weight"][channels],
        state=given["state"][:, 2:].contiguous(), window=given["window"][:, :, channels],
    )  # fmt: skip
    whole, _ = predicted(given, torch.float64, lambda name, x: x)
    out = prefill(**{**given, **rank})
    torch.testing.assert_close(out, whole[0, 2:].transpose(0, 1).flatten(1).float())


def memory_after_a_row_of_gates_is_not_read(prefill: Prefill) -> None:
    """08: K of 20; the raw gates are columns of a buffer that goes on with 1e4, or NaN."""
    outs = []
    for beside in (0.0, 1e4, NAN):
        given = prompt([4], heads=1, key_dim=20, lower_bound=None)
        wide = torch.full((4, 32), beside, dtype=BF16)
        wide[:, :20] = given["f"]
        given["f"] = wide[:, :20]
        outs.append(torch.cat([prefill(**given).flatten().float(), given["state"].flatten()]))
    assert same_bits(outs[1], outs[0]) and same_bits(outs[2], outs[0])


def the_last_decay_is_of_the_last_valid_token(prefill: Prefill) -> None:
    """09: lengths that end a chunk early, with rows of NaN behind the last token."""
    for length in (1, 15, 17, 23):
        given = prompt([length], heads=1)
        for name in ("q", "k", "v", "f", "beta", "gate"):
            given[name] = torch.cat([given[name], torch.full((9, given[name].shape[1]), NAN, dtype=BF16)])[:length]
        assert within(prefill, given)


def empty_sequences_keep_their_places(prefill: Prefill) -> None:
    """10: in front, in the middle, at the end, and single tokens among them."""
    for lengths in ([4, 0, 5], [0, 0, 5], [0, 5, 5], [5, 0, 0], [0, 1, 1, 17]):
        given, before = prompt(lengths, pool=5, heads=1), prompt(lengths, pool=5, heads=1)
        assert within(prefill, given)
        for slot, length in zip(given["slots"].tolist(), lengths, strict=True):
            assert same_bits(given["state"][slot], before["state"][slot]) == (length == 0)


def a_warm_slot_is_continued(prefill: Prefill) -> None:
    """11: 20 tokens on what 3 left, cut anywhere."""
    given = prompt([3], heads=1)
    assert within(prefill, given)
    assert within(prefill, prompt([20], heads=1, seed=1) | {name: given[name] for name in POOLS})


def head_counts_and_strided_logits(prefill: Prefill) -> None:
    """12: beta is a slice of a wider projection: pitch 40, offset 8."""
    for heads in (1, 3, 6):
        given = prompt([3], heads=heads, key_dim=4, value_dim=2, dtype=FP32)
        wide = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
        given["beta"] = wide[:, 8 : 8 + heads]
        assert within(prefill, given)


def padding_leaves_the_last_slot_alone(prefill: Prefill) -> None:
    """14: slots [2, -1] of a pool of 5 whose last row is a live request's."""
    given, before = prompt([3, 3], [2, -1], pool=5), prompt([3, 3], [2, -1], pool=5)
    out = prefill(**given)
    for name in POOLS:
        assert [slot for slot in range(5) if not same_bits(given[name][slot], before[name][slot])] == [2], name
    assert torch.equal(out[3:], torch.zeros(3, 16, dtype=BF16))


def entries_past_the_batch_are_not_used(prefill: Prefill) -> None:
    """15: index buffers of 4 whose last entry still names live slot 7, and a batch of 3."""
    given, before = (prompt([2, 2, 2, 2], [4, 0, 2, 7], pool=8, heads=1) for _ in range(2))
    cut = {name: given[name][:6] for name in ("q", "k", "v", "f", "beta", "gate")}
    prefill(**{**given, **cut, "slots": given["slots"][:3], "cu_seqlens": given["cu_seqlens"][:4]})
    for name in POOLS:
        assert [slot for slot in range(8) if not same_bits(given[name][slot], before[name][slot])] == [0, 2, 4], name


def offsets_of_a_large_pool(pool: str, prefill: Prefill) -> None:
    given = prompt([2, 3], [2, 1], pool=3, state_dtype=BF16)
    row = given[pool][0]
    far = torch.empty(2**31 + 256, dtype=BF16).as_strided(given[pool].shape, (2**30, *row.stride()))
    far.copy_(given[pool])
    given[pool] = far
    assert within(prefill, given)


def offsets_of_large_states_have_64_bits(prefill: Prefill) -> None:
    """16: slot 2 starts at element 2^31. The base is never touched between the rows."""
    offsets_of_a_large_pool("state", prefill)


def offsets_of_large_windows_have_64_bits(prefill: Prefill) -> None:
    """16: the same of the window."""
    offsets_of_a_large_pool("window", prefill)


def the_state_is_stored_value_major(prefill: Prefill) -> None:
    """17: K = V and a state without symmetry, then from zero."""
    for scale in (1, 0):
        given = prompt([3], heads=1, key_dim=16, value_dim=16)
        given["state"] *= scale
        assert within(prefill, given)


def a_pool_of_another_dtype_is_refused(prefill: Prefill) -> None:
    """18a: a window of FP32 rows under BF16 activations; nothing is converted behind the caller's back."""
    given = prompt([2])
    given["window"] = given["window"].float()
    before = copied(given)
    try:
        prefill(**given)
    except TypeError as error:
        message = str(error)
    else:
        message = "accepted"
    assert message.startswith("window: expected dtype bfloat16, got float32; ")
    assert same_bits(given["state"], before["state"])


def a_bf16_pool_is_rounded_once_a_call(prefill: Prefill) -> None:
    """18: the state is FP32 between chunks, whatever the pool; a slow decay shows a rounding at each chunk."""
    assert within(prefill, gates(33, -8.0, state_dtype=BF16))


def a_reused_slot_starts_clean(prefill: Prefill) -> None:
    """19, and the second half of 15: a new request on a slot that holds NaN, then infinity."""
    fresh, results = torch.tensor([True, False]), []
    for value in (0.0, NAN, torch.inf):
        given = prompt([4, 2], heads=1, fresh=fresh)
        given["state"][3], given["window"][3] = value, value
        results.append([prefill(**given), *(given[name] for name in POOLS)])
    assert all(same_bits(x, y) for result in results for x, y in zip(result, results[0], strict=True))


def a_checkpoint_is_the_state_after_exactly_n_tokens(prefill: Prefill) -> None:
    """21: after 16 and 18 tokens of 20; restored into another slot it goes on as the cold run did, window included."""
    tokens = {name: prompt([20], heads=1)[name] for name in ("q", "k", "v", "f", "beta", "gate")}
    pools = prompt([20], [1], heads=1)
    for first, last in ((0, 16), (16, 18), (18, 20)):
        cut = {name: x[first:last] for name, x in tokens.items()} | {"cu_seqlens": int32(0, last - first)}
        before = copied({**pools, **cut})
        assert within(prefill, {**pools, **cut})
        for name in POOLS:
            pools[name][3], before[name][3] = pools[name][1], before[name][1]
        out = prefill(**{**before, "slots": int32(3)})
        assert all(same_bits(before[name][3], pools[name][1]) for name in POOLS) and bool(out.isfinite().all())


def windows_hold_raw_inputs(prefill: Prefill) -> None:
    """24 and trap 8 of the model's page: three raw inputs, after 1, 2 and 5 tokens."""
    for length in (1, 2, 5):
        given = prompt([length], heads=1)
        raw = torch.cat([given["window"][3], torch.cat([given[name] for name in "qkv"], dim=1)])[-3:]
        prefill(**given)
        assert same_bits(given["window"][3], raw)


def near_collinear_keys_are_solved(prefill: Prefill) -> None:
    """Long repeated text: one key, no decay, beta of nearly 1, where powers of the matrix grow into the thousands."""
    given = gates(16, -1e4)
    for name in ("k", "window"):
        given[name] = torch.full_like(given[name], 3.0) + 1e-3 * given[name]
    given["conv_weight"][16:32] = torch.tensor([0.0, 0, 0, 1])
    given["beta"].fill_(6.0)
    assert within(prefill, given)


TWINS: list[tuple[Check, Prefill]] = [
    (one_base_for_every_decay, twins.mixed_bases),
    (strong_decays_stay_finite, twins.inverse_decay_on_its_own),
    (the_bounded_gate_is_a_scaled_sigmoid, twins.clamped_softplus_gate),
    (large_gate_inputs_stay_finite, twins.naive_gate),
    (small_gate_inputs_keep_their_digits, twins.naive_gate),
    (an_overflowing_rate_is_finite, twins.naive_gate),
    (small_keys_are_normed_by_their_sum, twins.mean_norm),
    (a_zero_query_gives_exactly_zero, twins.norm_without_an_epsilon),
    (beta_is_not_rounded, twins.rounded_to(BF16, "beta")),
    (ranks_use_their_own_heads, twins.first_ranks_gates),
    (memory_after_a_row_of_gates_is_not_read, twins.unmasked_lanes),
    (the_last_decay_is_of_the_last_valid_token, twins.stale_last_decay),
    (empty_sequences_keep_their_places, twins.compact_ranks),
    (a_warm_slot_is_continued, twins.cold_start),
    (head_counts_and_strided_logits, twins.dense_beta),
    (padding_leaves_the_last_slot_alone, twins.padding_as_the_last_slot),
    (entries_past_the_batch_are_not_used, twins.the_whole_index_buffer),
    (offsets_of_large_states_have_64_bits, twins.offsets_of_32_bits("state")),
    (offsets_of_large_windows_have_64_bits, twins.offsets_of_32_bits("window")),
    (the_state_is_stored_value_major, twins.key_major_pool),
    (a_pool_of_another_dtype_is_refused, twins.converted_window),
    (a_bf16_pool_is_rounded_once_a_call, twins.rounded_to(BF16, "state")),
    (a_reused_slot_starts_clean, twins.cleared_by_multiplication),
    (a_checkpoint_is_the_state_after_exactly_n_tokens, twins.stale("window")),
    (a_checkpoint_is_the_state_after_exactly_n_tokens, twins.stale("state")),
    (windows_hold_raw_inputs, twins.activated_window),
    (near_collinear_keys_are_solved, twins.power_series_inverse),
]
CHECKS = list(dict.fromkeys(check for check, _ in TWINS))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_holds(check: Check) -> None:
    check(kda_prefill.prefill)


@pytest.mark.parametrize(("check", "twin"), TWINS, ids=lambda function: function.__name__.strip("<>"))
def test_only_the_twin_with_the_bug_is_caught(check: Check, twin: Prefill) -> None:
    check(healthy)
    with pytest.raises(AssertionError):
        check(twin)
