"""y = x W^T for few tokens, where the time is that of reading the weight: FP32 sums, one order of adding for each configuration.

A program owns some rows of the weight, a tile of tokens and a share of K. Where K is split, the last program to arrive at a
tile of y adds the shares in the order of K. The weight is the left operand, so that its rows fill the tensor core's rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import interpreter
from optimized.gemm_tiles import GemmTile
from reference.validate import _fail, _last_contiguous, _tensor

interpreter.repair()

DTYPES = (torch.bfloat16, torch.float16)
LINE = 128  # bytes of a prefetch


@triton.jit
def _prefetch(w, n, limit, w_stride, k, K: tl.constexpr, BN: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr):
    """Ask LINES lines of each row from k on into L2; a row or a line outside asks for one inside once more."""
    row = tl.minimum(n, limit - 1).to(tl.int64)[:, None]
    column = tl.minimum(k + tl.arange(0, LINES) * STEP, K - 1)[None, :]
    at = (w + row * w_stride + column).to(tl.uint64, bitcast=True)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _store(y, acc, m, n, M, limit, y_stride):
    at = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < limit)[:, None])


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, w, y, partials, arrivals, M, N, first, x_stride, w_stride, y_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PAIR: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    limit = N
    shift = 0
    if PAIR:  # rows from `first` on multiply the next K columns of x, and begin with a block of their own
        blocks = tl.cdiv(first, BN)
        second = (block >= blocks).to(tl.int32)
        n += second * (first - blocks * BN)
        shift = second * K
        limit = first + second * (N - first)
    steps: tl.constexpr = (K + BK - 1) // BK
    begin = split * steps // SPLITS
    end = (split + 1) * steps // SPLITS
    if LINES > 0:
        _prefetch(w, n, limit, w_stride, begin * BK, K, BN, LINES, STEP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    kk = tl.arange(0, BK)
    in_m = (m < M)[None, :]
    in_n = (n < limit)[:, None]
    w_at = w + n.to(tl.int64)[:, None] * w_stride + kk[None, :]  # [BN, BK]
    row = m.to(tl.int64) * UNIT  # rows known to begin at multiples of 16 bytes are read 16 bytes at a time
    x_at = x + row[None, :] * x_stride + (shift + kk)[:, None]  # [BK, BM]
    acc = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * BK
        if K % BK == 0:
            w_tile = tl.load(w_at + k, mask=in_n, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x_at + k, mask=in_m, other=0.0)
        else:
            in_k = k + kk < K
            w_tile = tl.load(w_at + k, mask=in_n & in_k[None, :], other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x_at + k, mask=in_m & in_k[:, None], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")

    if SPLITS == 1:
        _store(y, acc, m, n, M, limit, y_stride)
        return
    tile = tl.program_id(1) * (tl.num_programs(0) // SPLITS) + block
    share = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    shares = partials + tile.to(tl.int64) * (SPLITS * BN * BM) + share
    tl.store(shares + split * (BN * BM), acc)
    tl.debug_barrier()  # every thread has stored before one of them counts
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        total = tl.load(shares, cache_modifier=".cg")
        for other in range(1, SPLITS):
            total += tl.load(shares + other * (BN * BM), cache_modifier=".cg")
        _store(y, total, m, n, M, limit, y_stride)
        tl.store(arrivals + tile, 0)  # as the next call expects it


def arrivals_of(tile: GemmTile, tokens: int, rows: int, first: int | None = None) -> int:
    """How many counters a call needs: one for each tile of y whose K is split."""
    return 0 if tile.splits == 1 else triton.cdiv(tokens, tile.tokens) * _blocks(tile, rows, first)


def _blocks(tile: GemmTile, rows: int, first: int | None) -> int:
    return triton.cdiv(rows, tile.rows) if first is None else triton.cdiv(first, tile.rows) + triton.cdiv(rows - first, tile.rows)


def linear(x: Tensor, w: Tensor, tile: GemmTile, *, arrivals: Tensor | None = None, first: int | None = None) -> Tensor:
    """x W^T in the dtype of x, in one launch: [M, K], [N, K] -> [M, N].

    BF16 or FP16; sums in FP32, in an order that the tile alone decides. first: of W's rows, the first so many multiply
    x[:, :K], the others x[:, K:2K]. arrivals: zeroed int32 counters, `arrivals_of` or more, left zeroed; calls that share them
    must follow each other. None takes new ones, for one more launch. ValueError or TypeError before the launch.
    """
    if not isinstance(w, Tensor) or w.ndim != 2:
        _fail(
            "w", "a weight [N, K]", list(w.shape) if isinstance(w, Tensor) else type(w).__name__, "linear weights are [out, in]", TypeError
        )
    if not isinstance(x, Tensor) or x.ndim != 2:
        _fail("x", "a tensor [M, K]", list(x.shape) if isinstance(x, Tensor) else type(x).__name__, "flatten it to rows", TypeError)
    (rows, depth), tokens = w.shape, x.shape[0]
    if first is not None and not 0 <= first <= rows:
        _fail("first", f"0 to {rows} rows", first, "it counts rows of w")
    _tensor("w", w, (rows, depth), DTYPES, x.device, "linear weights are [out, in]")
    _tensor("x", x, (tokens, depth if first is None else 2 * depth), (w.dtype,), w.device, "its columns are those of w, twice with first")
    _last_contiguous("x", x)
    _last_contiguous("w", w)
    counters = arrivals_of(tile, tokens, rows, first)
    if arrivals is None:
        arrivals = torch.zeros(counters, dtype=torch.int32, device=x.device)
    elif arrivals.dtype != torch.int32 or arrivals.device != x.device or arrivals.numel() < counters or not arrivals.is_contiguous():
        got = f"{arrivals.numel()} {arrivals.dtype} on {arrivals.device}"
        _fail("arrivals", f"{counters} contiguous int32 counters on {x.device}", got, "take arrivals_of(tile, tokens, rows) zeros")
    if x.device.type == "cpu":
        interpreter.require("x")
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if depth == 0:
        return y.zero_()
    return _launch(x, w, y, tile, arrivals, first, counters)


def constants(tile: GemmTile, depth: int, itemsize: int) -> dict[str, Any]:
    """What a tile fixes at compilation, but the warps."""
    step = LINE // itemsize
    lines = min(tile.prefetch * tile.depth, triton.next_power_of_2(triton.cdiv(depth, tile.splits))) // step
    return dict(
        BM=tile.tokens, BN=tile.rows, BK=tile.depth, SPLITS=tile.splits, STAGES=tile.stages, LINES=lines, STEP=step, PDL=tile.pdl
    )  # fmt: skip


def _launch(x: Tensor, w: Tensor, y: Tensor, tile: GemmTile, arrivals: Tensor, first: int | None, counters: int) -> Tensor:
    (tokens, rows), depth = y.shape, w.shape[1]
    unit = 16 // x.element_size()
    unit = 1 if x.stride(0) % unit else unit
    partials = torch.empty(counters * tile.splits * tile.rows * tile.tokens, dtype=torch.float32, device=x.device)
    grid = (_blocks(tile, rows, first) * tile.splits, triton.cdiv(tokens, tile.tokens))
    linear_kernel[grid](
        x, w, y, partials, arrivals, tokens, rows, first or 0, x.stride(0) // unit, w.stride(0), y.stride(0), K=depth,
        PAIR=first is not None, UNIT=unit, **constants(tile, depth, w.element_size()), num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=True, launch_pdl=tile.pdl,
    )  # fmt: skip
    return y
