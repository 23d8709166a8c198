"""The repaired interpreter against torch; each comparison also runs unrepaired in a child process, where it has to fail."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from optimized import interpreter

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

ROOT = Path(__file__).resolve().parents[2]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def repaired() -> None:
    interpreter.repair()


@triton.jit
def cast_kernel(x, y, N: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    if ROUNDING == "default":
        value = value.to(y.dtype.element_ty)
    elif ROUNDING != "store":
        value = value.to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING)
    tl.store(y + i, value)


@triton.jit
def constant_kernel(y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.full([N], 1.998, tl.bfloat16))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i)))


@triton.jit
def masked_load_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i, mask=i < N // 2))


@triton.jit
def scalar_mask_kernel(slots, x, y, N: tl.constexpr):
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    i = tl.arange(0, N)
    value = tl.load(x + slot * N + i, mask=slot >= 0, other=7.0)
    tl.store(y + program * N + i, value, mask=slot != 1)


@triton.jit
def scalar_load_kernel(count, x, y):
    tl.store(y, tl.load(x, mask=tl.load(count) > 0, other=0.0))


@triton.jit
def order_kernel(ticket, order):
    linear = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(order + tl.atomic_add(ticket, 1), linear)


@triton.jit
def race_kernel(y):
    tl.store(y, tl.program_id(0))


@triton.jit
def overflow_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(y + i, tl.exp(value * 1e38) + tl.max(value / 0.0 - value / 0.0))


@triton.jit
def narrow_arithmetic_kernel(x, y, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    if OP == "add":
        tl.store(y + i, value + value)
    elif OP == "scale":
        tl.store(y + i, value * 2.0)
    elif OP == "compare":
        tl.store(y + i, tl.where(value > 0, 1.0, 0.0))
    elif OP == "sum":
        tl.store(y, tl.sum(value))
    elif OP == "cumsum":
        tl.store(y + i, tl.cumsum(value))
    elif OP == "atomic":
        tl.atomic_add(x + i, value)


@triton.jit
def doubled(x):
    return 2 * x


@triton.jit
def language_kernel(x, y, steps, N: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    if program == 1:
        return
    total = tl.zeros([N], tl.float32)
    for _ in tl.range(0, steps, num_stages=2):
        total += tl.load(x + program * N + tl.arange(0, N))
    for step in tl.static_range(2):
        total = doubled(total) + step
    tl.store(y + program * N + tl.arange(0, N), tl.where(total > 8, total, -1.0))


def cast(x: torch.Tensor, dtype: torch.dtype, rounding: str = "default") -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, y, x.numel(), rounding)
    return y


def differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ, any NaN being equal to any other."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    same = (got.view(bits) == expected.view(bits)) | (got.float().isnan() & expected.float().isnan())
    return int((~same).sum())


def every_code(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def around_bf16_midpoints() -> torch.Tensor:
    """Each BF16 pattern, its midpoint to the next, and the midpoint one FP32 step down and up: [4 * 2**16]."""
    pattern = torch.arange(2**16)[:, None] * 2**16
    return (pattern + torch.tensor([0, 0x7FFF, 0x8000, 0x8001])).to(torch.uint32).view(torch.float32).reshape(-1)


def around_fp8_midpoints(dtype: torch.dtype) -> torch.Tensor:
    """Each finite FP8 value, its midpoint to the next, that one FP32 step down and up, values past the range; both signs: [2048]."""
    value = every_code(dtype)[:128].float()
    value = value[value.isfinite()]
    middle = (value[1:] + value[:-1]) / 2
    below, above = middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(torch.inf))
    past = torch.cat([value[-1] * torch.tensor([1.03, 1.04]), torch.tensor([1e6, 3e38, torch.inf, torch.nan, 1e-30, 1e-45])])
    points = torch.cat([value, middle, below, above, past])
    return torch.cat([points, -points, torch.zeros(2048 - 2 * len(points))])


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def bf16_widens_exactly() -> int:
    return differing(cast(every_code(torch.bfloat16), torch.float32), every_code(torch.bfloat16).float())


def bf16_rounds_to_nearest_even() -> int:
    x = around_bf16_midpoints()
    return sum(differing(cast(x, torch.bfloat16, rounding), x.bfloat16()) for rounding in ("default", "rtne"))


def a_store_rounds_to_nearest_even() -> int:
    x = around_bf16_midpoints()
    return differing(cast(x, torch.bfloat16, "store"), x.bfloat16())


def a_bf16_constant_rounds() -> int:
    y = torch.zeros(4, dtype=torch.bfloat16)
    constant_kernel[(1,)](y, 4)
    return differing(y, torch.full((4,), 1.998).bfloat16())


def integers_become_bf16() -> int:
    x = torch.arange(-512, 512, dtype=torch.int32)
    return differing(cast(x, torch.bfloat16), x.bfloat16())


def e4m3_widens_exactly() -> int:
    return differing(cast(every_code(E4M3), torch.float32), every_code(E4M3).float())


def e5m2_widens_exactly() -> int:
    return differing(cast(every_code(E5M2), torch.float32), every_code(E5M2).float())


def e4m3_rounds_and_saturates() -> int:
    x = around_fp8_midpoints(E4M3)
    return differing(cast(x, E4M3), saturated(x, E4M3))


def e5m2_rounds_and_saturates() -> int:
    x = around_fp8_midpoints(E5M2)
    return differing(cast(x, E5M2), saturated(x, E5M2))


def half_types_become_e4m3() -> int:
    half, brain = around_fp8_midpoints(E4M3).half(), around_fp8_midpoints(E4M3).bfloat16()
    return differing(cast(half, E4M3), saturated(half.float(), E4M3)) + differing(cast(brain, E4M3), saturated(brain.float(), E4M3))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, c, 16)
    return c


def a_bf16_dot_multiplies_values() -> int:
    a, b = (torch.randint(-8, 9, (16, 16), generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    return differing(dot(a, b), a.float() @ b.float())


def an_fp8_dot_multiplies_values() -> int:
    a, b = every_code(E4M3).view(16, 16), torch.eye(16).to(E4M3)  # rows with a NaN are NaN, the others stay exact
    return differing(dot(a, b), a.float() @ b.float())


def masked_lanes_are_filled_with_ones() -> int:
    wrong = 0
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.int64, torch.int64), (E4M3, torch.int8)):
        y = torch.zeros(8, dtype=dtype)
        masked_load_kernel[(1,)](torch.ones(8).to(dtype), y, 8)
        wrong += int((y[4:].view(bits) != -1).sum()) + int((y[:4].float() != 1).sum())
    return wrong


def a_scalar_masks_loads_and_stores() -> int:
    y = torch.zeros(3, 4)
    scalar_mask_kernel[(3,)](torch.tensor([2, -1, 1]), torch.arange(12.0), y, 4)
    return differing(y, torch.tensor([[8.0, 9, 10, 11], [7, 7, 7, 7], [0, 0, 0, 0]]))


COMPARISONS: tuple[Callable[[], int], ...] = (
    bf16_widens_exactly,
    bf16_rounds_to_nearest_even,
    a_store_rounds_to_nearest_even,
    a_bf16_constant_rounds,
    integers_become_bf16,
    e4m3_widens_exactly,
    e5m2_widens_exactly,
    e4m3_rounds_and_saturates,
    e5m2_rounds_and_saturates,
    half_types_become_e4m3,
    a_bf16_dot_multiplies_values,
    an_fp8_dot_multiplies_values,
    masked_lanes_are_filled_with_ones,
    a_scalar_masks_loads_and_stores,
)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: c.__name__)
def test_repaired(comparison: Callable[[], int]) -> None:
    assert comparison() == 0


def report_unrepaired() -> None:
    """In a child process: print how many elements each comparison finds wrong; an error counts as one."""
    found = {}
    for comparison in COMPARISONS:
        try:
            found[comparison.__name__] = comparison()
        except Exception:
            found[comparison.__name__] = 1
    print(json.dumps(found))


def child(*arguments: str, **environment: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def test_without_the_repair_each_comparison_fails() -> None:
    found = json.loads(child(__file__, TRITON_INTERPRET="1"))
    right = [name for name, wrong in found.items() if wrong == 0]
    assert len(found) == len(COMPARISONS)
    assert right == [], f"Triton {triton.__version__} does this right by itself: delete its repair and the comparison"


NARROW_ARITHMETIC = [(op, dtype) for op in ("add", "scale", "compare", "sum", "cumsum") for dtype in (torch.bfloat16, E4M3)]


def test_rounding_toward_zero_drops_bits_when_asked() -> None:
    x = around_bf16_midpoints()
    x = torch.where(x.isnan(), 0.0, x)
    assert differing(cast(x, torch.bfloat16, "rtz"), (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)) == 0


@pytest.mark.parametrize(("op", "dtype"), [*NARROW_ARITHMETIC, ("atomic", torch.bfloat16)])
def test_arithmetic_on_narrow_types_is_refused(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="widen bf16 and fp8 before arithmetic"):
        narrow_arithmetic_kernel[(1,)](torch.ones(4).to(dtype), torch.zeros(4), 4, op)


@pytest.mark.parametrize("reverse", [False, True])
def test_programs_run_in_the_order_asked_with_their_own_ids(reverse: bool) -> None:
    order = torch.full((12,), -1, dtype=torch.int32)
    with interpreter.program_order(reverse):
        order_kernel[(2, 3, 2)](torch.zeros(1, dtype=torch.int32), order)
    expected = list(range(12))
    assert order.tolist() == (expected[::-1] if reverse else expected)


def test_reversed_order_shows_a_race_and_ends_with_the_block() -> None:
    last = torch.zeros(1, dtype=torch.int32)
    race_kernel[(4,)](last)
    assert last.item() == 3
    with interpreter.program_order(True):
        race_kernel[(4,)](last)
        assert last.item() == 0
        with interpreter.program_order(False):
            race_kernel[(4,)](last)
        assert last.item() == 3
    with pytest.raises(ZeroDivisionError), interpreter.program_order(True):
        _ = 1 // 0
    race_kernel[(4,)](last)
    assert last.item() == 3


def test_launches_are_counted_by_kernel_in_each_enclosing_block() -> None:
    y = torch.zeros(1, dtype=torch.int32)
    with interpreter.launches() as outer:
        race_kernel[(2,)](y)
        with interpreter.launches() as inner:
            race_kernel[(2,)](y)
            language_kernel[(1,)](torch.ones(4), torch.zeros(4), 1, 4)
            race_kernel[(0,)](y)  # an empty grid runs nothing
        race_kernel[(2,)](y)
    race_kernel[(2,)](y)
    assert inner == {"race_kernel": 1, "language_kernel": 1}
    assert outer == {"race_kernel": 3, "language_kernel": 1}


def test_numpy_is_silent_inside_kernels_and_warns_outside() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overflow_kernel[(1,)](torch.ones(4), torch.zeros(4), 4)
        with pytest.raises(RuntimeWarning, match="overflow"):
            np.float32(3e38) * np.float32(10)


def test_the_language_that_kernels_use_works() -> None:
    y = torch.zeros(3, 4)
    x = torch.arange(12.0).view(3, 4)
    language_kernel[(3,)](x, y, 3, 4, num_warps=4, num_stages=2, enable_fp_fusion=True)
    total = 12 * x + 1
    expected = torch.where(total > 8, total, -1.0)
    expected[1] = 0
    assert torch.equal(y, expected)


if __name__ == "__main__":
    report_unrepaired()


def test_a_masked_scalar_is_its_other_even_when_that_is_zero() -> None:
    """The interpreter drops a scalar `other` that is false; what the mask excludes is NaN here."""
    y = torch.ones(2)
    for place, count in enumerate((0, 1)):
        scalar_load_kernel[(1,)](torch.tensor([count]), torch.tensor([torch.nan]), y[place:])
    assert y[0] == 0 and y[1].isnan()
