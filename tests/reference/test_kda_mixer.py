"""The mixer's reference: an independent transcription in FP64, heads split over ranks, batches of every mixture."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference import kda_mixer, kda_offsets
from reference.batch import Batch
from reference.kda_replay import Replay
from reference.kda_weights import NAMES, KdaWeights, shard
from reference.points import ACTIVATION, KDA, KDA_CELL, KDA_MIXER, Contract, rounding, tapped

HIDDEN, RANK, SLOTS = 12, 5, 6
NAN = float("nan")


def layer(heads: int = 4, key_dim: int = 6, value_dim: int = 3, dtype: torch.dtype = torch.float64) -> KdaWeights:
    """Random weights; K, V, R and hidden all differ."""
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape: int, scale: float = HIDDEN**-0.5) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    key, value = heads * key_dim, heads * value_dim
    wide = torch.promote_types(dtype, torch.float32)
    return KdaWeights(
        q_proj=normal(key, HIDDEN), k_proj=normal(key, HIDDEN), v_proj=normal(value, HIDDEN), b_proj=normal(heads, HIDDEN),
        f_a_proj=normal(RANK, HIDDEN), f_b_proj=normal(key, RANK, scale=1.0), g_a_proj=normal(RANK, HIDDEN),
        g_b_proj=normal(value, RANK, scale=1.0), q_conv1d=normal(key, 1, 4), k_conv1d=normal(key, 1, 4), v_conv1d=normal(value, 1, 4),
        A_log=torch.log1p(torch.arange(heads, dtype=wide)), dt_bias=torch.arange(key, dtype=wide) / key - 0.5,
        o_norm=1 + normal(value_dim), o_proj=normal(HIDDEN, value),
    )  # fmt: skip


def with_weight(given: dict, name: str, change: Callable[[Tensor], Tensor]) -> dict:
    return dict(weights=replace(given["weights"], **{name: change(getattr(given["weights"], name))}))


def case(*lengths: int, generations: int = 0, dtype: torch.dtype = torch.float64) -> dict:
    """Arguments of `mixer`: contexts of these lengths, then generations; slots from the last on, every second sequence fresh."""
    generator, tokens, sequences = torch.Generator().manual_seed(5), sum(lengths) + generations, len(lengths) + generations

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ends = torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None
    slots = torch.arange(SLOTS, dtype=torch.int32).flip(0)[:sequences].contiguous()
    return dict(
        hidden=normal(tokens, HIDDEN), weights=layer(dtype=dtype),
        state=normal(SLOTS, 4, 3, 6).to(torch.promote_types(dtype, torch.float32)),
        window=normal(SLOTS, 3, 60),
        batch=Batch(slots, ends, torch.arange(sequences) % 2 == 1), lower_bound=-5.0,
    )  # fmt: skip


def copied(given: dict, **changed: Any) -> dict:
    """The same arguments over pools of their own."""
    return {**given, "state": given["state"].clone(), "window": given["window"].clone(), **changed}


def transcribed(hidden: Tensor, weights: KdaWeights, state: Tensor, window: Tensor, lower_bound: float | None) -> Tensor:
    """One sequence, one head and one token at a time, from the model's page; S is [K, V] here. Pools of one slot, in place."""
    heads, outs, w = weights.A_log.shape[0], [], weights
    if len(hidden) == 0:
        return hidden
    raw = torch.cat([F.linear(hidden, x) for x in (w.q_proj, w.k_proj, w.v_proj)], 1)
    padded = torch.cat([window, raw])
    conv = F.conv1d(padded.T[None], torch.cat([w.q_conv1d, w.k_conv1d, w.v_conv1d]), groups=padded.shape[1])[0].T
    window.copy_(padded[-3:])
    q, k, v = (x.unflatten(1, (heads, -1)) for x in F.silu(conv).split([len(w.q_proj), len(w.k_proj), len(w.v_proj)], 1))
    x = (F.linear(F.linear(hidden, w.f_a_proj), w.f_b_proj) + w.dt_bias).unflatten(1, (heads, -1))
    gate = F.linear(F.linear(hidden, w.g_a_proj), w.g_b_proj).unflatten(1, (heads, -1))
    beta = 1 / (1 + torch.exp(-F.linear(hidden, w.b_proj)))
    for t in range(len(hidden)):
        for h in range(heads):
            rate = w.A_log[h].exp()
            g = -rate * torch.log1p(x[t, h].exp()) if lower_bound is None else lower_bound / (1 + torch.exp(-rate * x[t, h]))
            qt, kt = (y[t, h] / (y[t, h] @ y[t, h] + 1e-6).sqrt() for y in (q, k))
            s = g.exp()[:, None] * state[h].T
            s = s + torch.outer(kt, beta[t, h] * (v[t, h] - kt @ s))
            state[h] = s.T
            o = (qt * len(qt) ** -0.5) @ s
            outs.append(o / (o.square().mean() + 1e-5).sqrt() * w.o_norm / (1 + torch.exp(-gate[t, h])))
    return torch.stack(outs).view(len(hidden), -1) @ w.o_proj.T


def transcription(given: dict) -> Tensor:
    """`transcribed` for each sequence of the batch."""
    batch: Batch = given["batch"]
    ends = [0] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    ends += range(ends[-1] + 1, len(given["hidden"]) + 1)
    outs = []
    for i, slot in enumerate(batch.slots.tolist()):
        if batch.fresh is not None and batch.fresh[i]:
            given["state"][slot], given["window"][slot] = 0, 0
        rows = given["hidden"][ends[i] : ends[i + 1]]
        outs.append(transcribed(rows, given["weights"], given["state"][slot], given["window"][slot], given["lower_bound"]))
    return torch.cat(outs)


MIXTURES = [((), 3), ((4, 1, 2), 0), ((3, 0, 2), 2), ((0,), 1), ((5,), 1)]


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("lengths", "generations"), MIXTURES, ids=str)
def test_every_mixture_follows_the_transcription(lengths: tuple[int, ...], generations: int, lower_bound: float | None) -> None:
    given = case(*lengths, generations=generations) | {"lower_bound": lower_bound}
    expected = copied(given)
    out = kda_mixer.mixer(**given)
    torch.testing.assert_close(out, transcription(expected))
    torch.testing.assert_close(given["state"], expected["state"])
    torch.testing.assert_close(given["window"], expected["window"])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_outputs_of_all_ranks_sum_to_the_whole(world: int) -> None:
    """A_log and dt_bias differ by head, so that a rank with another's heads shows. Pools are cut by heads too."""
    given = case(3, 2, generations=2)
    total, states = torch.zeros_like(given["hidden"]), []
    for rank in range(world):
        own = shard(given["weights"], rank, world)
        heads = slice(rank * 4 // world, (rank + 1) * 4 // world)
        sections = [x.unflatten(2, (4, -1))[:, :, heads].flatten(2) for x in given["window"].split([24, 24, 12], dim=2)]
        pools = dict(state=given["state"][:, heads].clone(), window=torch.cat(sections, dim=2))
        total += kda_mixer.mixer(**{**given, **pools, "weights": own})
        states.append(pools["state"])
    torch.testing.assert_close(total, kda_mixer.mixer(**given))
    torch.testing.assert_close(torch.cat(states, dim=1), given["state"])


def test_a_rank_holds_its_own_heads_in_its_own_memory() -> None:
    whole = layer()
    own = shard(whole, 1, 2)
    assert torch.equal(own.A_log, whole.A_log[2:]) and torch.equal(own.dt_bias, whole.dt_bias[12:])
    assert torch.equal(own.o_proj, whole.o_proj[:, 6:]) and own.o_proj.is_contiguous()
    sharded = [name for name in NAMES if getattr(own, name) is not getattr(whole, name)]
    assert set(NAMES) - set(sharded) == {"f_a_proj", "g_a_proj", "o_norm"}
    assert all(getattr(own, name).untyped_storage().nbytes() == getattr(own, name).nbytes for name in sharded)


@pytest.mark.parametrize(("rank", "world", "named"), [(0, 3, "world"), (0, 0, "world"), (2, 2, "rank"), (-1, 2, "rank")])
def test_a_shard_that_cannot_be_is_refused(rank: int, world: int, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}: expected .*, got -?\d; "):
        shard(layer(), rank, world)


def test_a_mixture_is_its_parts_run_apart() -> None:
    given = case(3, 2, generations=2)
    apart, batch, out = copied(given), given["batch"], kda_mixer.mixer(**given)
    first = Batch(batch.slots[:2], batch.cu_seqlens, batch.fresh[:2])
    rest = Batch(batch.slots[2:].clone(), None, batch.fresh[2:].clone())
    outs = [kda_mixer.mixer(**{**apart, "hidden": x, "batch": b}) for x, b in ((given["hidden"][:5], first), (given["hidden"][5:], rest))]
    torch.testing.assert_close(out, torch.cat(outs))
    torch.testing.assert_close(given["state"], apart["state"])


def test_padding_and_slots_not_named_stay_as_they_are() -> None:
    given = case(2, 2, generations=2, dtype=torch.bfloat16)
    given["batch"] = replace(given["batch"], slots=torch.tensor([0, -1, SLOTS, 3], dtype=torch.int32))
    given["hidden"][2:5] = NAN
    for pool in (given["state"], given["window"]):
        pool[[1, 2, 4, 5]] = NAN
    before = copied(given)
    out = kda_mixer.mixer(**given)
    assert (out[2:5] == 0).all() and out[[0, 1, 5]].isfinite().all()
    for name in ("state", "window"):
        bits = torch.int32 if given[name].dtype == torch.float32 else torch.int16
        assert torch.equal(given[name][[1, 2, 4, 5]].view(bits), before[name][[1, 2, 4, 5]].view(bits))
        assert not torch.equal(given[name][[0, 3]], before[name][[0, 3]])


def test_the_points_stand_in_the_order_of_computation_and_low_ranks_have_theirs() -> None:
    seen: dict[str, Tensor] = {}
    kda_mixer.mixer(**case(generations=2), at=tapped(seen, points=KDA_MIXER))
    assert tuple(seen) == (*KDA_MIXER[:6], *KDA_CELL, "o_proj")
    assert seen["proj_qkv"].shape == (2, 60) and seen["proj_f_a"].shape == seen["proj_g_a"].shape == (2, RANK)
    assert [seen[name].shape[1] for name in ("proj_f", "proj_g", "proj_b", "o_proj")] == [24, 12, 4, HIDDEN]


def test_a_contract_of_the_mixer_rounds_its_points_and_what_the_cell_stores() -> None:
    rounds = {point: ACTIVATION for point in ("proj_qkv", "proj_f_a", "out")}
    contract = Contract(rounds=rounds, points=KDA_MIXER)
    seen: dict[str, Tensor] = {}
    kda_mixer.mixer(**case(generations=1), at=tapped(seen, rounding(contract.resolve(torch.bfloat16)), KDA_MIXER))
    assert [name for name in seen if torch.equal(seen[name].bfloat16().double(), seen[name])] == list(rounds)
    for refused, points in (("o_proj", KDA_MIXER), ("state", KDA_MIXER), ("out", KDA), ("proj_qkv", KDA)):
        with pytest.raises(ValueError, match=rf"contract: {refused} can't round"):
            Contract(rounds={refused: ACTIVATION}, points=points)


def test_bf16_inputs_are_computed_in_fp32_and_stored_in_bf16() -> None:
    given = case(3, generations=2, dtype=torch.bfloat16)
    double = {name: x.double() if isinstance(x, Tensor) else x for name, x in copied(given).items()}
    double["weights"] = KdaWeights(**{name: getattr(given["weights"], name).double() for name in NAMES})
    out, gold = kda_mixer.mixer(**given), kda_mixer.mixer(**double)
    assert (out.dtype, given["window"].dtype, gold.dtype) == (torch.bfloat16, torch.bfloat16, torch.float64)
    torch.testing.assert_close(out, gold.bfloat16())
    torch.testing.assert_close(given["state"], double["state"].float())
    assert torch.equal(given["window"], double["window"].bfloat16())


BAD: list[tuple[str, str, type[Exception], Callable[[dict], dict]]] = [
    ("hidden", "another dtype", TypeError, lambda x: dict(hidden=x["hidden"].float())),
    ("hidden", "another width", ValueError, lambda x: dict(hidden=x["hidden"][:, 1:])),
    ("hidden", "a vector", TypeError, lambda x: dict(hidden=x["hidden"][0])),
    ("hidden", "elements apart", ValueError, lambda x: dict(hidden=x["hidden"].repeat_interleave(2, 1)[:, ::2])),
    ("hidden", "fewer rows than generations", ValueError, lambda x: dict(hidden=x["hidden"][:1], batch=Batch(x["batch"].slots))),
    ("hidden", "more rows than generations", ValueError, lambda x: dict(batch=Batch(x["batch"].slots))),
    ("weights", "a dictionary", TypeError, lambda x: dict(weights=vars(x["weights"]))),
    ("batch", "slots alone", TypeError, lambda x: dict(batch=x["batch"].slots)),
    ("batch.cu_seqlens", "more contexts than slots", ValueError, lambda x: dict(batch=replace(x["batch"], cu_seqlens=torch.zeros(9)))),
    ("batch.cu_seqlens", "64 bits", TypeError, lambda x: dict(batch=replace(x["batch"], cu_seqlens=x["batch"].cu_seqlens.long()))),
    ("cu_seqlens", "a token too many", ValueError, lambda x: dict(batch=replace(x["batch"], cu_seqlens=x["batch"].cu_seqlens + 1))),
    ("slots", "64 bits", TypeError, lambda x: dict(batch=replace(x["batch"], slots=x["batch"].slots.long()))),
    ("slots", "a slot twice", ValueError, lambda x: dict(batch=replace(x["batch"], slots=torch.full_like(x["batch"].slots, 2)))),
    ("fresh", "a flag too few", ValueError, lambda x: dict(batch=replace(x["batch"], fresh=x["batch"].fresh[1:]))),
    ("state", "K and V swapped", ValueError, lambda x: dict(state=x["state"].mT.contiguous())),
    ("window", "another dtype", TypeError, lambda x: dict(window=x["window"].float())),
    ("lower_bound", "positive", ValueError, lambda x: dict(lower_bound=1.0)),
    ("norm_eps", "zero", ValueError, lambda x: dict(norm_eps=0.0)),
    *(
        (name, "a row too many", ValueError, lambda x, name=name: with_weight(x, name, lambda w: torch.cat([w, w])))
        for name in NAMES if name not in ("A_log", "q_proj", "v_proj", "f_a_proj")
    ),
    ("q_proj", "heads that don't divide its rows", ValueError, lambda x: with_weight(x, "A_log", lambda w: torch.zeros(7))),
    ("f_b_proj", "another rank", ValueError, lambda x: with_weight(x, "f_a_proj", lambda w: torch.cat([w, w]))),
    ("A_log", "four dimensions", TypeError, lambda x: with_weight(x, "A_log", lambda w: w[None, None, :, None])),
    ("A_log", "halves", TypeError, lambda x: with_weight(x, "A_log", Tensor.half)),
    ("o_proj", "another dtype", TypeError, lambda x: with_weight(x, "o_proj", Tensor.float)),
]  # fmt: skip


@pytest.mark.parametrize(("named", "what", "kind", "change"), BAD, ids=[f"{case[0]}-{case[1]}" for case in BAD])
def test_what_is_refused_is_named_and_touches_nothing(named: str, what: str, kind: type[Exception], change: Callable[[dict], dict]) -> None:
    given = case(2, 1, generations=1)
    changed = copied(given) | change(given)
    pools = {name: changed[name].clone() for name in ("state", "window")}
    with pytest.raises(kind, match=rf"^{named}: expected .+, got .+; .{{10,}}") as raised:
        kda_mixer.mixer(**changed)
    assert type(raised.value) is kind
    assert all(torch.equal(changed[name], pool) for name, pool in pools.items())


def drafted(contexts: tuple[int, ...], accepted: list[int], drafts: int = 2, shared: bool = True) -> dict:
    """Arguments of `mixer` whose generations verify drafts, their caches filled."""
    count = len(accepted)
    given = case(*contexts, generations=count * (1 + drafts))
    counts = torch.tensor(accepted, dtype=torch.int32)
    slots = torch.arange(SLOTS, dtype=torch.int32).flip(0)[: len(contexts) + count].contiguous()
    offsets = kda_offsets.offsets(counts, drafts) if shared else None
    replay = Replay.empty(given["state"], given["window"], drafts)
    for i, cache in enumerate((replay.qkv, replay.f, replay.beta)):
        cache.normal_(generator=torch.Generator().manual_seed(i))
    batch = Batch(slots, given["batch"].cu_seqlens, None, drafts, counts, offsets)
    return given | {"batch": batch, "replay": replay}


@pytest.mark.parametrize("shared", [True, False], ids=["model", "layer"])
@pytest.mark.parametrize("contexts", [(), (3, 0)], ids=str)
def test_a_verify_leaves_what_decoding_the_accepted_tokens_leaves(contexts: tuple[int, ...], shared: bool) -> None:
    """Two rounds: 2 and 3 of the first are accepted. The second's golden tokens follow decode steps of these, one by one."""
    first = drafted(contexts, [0, 0], shared=shared)
    second = drafted((), [2, 3], shared=shared)
    slots = first["batch"].slots[len(contexts) :]
    pools = copied(first)
    kda_mixer.mixer(**pools)
    second |= {name: pools[name] for name in ("state", "window", "replay")}
    second["batch"] = replace(second["batch"], slots=slots)
    out = kda_mixer.mixer(**second)

    byhand, skip = copied(first), sum(contexts)
    for sequence, count in enumerate((2, 3)):
        rows = [first["hidden"][skip + sequence * 3 + i] for i in range(count)] + [second["hidden"][sequence * 3]]
        for row in rows:
            step = dict(hidden=row[None], batch=Batch(slots[sequence : sequence + 1]), replay=None)
            last = kda_mixer.mixer(**{**byhand, **step})
        torch.testing.assert_close(last[0], out[sequence * 3])
    for name in ("state", "window"):
        torch.testing.assert_close(pools[name][slots.long()], byhand[name][slots.long()])


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        (dict(replay=None), TypeError, "replay: expected a kda_replay.Replay, got NoneType"),
        (dict(drafts=1), ValueError, "hidden: expected 4 rows, 2 for each generation"),
        (dict(accepted=None), TypeError, "batch.accepted: "),
        (dict(accepted=torch.tensor([1, 4], dtype=torch.int32), offsets=None), ValueError, "accepted: expected counts in 0..3"),
        (dict(accepted=torch.tensor([1, 2], dtype=torch.int32)), ValueError, "offsets: pending: expected [0, 1], got [0, 2]"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(change: dict, kind: type[Exception], named: str) -> None:
    given = drafted((), [0, 3])
    own = {name: x for name, x in change.items() if name == "replay"}
    batch = replace(given["batch"], **{name: x for name, x in change.items() if name != "replay"})
    before = given["state"].clone()
    with pytest.raises(kind, match=rf"^{re.escape(named)}"):
        kda_mixer.mixer(**{**given, "batch": batch, **own})
    assert torch.equal(given["state"], before)
