"""The fused mixer in the interpreter: within the gate from its own projections on, on one copy of the weights, with no copy of them."""

import gc
import importlib
import importlib.util
import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimized import gemm_tiles, interpreter
from optimized.arch import CPU, GPUS
from optimized.gemm_tiles import GemmTile, MixerPlan
from optimized.kda_fused import COUNTERS, FusedWeights, fuse, fuse_layers
from parity import limits, metrics
from parity.buffers import same_bits
from reference import kda_mixer as reference
from reference.batch import Batch
from reference.kda_weights import NAMES, KdaWeights, shard
from reference.points import At, rounding

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import gemm, kda_decode, kda_mixer, kda_prefill
from optimized.peers import eager_mixer, fla_mixer

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

HIDDEN, RANK, SLOTS = 96, 16, 8
NAN = float("nan")
TILE = GemmTile(64, 16, 32, 2, 4, 1)
OURS = MixerPlan(True, TILE, None, TILE, TILE)
APART = MixerPlan(False, TILE, TILE, TILE, TILE)
LIBRARY = MixerPlan()
OVERLAP = MixerPlan(False, TILE, TILE, None, TILE, overlap=True)
BF16 = torch.bfloat16


def layer(heads: int, key_dim: int = 8, value_dim: int = 4, dtype: torch.dtype = BF16, seed: int = 0) -> KdaWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    key, value = heads * key_dim, heads * value_dim
    return KdaWeights(
        q_proj=linear(key, HIDDEN), k_proj=linear(key, HIDDEN), v_proj=linear(value, HIDDEN), b_proj=linear(heads, HIDDEN),
        f_a_proj=linear(RANK, HIDDEN), f_b_proj=linear(key, RANK), g_a_proj=linear(RANK, HIDDEN), g_b_proj=linear(value, RANK),
        q_conv1d=normal(key, 1, 4, scale=0.5), k_conv1d=normal(key, 1, 4, scale=0.5), v_conv1d=normal(value, 1, 4, scale=0.5),
        A_log=normal(heads, scale=0.3, dtype=torch.float32), dt_bias=normal(key, dtype=torch.float32), o_norm=normal(value_dim),
        o_proj=linear(HIDDEN, value),
    )  # fmt: skip


def case(
    *lengths: int, generations: int = 0, heads: int = 2, dtype: torch.dtype = BF16, slots: int = SLOTS, **sizes: int
) -> dict[str, Any]:
    """Arguments of `mixer`, with separate weights: contexts of these lengths, then generations; every second sequence is fresh."""
    generator, tokens, sequences = torch.Generator().manual_seed(1), sum(lengths) + generations, len(lengths) + generations
    weights = layer(heads, dtype=dtype, **sizes)
    key_dim, value_dim = len(weights.q_proj) // heads, len(weights.v_proj) // heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ends = torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None
    named = torch.arange(slots, dtype=torch.int32).flip(0)[:sequences].contiguous()
    return dict(
        hidden=normal(tokens, HIDDEN).to(dtype), weights=weights, state=normal(slots, heads, value_dim, key_dim),
        window=normal(slots, 3, heads * (2 * key_dim + value_dim)).to(dtype),
        batch=Batch(named, ends, torch.arange(sequences) % 2 == 1), lower_bound=-5.0, norm_eps=1e-5,
    )  # fmt: skip


def fused(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with fused weights and pools of their own."""
    return {**given, "weights": fuse(given["weights"]), "state": given["state"].clone(), "window": given["window"].clone()}


def ratio(candidate: Tensor, gold: Tensor, floor: Tensor, stored: torch.dtype | None = None) -> float:
    """How many times its limit a tensor is from its gold, rows being sequences."""
    rows = [x if x.ndim > 2 else x[:, None] for x in (candidate, gold, floor)]
    m = metrics.moments(rows[0], rows[1], rows[1], rows[2], stored or candidate.dtype)
    return metrics.noise_ratio(m).over(limits.boundary(stored or candidate.dtype))


class Rerun:
    """What one run of the reference held at each call of a point, for the next run to go on from."""

    def __init__(self, *points: str) -> None:
        self.seen: dict[str, list[Tensor]] = {point: [] for point in points}

    def record(self, inner: At) -> At:
        def at(name: str, x: Tensor) -> Tensor:
            x = inner(name, x)
            if name in self.seen:
                self.seen[name].append(x)
            return x

        return at

    def graft(self, inner: At) -> At:
        return lambda name, x: self.seen[name].pop(0).to(x.dtype) if self.seen.get(name) else inner(name, x)


def away(plan: MixerPlan, given: dict[str, Any]) -> float:
    """Run it; how many times its limit the worst of projections, output and state is from FP64, each from the candidate's own inputs.

    Rows of padding are not asked.
    """
    candidate, weights, hidden = fused(given), given["weights"], given["hidden"]
    projected = kda_mixer.project(plan, hidden, candidate["weights"])
    low = hidden @ torch.cat([weights.f_a_proj, weights.g_a_proj]).T  # CPU: FP32 sums, then one rounding
    inputs = dict.fromkeys(("q", "k", "v", "beta"), hidden) | dict(f=low[:, :RANK], gate=low[:, RANK:])
    names = dict(q="q_proj", k="k_proj", v="v_proj", beta="b_proj", f="f_b_proj", gate="g_b_proj")
    worst = 0.0
    for name, x in inputs.items():
        w: Tensor = getattr(weights, names[name])
        worst = max(worst, ratio(projected[name], x.double() @ w.double().T, x.float() @ w.float().T))

    out = kda_mixer.run(plan, **candidate)
    own = dict(
        proj_qkv=torch.cat([projected[name] for name in "qkv"], 1), proj_f=projected["f"], proj_g=projected["gate"],
        proj_b=projected["beta"],
    )  # fmt: skip
    cell = Rerun("out")
    gold, floor = wide(given, torch.float64), wide(given, torch.float32)
    gold_out = reference.mixer(**gold, at=cell.record(grafted(own, rounding(kda_mixer.CONTRACT.resolve(hidden.dtype)))))
    floor_out = reference.mixer(**floor, at=cell.graft(grafted(own)))
    worst = max(worst, ratio(out, gold_out, floor_out))
    named = given["batch"].slots[(given["batch"].slots >= 0) & (given["batch"].slots < len(given["state"]))].long()
    if not torch.equal(candidate["window"][named].double(), gold["window"][named]):
        return torch.inf
    return max(worst, ratio(*(side["state"][named] for side in (candidate, gold, floor)), given["state"].dtype))


def grafted(values: dict[str, Tensor], inner: At = lambda name, x: x) -> At:
    return lambda name, x: values[name].to(x.dtype) if name in values else inner(name, x)


def wide(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The reference's arguments in another dtype, over pools of their own."""
    tensors = {name: x.to(dtype, copy=True) if isinstance(x, Tensor) else x for name, x in given.items()}
    return tensors | {"weights": KdaWeights(**{name: getattr(given["weights"], name).to(dtype) for name in NAMES})}


PLANS = pytest.mark.parametrize("plan", [OURS, APART, LIBRARY, OVERLAP], ids=["ours", "apart", "library", "overlap"])


@PLANS
def test_every_plan_is_within_the_gate(plan: MixerPlan) -> None:
    assert away(plan, case(generations=3)) <= 1


@PLANS
@pytest.mark.parametrize(("lengths", "generations"), [((4, 1), 0), ((3, 0, 2), 2), ((20,), 1)], ids=str)
def test_a_mixture_is_the_cells_on_their_own_rows(lengths: tuple[int, ...], generations: int, plan: MixerPlan) -> None:
    """The two cells, which have tests of their own, called by hand; to the bit."""
    given = case(*lengths, generations=generations)
    candidate, byhand, tokens, count = fused(given), fused(given), sum(lengths), len(lengths)
    x, batch, weights = kda_mixer.project(plan, byhand["hidden"], byhand["weights"]), byhand["batch"], byhand["weights"]
    layer = dict(
        conv_weight=weights.conv, a_log=weights.A_log, dt_bias=weights.dt_bias, norm_weight=weights.o_norm,
        **{name: byhand[name] for name in ("state", "window", "lower_bound", "norm_eps")},
    )  # fmt: skip
    first, rest = ({name: value[rows] for name, value in x.items()} for rows in (slice(tokens), slice(tokens, None)))
    contexts = dict(cu_seqlens=batch.cu_seqlens, slots=batch.slots[:count], fresh=batch.fresh[:count])
    mixed = [kda_prefill.prefill(**first, **layer, **contexts)]
    mixed.append(kda_decode.decode(**rest, **layer, slots=batch.slots[count:], fresh=batch.fresh[count:]))
    out = kda_mixer.run(plan, **candidate)
    assert ratio(out, *(torch.cat(mixed).to(d) @ weights.o_proj.to(d).T for d in (torch.float64, torch.float32))) <= 1
    assert same_bits(candidate["state"], byhand["state"]) and same_bits(candidate["window"], byhand["window"])


def test_contexts_lie_near_the_reference() -> None:
    given = case(20, 3, generations=2)
    out, gold = kda_mixer.mixer(**fused(given)), reference.mixer(**wide(given, torch.float64))
    assert (out - gold).norm() < limits.OTHER_CONFIGURATION * gold.norm()


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 32, 64])
def test_head_counts_are_within_the_gate(heads: int) -> None:
    assert away(OURS, case(generations=1, heads=heads, key_dim=4, value_dim=4)) <= 1


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("dtype", "plan"), [(BF16, OURS), (torch.float16, OURS), (torch.float32, LIBRARY)])
def test_dtypes_and_the_softplus_gate_are_within_the_gate(dtype: torch.dtype, plan: MixerPlan, state_dtype: torch.dtype) -> None:
    given = case(generations=3, dtype=dtype) | {"lower_bound": None}
    assert away(plan, given | {"state": given["state"].to(state_dtype)}) <= 1


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_within_the_gate_sum_to_the_whole(world: int) -> None:
    whole = case(generations=2, heads=4)
    total = torch.zeros(2, HIDDEN, dtype=torch.float64)
    for rank in range(world):
        own = shard(whole["weights"], rank, world)
        heads = slice(rank * 4 // world, (rank + 1) * 4 // world)
        sections = [x.unflatten(2, (4, -1))[:, :, heads].flatten(2) for x in whole["window"].split([32, 32, 16], dim=2)]
        given = {**whole, "weights": own, "state": whole["state"][:, heads].contiguous(), "window": torch.cat(sections, dim=2)}
        assert away(OURS, given) <= 1
        total += reference.mixer(**wide(given, torch.float64))
    torch.testing.assert_close(total, reference.mixer(**wide(whole, torch.float64)))


@pytest.mark.parametrize("plan", [OURS, APART], ids=["merged", "apart"])
def test_activations_are_views_of_the_projections(plan: MixerPlan) -> None:
    given = fused(case(generations=5))
    x = kda_mixer.project(plan, given["hidden"], given["weights"])
    assert x["q"].data_ptr() + 16 * 2 == x["k"].data_ptr() and x["k"].data_ptr() + 16 * 2 == x["v"].data_ptr()
    assert x["f"].data_ptr() + 16 * 2 == x["gate"].data_ptr()
    wide = 40 + 2 * RANK + 2
    assert {x[name].stride() for name in "qkv"} == {(wide if plan.merged else 40, 1)}
    assert x["beta"].stride() == (wide if plan.merged else 2 * RANK + 2, 1) and x["f"].stride() == (24, 1)
    assert (x["beta"].data_ptr() == x["q"].data_ptr() + (wide - 2) * 2) == plan.merged


@pytest.mark.parametrize(("plan", "gemms"), [(OURS, 3), (APART, 4), (LIBRARY, 0)], ids=["ours", "apart", "library"])
def test_a_generation_batch_is_one_launch_for_each_product_and_one_for_the_cell(plan: MixerPlan, gemms: int) -> None:
    with interpreter.launches() as launched:
        kda_mixer.run(plan, **fused(case(generations=3)))
    assert launched == {name: n for name, n in (("linear_kernel", gemms), ("kda_decode_kernel", 1)) if n}


class Copies(TorchDispatchMode):
    """Torch operators that move values, as they are seen to run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy", "cat", "stack"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("value_dim", [4, 8], ids=["two products", "batched product"])
def test_the_library_reads_the_projections_where_they_are(value_dim: int) -> None:
    given = fused(case(generations=3, value_dim=value_dim))
    with Copies() as copies:
        kda_mixer.project(LIBRARY, given["hidden"], given["weights"])
    assert copies.seen == []


def test_the_second_stream_changes_no_bit() -> None:
    given = case(generations=3)
    out, beside = (kda_mixer.run(plan, **fused(given)) for plan in (replace(OVERLAP, overlap=False), OVERLAP))
    assert same_bits(out, beside)


@pytest.mark.parametrize("plan", [OURS, OVERLAP], ids=["merged", "overlap"])
def test_the_cell_starts_early_unless_it_waits_for_two_streams(plan: MixerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    early = []
    monkeypatch.setattr(kda_mixer.arch, "of_device", lambda device: "sm90")
    monkeypatch.setattr(kda_decode, "launch", lambda tile, sizes, q, k, v, **given: early.append(tile.pdl) or v)
    kda_mixer.run(plan, **fused(case(generations=1)))
    assert early == [not plan.overlap]


@pytest.mark.parametrize("plan", [OURS, OVERLAP], ids=["merged", "overlap"])
def test_the_order_of_programs_changes_no_bit(plan: MixerPlan) -> None:
    given = case(generations=3)
    first, second = fused(given), fused(given)
    with interpreter.program_order(reverse=True):
        out = kda_mixer.run(plan, **first)
    assert same_bits(kda_mixer.run(plan, **second), out)
    assert same_bits(first["state"], second["state"]) and not second["weights"].arrivals.any()


def test_padding_reads_nothing_writes_nothing_and_returns_zeros() -> None:
    given = case(2, generations=3)
    given["batch"] = replace(given["batch"], slots=torch.tensor([-1, 1, SLOTS, 3], dtype=torch.int32))
    given["hidden"][[0, 1, 3]] = NAN
    candidate = fused(given)
    for name in ("state", "window"):
        candidate[name][[0, 2, 4, 5, 6, 7]] = NAN
    before = {name: candidate[name].clone() for name in ("state", "window")}
    out = kda_mixer.mixer(**candidate)
    assert (out[[0, 1, 3]] == 0).all() and out[[2, 4]].isfinite().all()
    assert all(same_bits(candidate[name][[0, 2, 4, 5, 6, 7]], x[[0, 2, 4, 5, 6, 7]]) for name, x in before.items())
    rest = fused(
        {**given, "hidden": given["hidden"][[2, 4]], "batch": Batch(given["batch"].slots[[1, 3]], None, given["batch"].fresh[[1, 3]])}
    )
    assert same_bits(kda_mixer.mixer(**rest), out[[2, 4]])


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_a_batch_of_no_rows_is_legal(lengths: tuple[int, ...]) -> None:
    assert kda_mixer.mixer(**fused(case(*lengths))).shape == (0, HIDDEN)


def test_fused_weights_are_the_checkpoints_bit_for_bit_and_share_their_memory() -> None:
    weights = layer(3)
    one = fuse(weights)
    for name, x in vars(one.separate()).items():
        assert same_bits(x, getattr(weights, name)), name
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in vars(one).values() if isinstance(x, Tensor)}
    assert {x.untyped_storage().data_ptr() for x in vars(one.separate()).values()} <= set(held)
    assert sum(held.values()) - one.arrivals.nbytes == sum(x.nbytes for x in vars(weights).values())


def test_fusing_layers_frees_each_before_the_next() -> None:
    layers = [layer(2, seed=seed) for seed in range(3)]
    kept = ("A_log", "dt_bias", "o_norm", "o_proj")
    sources = [[weakref.ref(getattr(weights, name)) for name in NAMES if name not in kept] for weights in layers]
    done: list[FusedWeights] = []
    for one in fuse_layers(layers):
        done.append(one)
        gc.collect()
        assert [any(source() is not None for source in layer) for layer in sources] == [i >= len(done) for i in range(3)]
    assert len(done) == 3 and layers == []


def test_every_plan_of_the_table_has_the_counters_it_needs() -> None:
    for rule in gemm_tiles.PLANS:
        tokens, plan, heads = rule.tokens or 4096, rule.plan, 24 if rule.elements else 96
        rows = heads * 3 * 128 + 256 + heads
        needed = [
            gemm.arrivals_of(tile, tokens, n, first) if tile else 0
            for tile, n, first in ((plan.wide, rows, None), (plan.gates, 256 * heads, 128 * heads), (plan.out, 7168, None))
        ]
        assert max(needed) <= COUNTERS, rule
        assert rule.elements is None or 24 * 3 * 128 * 4096 < rule.elements < 32 * 3 * 128 * 4096


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_the_table_answers_everywhere_and_takes_the_library_for_many_tokens(dtype: torch.dtype) -> None:
    for arch in (CPU, *GPUS):
        few, many = (gemm_tiles.plan(arch, dtype, tokens, 10**8) for tokens in (1, 65))
        assert few.merged == (dtype != torch.float32) and many.wide is None and many.overlap == (arch != CPU and dtype != torch.float32)
    with pytest.raises(ValueError, match=r"plan: none for torch\.float64 on cpu; add a row to PLANS"):
        gemm_tiles.plan(CPU, torch.float64, 1, 1)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [(dict(merged=True, overlap=True), "neither overlap"), (dict(overlap=True, gates=replace(TILE, pdl=True)), "pdl=False")],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MixerPlan(**wrong)


REFUSED: list[tuple[str, type[Exception], Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("weights", TypeError, lambda x: dict(weights=x["weights"].separate())),
    ("hidden", TypeError, lambda x: dict(hidden=x["hidden"].half())),
    ("hidden", ValueError, lambda x: dict(hidden=x["hidden"][:2])),
    ("hidden", TypeError, lambda x: fused(case(generations=3, dtype=torch.float64))),
    ("slots", ValueError, lambda x: dict(batch=Batch(torch.ones(3, dtype=torch.int32)))),
    ("state", TypeError, lambda x: dict(state=x["state"].half())),
    ("cu_seqlens", ValueError, lambda x: dict(batch=replace(x["batch"], cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)))),
]


@pytest.mark.parametrize(("named", "kind", "change"), REFUSED, ids=[f"{i}-{x[0]}" for i, x in enumerate(REFUSED)])
def test_what_is_refused_is_named_and_touches_nothing(named: str, kind: type[Exception], change: Callable[[dict], dict]) -> None:
    given = fused(case(generations=3))
    before = given["state"].clone()
    with pytest.raises(kind, match=rf"^{named}: expected .+, got .+; .{{10,}}"):
        kda_mixer.mixer(**{**given, **change(given)})
    assert same_bits(given["state"], before)


@pytest.mark.parametrize("mixer", [kda_mixer.mixer, eager_mixer.mixer, fla_mixer.mixer], ids=["triton", "torch", "fla"])
def test_the_signature_is_the_references_but_for_points_and_the_form_of_the_weights(mixer: Callable[..., Tensor]) -> None:
    expected = inspect.signature(inspect.unwrap(reference.mixer)).parameters
    found = inspect.signature(inspect.unwrap(mixer)).parameters
    assert {name: (p.kind, p.default) for name, p in found.items()} == {k: (p.kind, p.default) for k, p in expected.items() if k != "at"}


@pytest.mark.parametrize("peer", ["eager_mixer", "fla_mixer"])
def test_peers_take_separate_weights_and_lie_near_the_reference(peer: str) -> None:
    if peer == "fla_mixer" and importlib.util.find_spec("fla") is None:
        pytest.skip("needs fla-core")
    mixer = importlib.import_module(f"optimized.peers.{peer}").mixer
    given = case(generations=3)
    out = mixer(**{**given, "state": given["state"].clone(), "window": given["window"].clone()})
    gold = reference.mixer(**wide(given, torch.float64))
    assert (out - gold).norm() < limits.OTHER_CONFIGURATION * gold.norm()


def test_flas_peer_refuses_contexts() -> None:
    with pytest.raises(ValueError, match=r"^batch: expected generations only, got 2 contexts; "):
        fla_mixer.mixer(**case(3, 1, generations=1))
