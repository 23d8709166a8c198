"""The small-batch GEMM in the interpreter: odd sizes, what lies beside the operands, one order of adding; its builds for Hopper."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from optimized.gemm_tiles import GemmTile
from parity import limits, metrics
from parity.buffers import same_bits

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from optimized import gemm

interpreted = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")
NAN = float("nan")
TILE = GemmTile(rows=16, tokens=16, depth=32, splits=3, warps=1, stages=2)


def operands(tokens: int, rows: int, depth: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*shape, generator=generator) for shape in ((tokens, depth), (rows, depth)))
    return x.to(dtype), (w * depth**-0.5).to(dtype)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def away(y: Tensor, x: Tensor, w: Tensor) -> float:
    """How many times its limit y is from x W^T in FP64, rows of y being sequences of one head."""
    gold, floor = x.double() @ w.double().T, x.float() @ w.float().T
    m = metrics.moments(y[:, None], gold[:, None], gold[:, None], floor[:, None], y.dtype)
    return metrics.noise_ratio(m).over(limits.boundary(y.dtype))


@interpreted
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("tokens", "rows", "depth"), [(1, 1, 1), (1, 37, 96), (3, 16, 33), (16, 70, 130), (17, 33, 64), (33, 15, 31), (2, 129, 256)]
)
def test_every_size_is_within_the_limit(tokens: int, rows: int, depth: int, splits: int) -> None:
    x, w = operands(tokens, rows, depth)
    assert away(gemm.linear(x, w, replace(TILE, splits=splits)), x, w) <= 1


@interpreted
@pytest.mark.parametrize("tile", [GemmTile(16, 8, 64, 1, 1, 1), GemmTile(64, 16, 16, 2, 4, 4), GemmTile(32, 64, 32, 4, 4, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_and_dtype_is_within_the_limit(tile: GemmTile, dtype: torch.dtype) -> None:
    x, w = operands(5, 70, 130, dtype)
    y = gemm.linear(x, w, tile)
    assert y.dtype == dtype and away(y, x, w) <= 1


@interpreted
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("first", [0, 1, 16, 23, 41])
def test_rows_of_a_pair_multiply_their_own_columns(first: int, splits: int) -> None:
    x, w = operands(3, 41, 64)
    pair = torch.cat([x, x.flip(0)], dim=1)
    y = gemm.linear(pair, w, replace(TILE, splits=splits), first=first)
    assert away(y[:, :first], x, w[:first]) <= 1 and away(y[:, first:], x.flip(0), w[first:]) <= 1


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_what_lies_beside_the_operands_is_not_read(splits: int) -> None:
    """Both are rows of a wider matrix of NaN, with more of it before and after."""
    x, w = operands(5, 37, 72)
    expected, views = gemm.linear(x, w, replace(TILE, splits=splits)), []
    for given in (x, w):
        wide = torch.full((len(given) + 40, 200), NAN, dtype=given.dtype)
        wide[20 : 20 + len(given), 64:136] = given
        views.append(wide[20 : 20 + len(given), 64:136])
    assert same_bits(gemm.linear(*views, replace(TILE, splits=splits)), expected)


@interpreted
def test_a_nan_of_one_token_stays_with_it() -> None:
    x, w = operands(3, 20, 64)
    x[1, 5] = NAN
    y = gemm.linear(x, w, TILE)
    assert y[1].isnan().all() and away(y[[0, 2]], x[[0, 2]], w) <= 1


@interpreted
def test_the_order_in_which_programs_arrive_changes_no_bit() -> None:
    """Shares of K that nearly cancel, so that another order of adding them shows in 16 bits."""
    x, w = operands(16, 40, 256)
    x[:, 128:], w[:, 128:] = x[:, :128].roll(32, 1), -w[:, :128].roll(32, 1)
    w[:, 200] += 2.0**-12
    tile = replace(TILE, splits=8)
    with interpreter.program_order(reverse=True):
        last_first = gemm.linear(x, w, tile)
    assert same_bits(gemm.linear(x, w, tile), last_first)


@interpreted
def test_counters_are_left_as_the_next_call_needs_them() -> None:
    x, w = operands(17, 40, 96)
    arrivals = torch.zeros(gemm.arrivals_of(TILE, 17, 40) + 3, dtype=torch.int32)
    first = gemm.linear(x, w, TILE, arrivals=arrivals)
    assert len(arrivals) == 6 + 3 and not arrivals.any()
    assert same_bits(gemm.linear(x, w, TILE, arrivals=arrivals), first)


@interpreted
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(0, 5, 8), (3, 0, 8), (3, 5, 0)])
def test_nothing_to_multiply_is_legal(tokens: int, rows: int, depth: int) -> None:
    y = gemm.linear(ones(tokens, depth), ones(rows, depth), TILE)
    assert y.shape == (tokens, rows) and not y.any()


@interpreted
def test_weights_past_32_bits_are_addressed() -> None:
    """Two rows 2^31 elements apart, on memory that is touched nowhere else."""
    x, w = operands(1, 2, 16)
    far = torch.empty(2**31 + 16, dtype=torch.bfloat16).as_strided((2, 16), (2**31, 1))
    far.copy_(w)
    assert same_bits(gemm.linear(x, far, TILE), gemm.linear(x, w, TILE))


@interpreted
@pytest.mark.parametrize(
    ("named", "kind", "x", "w", "more"),
    [
        ("x", ValueError, ones(2, 8), ones(4, 9), {}),
        ("x", ValueError, ones(2, 8), ones(4, 8), {"first": 2}),
        ("x", TypeError, ones(8), ones(4, 8), {}),
        ("x", TypeError, ones(2, 8).half(), ones(4, 8), {}),
        ("x", ValueError, ones(2, 16)[:, ::2], ones(4, 8), {}),
        ("w", ValueError, ones(2, 8), ones(8, 4).T, {}),
        ("w", TypeError, ones(2, 8), ones(8), {}),
        ("w", TypeError, ones(2, 8).double(), ones(4, 8).double(), {}),
        ("first", ValueError, ones(2, 16), ones(4, 8), {"first": 5}),
        ("arrivals", ValueError, ones(2, 8), ones(40, 8), {"arrivals": torch.zeros(2, dtype=torch.int32)}),
        ("arrivals", ValueError, ones(2, 8), ones(4, 8), {"arrivals": torch.zeros(9)}),
    ],
)
def test_what_is_refused_is_named(named: str, kind: type[Exception], x: Tensor, w: Tensor, more: dict) -> None:
    with pytest.raises(kind, match=rf"^{named}: expected .+, got .+; .{{10,}}"):
        gemm.linear(x, w, TILE, **more)


ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import json, os, re, subprocess, tempfile, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from optimized import gemm, gemm_tiles

KINDS = dict(partials="*fp32", arrivals="*i32", x="*bf16", w="*bf16", y="*bf16")

def build(tile, depth, pair):
    constants = dict(K=depth, PAIR=pair, UNIT=8, **gemm.constants(tile, depth, 2))
    kernel, signature, attributes = gemm.linear_kernel, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else KINDS.get(name, "i32")
        if name not in constants and name not in ("M", "x_stride"):  # rows that begin at multiples of 16 bytes, not of 32
            attributes[(i,)] = [["tt.divisibility", 16]]
    built = triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32),
                           options=dict(num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"]); f.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        usage = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    ptx = built.asm["ptx"]
    return {"stack": int(re.search(r"STACK:(\\d+)", usage)[1]), "shared": built.metadata.shared,
            "products": len(re.findall(r"mma\\.sync|wgmma\\.mma_async", ptx)), "waits": ptx.count("griddepcontrol.wait"),
            "prefetches": ptx.count("prefetch.global.L2"), "copies": len(re.findall(r"cp\\.async\\.cg.*0x10", ptx)),
            "narrow": len(re.findall(r"ld\\.global.*b16", ptx))}

tiles = set()
for rule in gemm_tiles.PLANS:
    if "sm90" in rule.archs:
        tiles |= {(rule.plan.wide, 4096, False), (rule.plan.gates, 128, True), (rule.plan.out, 8192, False)}
print(json.dumps({f"{tile} {depth}": build(tile, depth, pair) for tile, depth, pair in tiles if tile is not None}))
"""


def test_hopper_builds_use_tensor_cores_and_start_early_without_spills() -> None:
    """In a process of its own, without a GPU: 16-byte copies in flight but for the single step of the gates."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 3
    for name, built in found.items():
        assert built["stack"] == 0 and built["products"] > 0 and built["waits"] == 1 and built["prefetches"] > 0, (name, built)
        assert built["copies"] > 0 or name.endswith(" 128"), (name, built)
        assert built["narrow"] == 0, (name, built)
