"""The fused decode kernel in the interpreter: judged by the gate, and in single steps at sizes that no preset has."""

import importlib.util
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import interpreter, registry
from optimized.peers import eager
from optimized.tiles import Tile
from parity import limits, metrics
from parity.buffers import same_bits
from parity.catalog import signature
from parity.gate import judge
from parity.oracle import Oracle
from parity.problem import Problem
from parity.tokens import Tokens
from reference import kda, validate
from reference.points import Contract

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import kda_decode

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

ACTIVATIONS = ("q", "k", "v", "f", "beta", "gate")
WEIGHTS = ("conv_weight", "a_log", "dt_bias", "norm_weight")
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
DTYPES = [(dtype, state) for dtype in ("bf16", "fp16", "fp32") for state in ("fp32", "bf16")]
NAN = float("nan")

Cell = dict[str, Any]
Decode = Callable[..., Tensor]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cell(
    *slots: int,
    pool: int = 4,
    heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changed: Any,
) -> Cell:
    """Arguments of one call of `decode` for these slots."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    qk, hv = heads * key_dim, heads * value_dim
    widths = dict(q=qk, k=qk, v=hv, f=qk, beta=heads, gate=hv)
    given = {name: normal(len(slots), width) for name, width in widths.items()} | dict(
        conv_weight=normal(2 * qk + hv, 4, scale=0.5),
        a_log=normal(heads, scale=0.3, dtype=torch.float32),
        dt_bias=normal(qk, dtype=torch.float32),
        norm_weight=normal(value_dim),
        state=normal(pool, heads, value_dim, key_dim, dtype=state_dtype),
        window=normal(pool, 3, 2 * qk + hv),
        slots=int32(*slots),
        lower_bound=-5.0,
        norm_eps=1e-5,
    )
    return given | changed


def away(decode: Decode, given: Cell, contract: Contract | None = None) -> float:
    """Call it; how many times its limit the worst of output and state is from FP64 gold. Infinite when the window isn't exact."""
    slots, fresh, heads = given["slots"], given.get("fresh"), given["beta"].shape[1]
    live = (slots >= 0) & (slots < len(given["state"]))
    rows = slots[live].long()
    state, window = given["state"][rows], given["window"][rows]
    if fresh is not None:
        state[fresh[live]], window[fresh[live]] = 0, 0
    out = decode(**given)[live].unflatten(1, (heads, -1))

    settings = {"norm_eps": 1e-5} | {name: given[name] for name in ("lower_bound", "norm_eps") if name in given}
    problem = SimpleNamespace(activation=given["q"].dtype, heads=heads)
    oracle = Oracle(SimpleNamespace(problem=problem, weights={name: given[name] for name in WEIGHTS}, settings=settings), contract)  # type: ignore[arg-type]
    x = Tokens.single({name: given[name][live] for name in ACTIVATIONS})
    gold, exact = oracle.gold(x, state, window), oracle.exact(x, state, window)
    floor = oracle.floor(x, state, window, gold)
    if not torch.equal(given["window"][rows].double(), gold.window):
        return torch.inf
    worst = 0.0
    for name, candidate in (("out", out), ("state", given["state"][rows])):
        m = metrics.moments(candidate, *(getattr(side, name) for side in (gold, exact, floor)), candidate.dtype)
        worst = max(worst, metrics.noise_ratio(m).over(limits.boundary(candidate.dtype)))
    return worst


def verdict(**problem: Any) -> str:
    row = judge(Problem("kda.decode", **{"steps": 2, **problem}), registry.find("kda.decode", "triton"))
    print(row["case"], row["verdict"], row["reason"])
    return f"{row['verdict']} {row['reason']}".strip()


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count_is_within_the_step_gate(heads: int) -> None:
    assert away(kda_decode.decode, cell(1, pool=2, heads=heads, key_dim=4, value_dim=2)) <= 1


@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)])
def test_heads_and_batches_pass_every_check(heads: int, batch: int) -> None:
    assert verdict(model="tiny", heads=heads, batch=batch) == "PASS"


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_dtypes_pass(dtype: str, state_dtype: str) -> None:
    assert verdict(model="tiny", heads=1, batch=1, dtype=dtype, state_dtype=state_dtype) == "PASS"


@pytest.mark.parametrize("model", ["glm-5.3-flash", "kimi-linear-48b"])
@pytest.mark.parametrize("regime", ["random", "slow", "sharp", "spiky", "adversarial"])
def test_regimes_pass_with_both_gates(model: str, regime: str) -> None:
    batch = 2 if regime == "adversarial" else 1  # its zero rows need two sequences
    assert verdict(model=model, heads=1, batch=batch, regime=regime) == "PASS"


@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("rows", [8, 16, 32, 128])
def test_every_tile_is_within_the_gate(rows: int, stages: int) -> None:
    def launched(**given: Any) -> Tensor:
        given["fresh"] = None
        return kda_decode.launch(tile=Tile(rows, 4, stages), sizes=validate.kda_decode(**given), **given)

    assert away(launched, cell(3, 0, key_dim=16, value_dim=72)) <= 1


@pytest.mark.parametrize("poison", [NAN, 1e4])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(60, 40), (100, 40), (60, 100), (40, 60)])
def test_widths_that_are_no_power_of_two_read_nothing_beside_their_rows(key_dim: int, value_dim: int, poison: float) -> None:
    """Every input is followed by poison to the next power of two and on; what the kernel makes of it is judged."""
    given = cell(2, 0, heads=1, key_dim=key_dim, value_dim=value_dim)
    for name in (*ACTIVATIONS, "state", "window"):
        width = given[name][0].numel()
        beside = torch.full((len(given[name]), width + 256), poison, dtype=given[name].dtype)
        beside[:, :width] = given[name].flatten(1)
        given[name] = beside[:, :width].unflatten(1, given[name].shape[1:])
    for name in WEIGHTS:
        flat = given[name].flatten()
        given[name] = torch.cat([flat, torch.full((256,), poison, dtype=flat.dtype)])[: len(flat)].view(given[name].shape)
    assert away(kda_decode.decode, given) <= 1
    for name in ("state", "window"):
        width = given[name][0].numel()
        gap = given[name].as_strided((len(given[name]) - 1, 256), (width + 256, 1), width)
        assert same_bits(gap, torch.full_like(gap, poison)), name


@pytest.mark.parametrize("slots", [(), (-1,), (4, -1)])
def test_a_batch_of_nobody_leaves_the_pools_as_they_are(slots: tuple[int, ...]) -> None:
    given, before = cell(*slots), cell(*slots)
    out = kda_decode.decode(**given)
    assert out.shape == (len(slots), 8) and out.dtype == torch.bfloat16 and bool((out == 0).all())
    assert all(same_bits(given[name], before[name]) for name in ("state", "window"))


def test_a_single_slot_may_have_any_stride() -> None:
    given = cell(0, pool=1)
    given["state"] = given["state"].as_strided((1, 2, 4, 8), (0, 32, 8, 1))
    assert away(kda_decode.decode, given) <= 1


def test_window_offsets_beyond_31_bits_reach_their_rows() -> None:
    """Slots 2^30 elements apart on a base that is touched nowhere else: slot 2 starts at element 2^31. Known failure 16 is of the state."""
    given = cell(2, 0, 1, pool=3)
    far = torch.empty(2**31 + 256, dtype=torch.bfloat16).as_strided((3, 3, 40), (2**30, 40, 1))
    far.copy_(given["window"])
    given["window"] = far
    assert away(kda_decode.decode, given) <= 1


@pytest.mark.parametrize("decode", [kda_decode.decode, eager.decode], ids=["triton", "torch"])
def test_the_signature_is_the_references_without_its_points(decode: Decode) -> None:
    expected = inspect.signature(inspect.unwrap(kda.decode))
    assert inspect.signature(decode).parameters == {k: p for k, p in expected.parameters.items() if k != "at"}
    assert inspect.signature(decode) == signature("kda.decode")


def test_a_cpu_tensor_outside_the_interpreter_is_refused_before_any_pool_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "active", lambda: False)
    given, before = cell(1), cell(1)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got one on cpu; set TRITON_INTERPRET=1"):
        kda_decode.decode(**given)
    assert same_bits(given["state"], before["state"])
