"""What the device can do, measured beside the candidates: copy, in-place read-modify-write, matrix product."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def read_modify_write_kernel(x, count: tl.int64, BLOCK: tl.constexpr):
    """x *= 1 + 2^-7 in place, once over memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0, eviction_policy="evict_first")
    tl.store(x + at, value * 1.0078125, mask=at < count, eviction_policy="evict_first")


def read_modify_write(bytes_moved: int, device: str) -> Callable[[], None]:
    """Reads half of `bytes_moved` and writes it back where it was."""
    x = torch.rand(max(bytes_moved // 8, 1), device=device)

    def run() -> None:
        read_modify_write_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True)

    return run


def copy(bytes_moved: int, device: str) -> Callable[[], None]:
    """Device-to-device copy of half of `bytes_moved`."""
    source = torch.rand(max(bytes_moved // 8, 1), device=device)
    target = torch.empty_like(source)

    def run() -> None:
        torch.mul(source, 1.0, out=target)  # a captured copy_ would be a memcpy node, slower than a kernel

    return run


def matmul(size: int, device: str) -> Callable[[], None]:
    """BF16 product of two random square matrices."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out: Tensor = torch.empty_like(a)

    def run() -> None:
        torch.mm(a, b, out=out)

    return run
