"""Public bugs of speculative KDA as checks: each holds for the fused kernel and for the reference, and catches a twin that has it.

Numbers are entries of the list of known failures. 20, of CUDA graphs, is in `test_kda_verify_gpu`; 24 and 25 are not of this operator.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity.buffers import same_bits
from reference import kda, kda_verify
from reference.kda_replay import Replay
from reference.points import rounding

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kda_verify as optimized
from tests.optimized.test_kda_decode import ACTIVATIONS, NAN, cell, int32
from tests.optimized.test_kda_verify import BF16, CACHES, FP32, Verify, away, copied, drafted

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

Check = Callable[[Verify], None]
Counts = Callable[[Tensor], Tensor]


def as_many_drafts_are_replayed_as_were_accepted(verify: Verify) -> None:
    """Trap 15: the count includes the golden token. What isn't pending is finite here, so that only numbers can tell."""
    given = drafted((2, 0, 1), (3, 2, 1))
    for name in CACHES:
        getattr(given["replay"], name).nan_to_num_(nan=0.5)
    assert away(verify, given) <= 1


def rejected_drafts_leave_no_trace(verify: Verify) -> None:
    """Two rounds; the drafts that the first one's sampler rejects are other numbers in one run."""
    runs = []
    for scale in (1, 3):
        given = drafted((2, 0), (0, 0), heads=1)
        for name in ACTIVATIONS:
            given[name][[2, 4, 5]] *= scale  # accepted: 2 of the first three, 1 of the others
        verify(**given)
        given |= {name: cell(*range(6), heads=1, seed=7)[name] for name in ACTIVATIONS} | {"accepted": int32(2, 1)}
        runs.append([verify(**given), given["state"], given["window"]])
    assert all(same_bits(x, y) for x, y in zip(*runs, strict=True))


def what_is_not_pending_is_not_read(verify: Verify) -> None:
    """NaN in every cache row past the pending drafts, in all of a slot with none, and in slots of nobody."""
    given = drafted((2, 0, 3), (3, 1, 0), heads=1)
    given["state"][1], given["window"][1] = NAN, NAN
    assert away(verify, given) <= 1


def the_window_is_of_the_accepted_tokens(verify: Verify) -> None:
    """23: every count of a verify of five drafts, of which the window holds at most three."""
    for accepted in (1, 3, 4, 5, 6):
        assert away(verify, drafted((2,), (accepted,), 5, heads=1)) <= 1


def a_count_of_zero_replays_nothing(verify: Verify) -> None:
    """23: minus one is not the last draft."""
    zero, one = drafted((2,), (0,), heads=1), drafted((2,), (1,), heads=1)
    assert same_bits(verify(**zero), verify(**one)) and same_bits(zero["state"], one["state"])
    assert zero["state"].isfinite().all()


def every_row_of_this_step_is_processed(verify: Verify) -> None:
    """22: the count is of the last step, and says nothing of the rows of this one."""
    assert away(verify, drafted((2,), (1,), 7, heads=1)) <= 1


def counts_are_those_of_this_call(verify: Verify) -> None:
    """20: not those of the first call on these pools."""
    given = drafted((2, 0), (3, 1), heads=1)
    verify(**given)
    assert away(verify, given | {"accepted": int32(1, 3)}) <= 1


def a_fresh_sequence_replays_nothing(verify: Verify) -> None:
    """19: a new request on a slot whose last owner left drafts, a count and NaN in the pools."""
    given = drafted((2, 0), (3, 3), heads=1)
    clean = copied(given) | {"accepted": int32(0, 3)}
    for x, fill in ((given, NAN), (clean, 0)):
        x["state"][2], x["window"][2] = fill, fill
    out = verify(**given, fresh=torch.tensor([True, False]))
    assert same_bits(out, verify(**clean, fresh=torch.tensor([False, False])))
    assert all(same_bits(given[name], clean[name]) for name in ("state", "window"))


def padding_leaves_the_last_slot_alone(verify: Verify) -> None:
    """14, with a count for the padding that nobody wrote."""
    given = drafted((2, -1), (3, 9), heads=1, pool=5)
    before = copied(given)
    out = verify(**given)
    for x, y in [(given[n], before[n]) for n in ("state", "window")] + [
        (getattr(given["replay"], n), getattr(before["replay"], n)) for n in CACHES
    ]:
        assert [slot for slot in range(5) if not same_bits(x[slot], y[slot])] == [2]
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))


def only_the_golden_state_is_stored(verify: Verify) -> None:
    assert away(verify, drafted((2, 3), (1, 1), 1, heads=1)) <= 1


def nothing_is_rounded_on_the_way(verify: Verify) -> None:
    """06: beta of a replayed draft."""
    given = drafted((2, 0), (3, 3), heads=1, dtype=FP32)
    given["f"].fill_(-1e4)
    given["replay"].f[[2, 0]] = -1e4
    assert away(verify, given) <= 1


def cache_offsets_have_64_bits(verify: Verify) -> None:
    """16: slot 2 of each cache starts at element 2^31. The base is never touched between the rows."""
    given = drafted((2, 1), (3, 2), pool=3, heads=1)
    caches = []
    for name in CACHES:
        cache = getattr(given["replay"], name)
        far = torch.empty(2**31 + 256, dtype=cache.dtype).as_strided(cache.shape, (2**30, cache.shape[2], 1))
        caches.append(far.copy_(cache))
    assert away(verify, given | {"replay": Replay(*caches)}) <= 1


def with_counts(change: Counts) -> Verify:
    """The reference with other counts; those that it would refuse are cut to what it takes."""

    def twin(*, accepted: Tensor, replay: Replay, **given: Any) -> Tensor:
        return kda_verify.verify(accepted=change(accepted).clamp(0, 1 + replay.drafts), replay=replay, **given)

    return twin


one_too_many = with_counts(lambda accepted: accepted + 1)
one_too_few = with_counts(lambda accepted: accepted - 1)
clamped_to_the_taps = with_counts(lambda accepted: accepted.clamp(max=3))
minus_one_is_the_last = with_counts(lambda accepted: torch.where(accepted == 0, 9, accepted))


def all_drafts_replayed(**given: Any) -> Tensor:
    return with_counts(lambda accepted: torch.full_like(accepted, 9))(**given)


def window_one_behind(**given: Any) -> Tensor:
    other = copied(given)
    one_too_few(**other)
    out = kda_verify.verify(**given)
    given["window"].copy_(other["window"])
    return out


def as_many_rows_as_were_accepted(**given: Any) -> Tensor:
    out = kda_verify.verify(**given)
    width = len(out) // len(given["slots"])
    out.unflatten(0, (-1, width))[torch.arange(width) >= given["accepted"].clamp(min=1)[:, None]] = 0
    return out


def counts_of_the_first_call() -> Verify:
    held: dict[int, Tensor] = {}

    def counts_of_the_first_call(*, state: Tensor, accepted: Tensor, **given: Any) -> Tensor:
        return kda_verify.verify(state=state, accepted=held.setdefault(id(state), accepted), **given)

    return counts_of_the_first_call


def fresh_pools_alone(**given: Any) -> Tensor:
    for name in ("state", "window"):
        given[name][given["slots"][given["fresh"]]] = 0
    return kda_verify.verify(**{**given, "fresh": None})


def padding_as_the_last_slot(**given: Any) -> Tensor:
    return kda_verify.verify(**{**given, "slots": given["slots"] % len(given["state"]), "accepted": given["accepted"].clamp(max=1)})


def last_state_stored(**given: Any) -> Tensor:
    out, width = kda_verify.verify(**given), len(given["q"]) // len(given["slots"])
    rest = {name: x for name, x in given.items() if name not in ("replay", "accepted", "offsets", "window")}
    for i in range(1, width):
        kda.decode(**{**rest, "window": given["window"].clone(), **{name: given[name][i::width] for name in ACTIVATIONS}})
    return out


def rounded_beta(**given: Any) -> Tensor:
    return kda_verify.verify(**given, at=rounding({"beta": BF16}))


def caches_elsewhere(**given: Any) -> Tensor:
    near = Replay(*(torch.zeros(getattr(given["replay"], name).shape, dtype=getattr(given["replay"], name).dtype) for name in CACHES))
    return kda_verify.verify(**{**given, "replay": near})


TWINS: list[tuple[Check, Verify]] = [
    (as_many_drafts_are_replayed_as_were_accepted, one_too_many),
    (as_many_drafts_are_replayed_as_were_accepted, one_too_few),
    (as_many_drafts_are_replayed_as_were_accepted, all_drafts_replayed),
    (rejected_drafts_leave_no_trace, one_too_many),
    (rejected_drafts_leave_no_trace, all_drafts_replayed),
    (what_is_not_pending_is_not_read, one_too_many),
    (what_is_not_pending_is_not_read, all_drafts_replayed),
    (the_window_is_of_the_accepted_tokens, window_one_behind),
    (the_window_is_of_the_accepted_tokens, clamped_to_the_taps),
    (a_count_of_zero_replays_nothing, minus_one_is_the_last),
    (every_row_of_this_step_is_processed, as_many_rows_as_were_accepted),
    (counts_are_those_of_this_call, counts_of_the_first_call()),
    (a_fresh_sequence_replays_nothing, fresh_pools_alone),
    (padding_leaves_the_last_slot_alone, padding_as_the_last_slot),
    (only_the_golden_state_is_stored, last_state_stored),
    (nothing_is_rounded_on_the_way, rounded_beta),
    (cache_offsets_have_64_bits, caches_elsewhere),
]
CHECKS = list(dict.fromkeys(check for check, _ in TWINS))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_holds(check: Check) -> None:
    check(optimized.verify)


@pytest.mark.parametrize(("check", "twin"), TWINS, ids=lambda function: function.__name__.strip("<>"))
def test_only_the_twin_with_the_bug_is_caught(check: Check, twin: Verify) -> None:
    check(kda_verify.verify)
    with pytest.raises(AssertionError):
        check(twin)
