"""Verify, commit and snapshots in FP64: the state of the accepted tokens' decode, whatever the acceptance, and nothing of the rest."""

import pytest
import torch
from torch import Tensor

from reference import kda, kda_verify
from reference.kda_replay import Replay
from tests.reference.test_kda import ACTIVATIONS, cell, copied, int32

WEIGHTS = ("conv_weight", "a_log", "dt_bias")
NAN = float("nan")


def empty_replay(arguments: dict, drafts: int) -> Replay:
    """Caches of NaN: whatever is read before it was written shows."""
    replay = Replay.empty(arguments["state"], arguments["window"], drafts)
    for cache in (replay.qkv, replay.f, replay.beta):
        cache.fill_(NAN)
    return replay


def rows(arguments: dict, first: int, count: int) -> dict:
    """The arguments with `count` of their tokens."""
    return {**arguments, **{name: arguments[name][first : first + count] for name in ACTIVATIONS}}


def accept(arguments: dict, slots: list[int], accepted: list[int]) -> Tensor:
    """Plain decode of every token; the pools keep what the first `accepted` of each sequence left."""
    width, outs = len(arguments["q"]) // len(slots), []
    for n, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
        ahead = copied(arguments)
        for i in range(width):
            outs.append(kda.decode(**rows(ahead, n * width + i, 1), slots=int32(slot)))
            if i + 1 == count:
                for name in ("state", "window"):
                    arguments[name][slot] = ahead[name][slot]
    return torch.cat(outs)


def commit(arguments: dict, replay: Replay, slots: list[int], accepted: list[int]) -> None:
    weights = {name: arguments[name] for name in WEIGHTS}
    pools = arguments["state"], arguments["window"]
    kda_verify.commit(
        *pools, replay=replay, **weights, slots=int32(*slots), accepted=int32(*accepted), lower_bound=arguments["lower_bound"]
    )


def assert_same_pools(arguments: dict, expected: dict, slots: list[int]) -> None:
    torch.testing.assert_close(arguments["state"][slots], expected["state"][slots])
    assert torch.equal(arguments["window"][slots], expected["window"][slots])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
def test_every_acceptance_goes_on_as_decoding_the_accepted_tokens(drafts: int, lower_bound: float | None) -> None:
    """As many rounds as there are counts, so that each of the three sequences has every one of them; then a commit."""
    width, slots = 1 + drafts, [4, 0, 2]
    arguments = cell(3 * width * width, 5) | {"lower_bound": lower_bound}
    expected, replay, accepted = copied(arguments), empty_replay(arguments, drafts), [0, 0, 0]
    for step in range(width):
        tokens = rows(arguments, 3 * width * step, 3 * width)
        out = kda_verify.verify(**tokens, replay=replay, slots=int32(*slots), accepted=int32(*accepted))
        accepted = [(step + n * drafts) % width + 1 for n in range(3)]
        torch.testing.assert_close(out, accept({**tokens, **{name: expected[name] for name in ("state", "window")}}, slots, accepted))
    commit(arguments, replay, slots, accepted)
    assert_same_pools(arguments, expected, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("drafts", [1, 3])
def test_snapshots_give_the_same_outputs_and_states(drafts: int) -> None:
    width = 1 + drafts
    arguments, accepted = cell(2 * width * 5, 3), [0, 0]
    replay, taken = empty_replay(arguments, drafts), torch.arange(2 * width, dtype=torch.int32).view(2, width).flip(0)
    a = copied(
        arguments, state=torch.full((2 * width, 2, 4, 6), NAN).double(), window=torch.full((2 * width, 3 + drafts, 32), NAN).double()
    )
    for n, slot in enumerate((2, 0)):
        a["state"][taken[n, 0]], a["window"][taken[n, 0], :3] = arguments["state"][slot], arguments["window"][slot]
    for step in range(5):
        b = rows(arguments, 2 * width * step, 2 * width)
        out = kda_verify.verify(**b, replay=replay, slots=int32(2, 0), accepted=int32(*accepted))
        pools = {"state": a["state"], "window": a["window"]}
        torch.testing.assert_close(kda_verify.verify_snapshots(**{**b, **pools}, slots=taken, accepted=int32(*accepted)), out)
        torch.testing.assert_close(a["state"][taken[:, 0]], arguments["state"][[2, 0]])  # after the golden token
        accepted = [step % width + 1, (step + 2) % width + 1]
    commit(arguments, replay, [2, 0], accepted)
    for n, slot in enumerate((2, 0)):
        torch.testing.assert_close(a["state"][taken[n, accepted[n] - 1]], arguments["state"][slot])
        assert torch.equal(a["window"][taken[n, 0], accepted[n] - 1 : accepted[n] + 2], arguments["window"][slot])


def test_the_worked_example() -> None:
    """Spec 5.4: prefill ends p, q, r; [A, b, c] of which A, b are accepted; before D the window is (r, A, b) in both contracts."""
    p, q, r, a, b, c, d, e, f = range(1, 10)
    arguments = cell(3, 1, heads=1, key_dim=1, value_dim=1)
    arguments["window"][0] = torch.tensor([p, q, r])[:, None]
    replay, taken = empty_replay(arguments, 2), int32(0, 1, 2)[None]
    snapshots = copied(arguments, state=arguments["state"].repeat(3, 1, 1, 1), window=torch.zeros(3, 5, 3).double())
    snapshots["window"][0, :3] = arguments["window"][0]

    def step(accepted: int, *letters: int) -> None:
        raw = {name: torch.tensor(letters).double()[:, None] for name in "qkv"}
        kda_verify.verify(**{**arguments, **raw}, replay=replay, slots=int32(0), accepted=int32(accepted))
        kda_verify.verify_snapshots(**{**snapshots, **raw}, slots=taken, accepted=int32(accepted))

    def letters(x: Tensor) -> list[float]:
        return x[:, 0].tolist()

    step(0, a, b, c)
    assert letters(snapshots["window"][0]) == [q, r, a, b, c]
    assert letters(arguments["window"][0]) == [q, r, a]
    assert letters(replay.qkv[0]) == [b, c]
    committed = copied(arguments)
    commit(committed, replay, [0], [2])
    assert letters(committed["window"][0]) == letters(snapshots["window"][0, 1:4]) == [r, a, b]
    step(2, d, e, f)
    assert letters(snapshots["window"][0]) == [a, b, d, e, f]
    assert letters(arguments["window"][0]) == [a, b, d]


@pytest.mark.parametrize(
    ("accepted", "window"), [(0, [10, 20, 30]), (1, [20, 30, 1]), (2, [30, 1, 2]), (3, [1, 2, 3]), (4, [2, 3, 4]), (5, [3, 4, 5])]
)
def test_the_window_is_the_last_three_accepted_inputs(accepted: int, window: list[float]) -> None:
    """Known failure 23: history [10, 20, 30], tokens [1, 2, 3, 4, 5]."""
    arguments = cell(5, 1, heads=1, key_dim=1, value_dim=1)
    arguments["window"][0] = torch.tensor([10.0, 20, 30])[:, None]
    arguments |= {name: torch.arange(1.0, 6)[:, None].double() for name in "qkv"}
    before, replay = copied(arguments), empty_replay(arguments, 4)
    if accepted:
        kda_verify.verify(**arguments, replay=replay, slots=int32(0), accepted=int32(0))
    commit(arguments, replay, [0], [accepted])
    assert arguments["window"][0, :, 0].tolist() == window
    assert accepted or torch.equal(arguments["state"], before["state"])


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_commit_of_nothing_leaves_the_pools_bitwise(accepted: int) -> None:
    arguments = cell(1, 2)
    before = copied(arguments)
    commit(arguments, empty_replay(arguments, 3), [1], [accepted])
    assert all(torch.equal(arguments[name], before[name]) for name in ("state", "window"))


def test_verify_and_decode_hand_over_through_commit() -> None:
    """decode, verify (2 of 3), commit, decode, verify (3 of 3), commit: as 7 decodes."""
    arguments = cell(8, 3)
    expected, replay = copied(arguments), empty_replay(arguments, 2)
    outs, tokens = [], [0]
    outs.append(kda.decode(**rows(arguments, 0, 1), slots=int32(1)))
    for first, accepted in ((1, 2), (5, 3)):
        out = kda_verify.verify(**rows(arguments, first, 3), replay=replay, slots=int32(1), accepted=int32(0))
        commit(arguments, replay, [1], [accepted])
        outs.append(out[:accepted])
        tokens += range(first, first + accepted)
        if first == 1:
            outs.append(kda.decode(**rows(arguments, 4, 1), slots=int32(1)))
            tokens.append(4)
    plain = torch.cat([kda.decode(**rows(expected, i, 1), slots=int32(1)) for i in tokens])
    torch.testing.assert_close(torch.cat(outs), plain)
    assert_same_pools(arguments, expected, [0, 1, 2])


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_rejected_drafts_leave_no_trace(accepted: int) -> None:
    """The rejected ones are NaN in one run: it goes on bitwise as the other."""
    runs = []
    for poison in (False, True):
        arguments = cell(8, 2)
        if poison:
            for name in ACTIVATIONS:
                arguments[name][accepted:4] = NAN
        replay = empty_replay(arguments, 3)
        kda_verify.verify(**rows(arguments, 0, 4), replay=replay, slots=int32(1), accepted=int32(0))
        out = kda_verify.verify(**rows(arguments, 4, 4), replay=replay, slots=int32(1), accepted=int32(accepted))
        runs.append((out, arguments["state"], arguments["window"]))
    assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(*runs, strict=True))


def test_drafts_change_no_pool_and_no_earlier_output() -> None:
    arguments = cell(4, 2)
    for name in ACTIVATIONS:
        arguments[name][2:] = NAN
    alone = copied(arguments)
    out = kda_verify.verify(**arguments, replay=empty_replay(arguments, 3), slots=int32(1), accepted=int32(1))
    expected = kda.decode(**rows(alone, 0, 1), slots=int32(1))
    torch.testing.assert_close(out[:1], expected)
    assert out[1].isfinite().all() and out[2:].isnan().all()
    assert_same_pools(arguments, alone, [0, 1])


def test_a_fresh_sequence_has_nothing_pending_whatever_its_slot_and_count_hold() -> None:
    arguments = cell(6, 3)
    zeroed = copied(arguments)
    for pools, fill in ((arguments, NAN), (zeroed, 0.0)):
        pools["state"][2], pools["window"][2] = fill, fill
    fresh = torch.tensor([True, False])
    out = kda_verify.verify(**arguments, replay=empty_replay(arguments, 2), slots=int32(2, 0), accepted=int32(3, 0), fresh=fresh)
    assert torch.equal(out, kda_verify.verify(**zeroed, replay=empty_replay(zeroed, 2), slots=int32(2, 0), accepted=int32(0, 1)))
    assert torch.equal(arguments["state"], zeroed["state"])


@pytest.mark.parametrize("outside", [-1, 3, -(2**31), 2**31 - 1])
def test_padding_reads_nothing_writes_nothing_and_returns_zeros(outside: int) -> None:
    arguments = cell(6, 3)
    for name in ACTIVATIONS:
        arguments[name][3:] = NAN
    before, replay = copied(arguments), empty_replay(arguments, 2)
    out = kda_verify.verify(**arguments, replay=replay, slots=int32(1, outside), accepted=int32(1, 77))
    assert (out[3:] == 0).all() and out[:3].isfinite().all()
    for name in ("state", "window"):
        assert torch.equal(arguments[name][[0, 2]], before[name][[0, 2]])
    assert all(cache[[0, 2]].isnan().all() and cache[1].isfinite().all() for cache in (replay.qkv, replay.f, replay.beta))
    commit(arguments, replay, [outside, 1], [77, 1])
    assert torch.equal(arguments["state"][[0, 2]], before["state"][[0, 2]])


def test_a_bf16_pool_holds_the_golden_state_rounded_and_drafts_go_on_unrounded() -> None:
    double, half = cell(2, 1, torch.float32), cell(2, 1, torch.float32)
    half["state"] = half["state"].bfloat16()
    double["state"] = half["state"].float()
    outs = [kda_verify.verify(**x, replay=empty_replay(x, 1), slots=int32(0), accepted=int32(0)) for x in (double, half)]
    assert torch.equal(*outs)
    assert torch.equal(half["state"], double["state"].bfloat16()) and not torch.equal(half["state"].float(), double["state"])
