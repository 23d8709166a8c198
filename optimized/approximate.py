"""exp2, 1/x and the sigmoid by the device's approximations, a few instructions each; exact enough for FP32 to 2 ulp."""

import triton
import triton.language as tl

from optimized import interpreter

interpreter.repair()

LOG2E = tl.constexpr(1.4426950408889634)
FLUSH = tl.constexpr(not interpreter.active())  # a subnormal exp2 is 0, as it is in every sum here: four instructions less each


@triton.jit
def exp2(x):
    if FLUSH:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def unit_over(x):
    """1 / x, to 1 ulp."""
    if FLUSH:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def unit_sigmoid(x):
    """1 / (1 + exp(-x)), to 2 ulp."""
    return unit_over(1.0 + exp2(x * -LOG2E))
