"""`mla.store` in one launch: latent rows into the cache, rounded or quantised, one program for a token.

Quantisation is the reference's to the bit: amax, division and rounding in FP32, clamped to +-448 before the cast.
Source: spec of the model, section 7; `reference.fp8`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import interpreter
from optimized.mla_attend import FLAT, SCALED, STATIC
from reference import fp8, validate_mla
from reference.mla_cache import MlaCache
from reference.validate import _fail

interpreter.repair()


@triton.jit
def _clamped(x, LARGEST: tl.constexpr):
    """x in +-LARGEST; NaN stays NaN."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def mla_store_kernel(
    row, latent, scales, scale, owner, position, block_table,
    row_stride_in, page_stride, row_stride, scale_page_stride, scale_row_stride, table_stride, blocks, pages,
    L: tl.constexpr, BL: tl.constexpr, PAGE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, POW2: tl.constexpr,
    RESERVED: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    here = tl.load(position + token)
    if here < 0:
        return
    n = tl.load(owner + token).to(tl.int64)
    page = tl.load(block_table + n * table_stride + here // PAGE, mask=here // PAGE < blocks, other=-1)
    if (page < 0) | (page >= pages):
        return
    channel = tl.arange(0, BL)
    x = tl.load(row + token * row_stride_in + channel, mask=channel < L, other=0.0)
    at = latent + page.to(tl.int64) * page_stride + (here % PAGE) * row_stride
    if FORM == 1:
        groups = tl.reshape(x.to(tl.float32), [BL // GROUP, GROUP])
        group = tl.arange(0, BL // GROUP)
        size = tl.abs(groups)
        amax = tl.where(tl.sum((size != size).to(tl.int32), 1) > 0, float("nan"), tl.max(size, 1))
        s = tl.div_rn(amax, tl.full([BL // GROUP], LARGEST, tl.float32))
        s = tl.where(s < LEAST, LEAST, s)
        if POW2:
            bits = s.to(tl.int32, bitcast=True)
            raised = (bits & 0x7F800000) + tl.where((bits & 0x7FFFFF) != 0, 0x800000, 0)
            s = tl.where(s != s, s, raised.to(tl.float32, bitcast=True))
        divisor = tl.broadcast_to(s[:, None], [BL // GROUP, GROUP])
        codes = tl.reshape(_clamped(tl.div_rn(groups, divisor), LARGEST), [BL]).to(tl.float8e4nv)
        tl.store(at + channel, codes.to(tl.uint8, bitcast=True), mask=channel < L)
        scale_at = scales + page.to(tl.int64) * scale_page_stride + (here % PAGE) * scale_row_stride
        tl.store(scale_at + group, s, mask=group < L // GROUP)
        if RESERVED > 0:
            rest = tl.arange(0, RESERVED)
            tl.store(at + L + L // 32 + rest, tl.zeros([RESERVED], tl.uint8))
    elif FORM == 2:
        divisor = tl.broadcast_to(tl.load(scale), [BL])
        codes = _clamped(tl.div_rn(x.to(tl.float32), divisor), LARGEST).to(tl.float8e4nv)
        tl.store(at + channel, codes.to(tl.uint8, bitcast=True), mask=channel < L)
    else:
        tl.store(at + channel, x.to(tl.float32).to(latent.dtype.element_ty), mask=channel < L)


def store(row: Tensor, *, cache: MlaCache, owner: Tensor, position: Tensor, block_table: Tensor, policy: fp8.Policy = "fp32") -> None:
    """`reference.mla.store` in one launch, to the bit; arguments and errors as there. Reads no value on the host."""
    validate_mla.store(row, cache, owner, position, block_table, policy)
    latent, (tokens, channels) = cache.latent, row.shape
    for name, x in (("row", row), ("cache.latent", latent)):
        if x.dtype == torch.float64:
            _fail(name, "dtype bfloat16, float16 or float32", x.dtype, "float64 is for the reference", TypeError)
    if row.device.type == "cpu":
        interpreter.require("row")
    form, codes, scales = FLAT, latent, latent
    if latent.dtype == torch.uint8:
        aligned = [*latent.stride()[:2], latent.storage_offset(), latent.data_ptr()]
        if any(x % 4 for x in aligned):
            _fail("cache.latent", "rows at multiples of 4 bytes", f"strides {latent.stride()}", "a row holds FP32 scales: pad it")
        form, scales = SCALED, latent[..., channels : fp8.row_bytes(channels)].view(torch.float32)
    elif cache.scale is not None:
        form, codes = STATIC, latent.view(torch.uint8)
    if tokens == 0:
        return
    reserved = fp8.RESERVED if form == SCALED and latent.shape[2] == fp8.row_bytes(channels, reserved=True) else 0
    constant: dict[str, Any] = dict(LEAST=fp8.LEAST_ROW_SCALE, LARGEST=fp8.LARGEST, GROUP=fp8.GROUP)
    mla_store_kernel[(tokens,)](
        row, codes, scales, cache.scale, owner, position, block_table,
        row.stride(0), codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), block_table.stride(0), block_table.shape[1],
        latent.shape[0], L=channels, BL=triton.next_power_of_2(channels), PAGE=cache.page, FORM=form, POW2=policy == "pow2",
        RESERVED=reserved, **constant, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
