"""The producer of a forward's verify offsets, driven by forwards of several layers: what the layers are given is what counts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference import kda_verify
from reference.kda_offsets import Offsets, VerifyOffsets
from reference.kda_replay import Replay
from tests.reference.test_kda import ACTIVATIONS, cell, decoded, int32
from tests.reference.test_kda_verify import accept, commit, empty_replay, rows

DRAFTS, WIDTH = 2, 3


class Layer:
    """A KDA layer: pools and caches of its own, inputs that differ by layer; keeps the offsets it was given."""

    def __init__(self, index: int, slots: int) -> None:
        self.arguments: dict[str, Any] = cell(1, slots)
        self.arguments["state"] *= 1 + index
        self.replay = empty_replay(self.arguments, DRAFTS)
        self.index = index
        self.given: list[Offsets | None] = []

    def inputs(self, step: int, tokens: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * step + self.index)
        x = {name: torch.randn(tokens, self.arguments[name].shape[1], generator=generator).double() for name in ACTIVATIONS}
        return {**self.arguments, **x}

    def verify(self, step: int, slots: Tensor, producer: VerifyOffsets, context_rows: int = 0) -> Tensor:
        offsets, accepted = producer.get(), producer.accepted()
        self.given.append(offsets)
        tokens = self.inputs(step, context_rows + WIDTH * len(slots))
        generation = rows(tokens, context_rows, WIDTH * len(slots))
        return kda_verify.verify(**generation, replay=self.replay, slots=slots, accepted=accepted, offsets=offsets)


def by_hand(counts: list[int], slots: list[int]) -> tuple[list[int], list[int]]:
    """Pending drafts and shifted row offsets, from the definition."""
    pending = [max(counts[slot] - 1, 0) if 0 <= slot < len(counts) else 0 for slot in slots]
    return pending, [n * WIDTH - pending[n] for n in range(len(slots))] + [len(slots) * WIDTH]


def listed(offsets: Offsets | None) -> tuple[list[int], list[int]] | None:
    return None if offsets is None else (offsets[0].tolist(), offsets[1].tolist())


def test_every_layer_is_given_one_tuple_that_is_right_in_each_of_four_steps() -> None:
    """Three layers of which one is pruned; each ends where plain decode of the accepted tokens does."""
    slots, layers = [3, 0, 4], [Layer(0, 5), None, Layer(2, 5)]
    counts = torch.zeros(5, dtype=torch.int32)
    counts[1] = 77  # a slot of nobody
    producer = VerifyOffsets(counts, [layer and layer.replay for layer in layers])
    local = [layer for layer in layers if layer is not None]
    expected = [{name: layer.arguments[name].clone() for name in ("state", "window")} for layer in local]
    last = [0, 0, 0]
    for step, accepted in enumerate(([2, 3, 1], [3, 1, 2], [1, 2, 3], [2, 2, 2])):
        producer.reset(int32(*slots), contexts=0, rows=9)
        for layer, pools in zip(local, expected, strict=True):
            out = layer.verify(step, int32(*slots), producer)
            torch.testing.assert_close(out, accept({**layer.inputs(step, 9), **pools}, slots, accepted))
        given = [layer.given[-1] for layer in local]
        assert given[0] is given[1] and given[0] is not None
        assert [x.dtype for x in given[0]] == [torch.int32, torch.int32]
        assert listed(given[0]) == by_hand(dict(zip(slots, last, strict=True)) | {1: 77, 2: 0}, slots)
        counts[torch.tensor(slots)] = int32(*accepted)
        last = accepted
    assert all(a is not b for a, b in zip(local[0].given, local[0].given[1:], strict=False))
    for layer, pools in zip(local, expected, strict=True):
        commit(layer.arguments, layer.replay, slots, last)
        for name, pool in pools.items():
            torch.testing.assert_close(layer.arguments[name], pool)
    producer.clear(int32(*slots))
    assert counts.tolist() == [0, 77, 0, 0, 0]


def test_the_first_offset_may_be_negative_and_the_last_is_not_shifted() -> None:
    producer = VerifyOffsets(int32(3, 2), [Layer(0, 2).replay])
    producer.reset(int32(0, 1), contexts=0, rows=6)
    assert listed(producer.get()) == ([2, 1], [-2, 2, 6])


def mixed(fixed_buffer: bool) -> tuple[list[Offsets | None], list[Tensor]]:
    """Two steps of two layers with two prefills before three generation requests, one of them padding; caches of its own."""
    slots, layers = int32(1, 6, 3, -1, 0), [Layer(0, 7), Layer(1, 7)]
    counts = int32(0, 9, 9, 0, 9, 9, 9)  # 9: of slots that aren't verified
    buffer = torch.full((8,), 2, dtype=torch.int32)  # longer than the batch
    buffer[:3] = slots[2:]
    producer, tensors, given = VerifyOffsets(counts, [layer.replay for layer in layers]), [], []
    for step in range(2):
        generation = buffer[:3] if fixed_buffer else None
        producer.reset(slots, contexts=2, rows=9, generation_slots=generation)
        own = slots[2:] if generation is None else generation
        tensors += [layer.verify(step, own, producer, context_rows=4) for layer in layers]
        assert layers[0].given[-1] is layers[1].given[-1]
        given.append(layers[0].given[-1])
        counts[3], counts[0] = 3, 2
    return given, tensors + [layer.arguments[name] for layer in layers for name in ("state", "window")]


def test_a_fixed_buffer_of_generation_slots_and_the_slice_of_all_slots_are_equal() -> None:
    of_buffer, of_slice = mixed(fixed_buffer=True), mixed(fixed_buffer=False)
    assert [listed(x) for x in of_buffer[0]] == [listed(x) for x in of_slice[0]] == [([0, 0, 0], [0, 3, 6, 9]), ([2, 0, 1], [-2, 3, 5, 9])]
    assert all(torch.equal(x, y) for x, y in zip(of_buffer[1], of_slice[1], strict=True))


@pytest.mark.parametrize(
    ("replays", "slots", "contexts", "tokens"),
    [
        pytest.param([None, None], [0, 1], 0, 6, id="no KDA layer on this rank"),
        pytest.param([], [0, 1], 0, 6, id="no replay caches"),
        pytest.param(["caches"], [0, 1], 0, 2, id="single tokens"),
        pytest.param(["caches"], [1, 0], 1, 1, id="a prefill and single tokens"),
        pytest.param(["caches"], [0, 1], 2, 0, id="prefills only"),
        pytest.param(["caches"], [], 0, 0, id="nothing"),
    ],
)
def test_there_are_none(replays: list[Any], slots: list[int], contexts: int, tokens: int) -> None:
    producer = VerifyOffsets(int32(1, 0), [x and Layer(0, 2).replay for x in replays])
    producer.reset(int32(*slots), contexts=contexts, rows=tokens)
    assert producer.get() is None and producer.accepted() is None


def test_a_step_forgets_the_one_before() -> None:
    producer = VerifyOffsets(int32(3, 0), [Layer(0, 2).replay])
    producer.reset(int32(0), contexts=0, rows=3)
    assert listed(producer.get()) == ([2], [-2, 3])
    producer.clear(int32(0, -1, 2))
    producer.reset(int32(0), contexts=0, rows=1)
    assert producer.get() is None
    producer.reset(int32(1, 0), contexts=0, rows=6)
    assert listed(producer.get()) == ([0, 0], [0, 3, 6])


def test_plain_decode_over_pending_drafts_is_refused_until_every_layer_has_committed() -> None:
    layers = [Layer(0, 2), Layer(1, 2)]
    expected = [{name: layer.arguments[name].clone() for name in ("state", "window")} for layer in layers]
    counts = int32(0, 0)
    producer = VerifyOffsets(counts, [layer.replay for layer in layers])
    producer.reset(int32(1), contexts=0, rows=3)
    for layer in layers:
        layer.verify(0, int32(1), producer)
    counts[1] = 2
    with pytest.raises(ValueError, match=r"accepted: expected no pending drafts, counts of 0 or 1, got \[2\]; call kda_verify.commit"):
        producer.reset(int32(1), contexts=0, rows=1)
    for layer, pools in zip(layers, expected, strict=True):
        commit(layer.arguments, layer.replay, [1], [2])
        decoded({**layer.inputs(0, 3), **pools}, 1, range(2))
        torch.testing.assert_close(layer.arguments["state"], pools["state"])
    producer.clear(int32(1))
    producer.reset(int32(1), contexts=0, rows=1)


@pytest.mark.parametrize("tokens", [3, 4, 5, 7])
def test_drafted_and_undrafted_requests_in_one_batch_are_refused(tokens: int) -> None:
    producer = VerifyOffsets(int32(0, 0), [Layer(0, 2).replay])
    with pytest.raises(ValueError, match=rf"rows: expected 2 or 6, 1 or 1\+2 for each of 2 requests, got {tokens}; a batch can't mix"):
        producer.reset(int32(0, 1), contexts=0, rows=tokens)


def test_offsets_of_an_earlier_step_are_refused_before_any_state_is_touched() -> None:
    layer, counts = Layer(0, 2), int32(0, 0)
    producer = VerifyOffsets(counts, [layer.replay])
    producer.reset(int32(1), contexts=0, rows=3)
    stale = producer.get()
    layer.verify(0, int32(1), producer)
    before = layer.arguments["state"].clone()
    with pytest.raises(ValueError, match=r"offsets: pending: expected \[2\], got \[0\]; compute them anew in each step"):
        kda_verify.verify(**layer.inputs(1, 3), replay=layer.replay, slots=int32(1), accepted=int32(3), offsets=stale)
    assert torch.equal(layer.arguments["state"], before)


def test_caches_are_made_for_their_pools() -> None:
    arguments = cell(1, 5, torch.bfloat16)
    replay = Replay.empty(arguments["state"], arguments["window"], 3, torch.float32)
    assert [(list(x.shape), x.dtype) for x in (replay.qkv, replay.f, replay.beta)] == [
        ([5, 3, 32], torch.bfloat16), ([5, 3, 12], torch.float32), ([5, 3, 2], torch.float32),
    ]  # fmt: skip
    assert replay.drafts == 3
