"""`mla.attend` in one launch, or two where the rows of a query are split: gathered rows are key and value of every head.

A program owns some heads of one query and a share of its rows. A tile of rows is read once and serves both products. Weights
are over powers of two, so that rescaling is exact and their rounding doesn't depend on tiles or splits; the second kernel adds
the shares in their order. Source: spec of the model, sections 6.2 and 7; `reference.mla`.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import arch, contracts, interpreter
from optimized.mla_tiles import MlaTile, kind, mla_tile
from reference import fp8, validate_mla
from reference.validate import _fail

interpreter.repair()

CONTRACT = contracts.MLA_ATTEND
KERNEL = "triton"  # in `widths.RULES`
LEAST_DOT = 16  # the smallest side of a matrix product
FLAT, SCALED, STATIC = 0, 1, 2  # rows of numbers, of codes with a scale for each 128, of codes with one scale
LOG2E, LN2 = 1 / math.log(2.0), math.log(2.0)


@triton.jit
def row_offsets(row, page_stride, row_stride, PAGE: tl.constexpr):
    """Offset of each row of a pool [pages, PAGE, C]; PAGE 0 where rows are equally far apart throughout."""
    if PAGE == 0:
        return row.to(tl.int64) * row_stride
    else:
        return (row // PAGE).to(tl.int64) * page_stride + (row % PAGE) * row_stride


@triton.jit
def _load_tile(
    latent, scales, kv_scale, at, scale_at, valid, channel, L: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows [BN, BL] in the dtype of the products; zeros for rows that aren't there, which are not read."""
    mask = valid[:, None]
    if L != BL:
        mask = mask & (channel < L)[None, :]
    x = tl.load(latent + at[:, None] + channel[None, :], mask=mask, other=0.0)
    if FORM == 1:
        group = tl.arange(0, BL // GROUP)
        s = tl.load(scales + scale_at[:, None] + group[None, :], mask=valid[:, None] & (group < L // GROUP)[None, :], other=0.0)
        wide = tl.reshape(x.to(tl.float32), [BN, BL // GROUP, GROUP]) * s[:, :, None]
        x = tl.reshape(wide, [BN, BL]).to(DTYPE)
    elif FORM == 2:
        x = (x.to(tl.float32) * kv_scale).to(DTYPE)
    return x


@triton.jit(do_not_specialize=["rows", "width", "tokens", "splits"])
def mla_attend_kernel(
    q, latent, scales, kv_scale, ids, counts, out, lse, shares, sums,
    q_stride, q_head_stride, page_stride, row_stride, scale_page_stride, scale_row_stride, ids_stride, out_stride, out_head_stride,
    tokens, heads, rows, width, splits, scale_log2,
    L: tl.constexpr, BL: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PAGE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, HAS_COUNTS: tl.constexpr, LN2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    blocks = (heads + BH - 1) // BH
    pid = tl.program_id(0)
    head = pid % blocks * BH + tl.arange(0, BH)
    split = pid // blocks % splits
    token = (pid // blocks // splits).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    channel = tl.arange(0, BL)
    in_head = head < heads
    q_mask = in_head[:, None]
    if L != BL:
        q_mask = q_mask & (channel < L)[None, :]
    q_tile = tl.load(q + token * q_stride + head[:, None] * q_head_stride + channel[None, :], mask=q_mask, other=0.0)
    scale = 1.0
    if FORM == 2:
        scale = tl.load(kv_scale)
    count = width
    if HAS_COUNTS:
        count = tl.minimum(tl.load(counts + token), width)
    steps = (tl.maximum(count, 0) + BN - 1) // BN
    begin = split * steps // splits
    end = (split + 1) * steps // splits

    acc = tl.zeros([BH, BL], tl.float32)
    total = tl.zeros([BH], tl.float32)
    base = tl.full([BH], -float("inf"), tl.float32)  # log2 of what the weights are over
    ids += token * ids_stride
    for step in tl.range(begin, end, num_stages=STAGES):
        column = step * BN + tl.arange(0, BN)
        row = tl.load(ids + column, mask=column < count, other=-1)
        valid = (row >= 0) & (row < rows)
        at = row_offsets(row, page_stride, row_stride, PAGE)
        scale_at = row_offsets(row, scale_page_stride, scale_row_stride, PAGE)
        k = _load_tile(latent, scales, scale, at, scale_at, valid, channel, L, BL, BN, FORM, GROUP, q_tile.dtype)
        s = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(valid[None, :], s, -float("inf"))
        most = tl.maximum(base, tl.ceil(tl.max(s, 1)))
        over = tl.where(most == -float("inf"), 0.0, most)
        p = tl.exp2(s - over[:, None])
        shrink = tl.exp2(base - over)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q_tile.dtype), k, acc * shrink[:, None], input_precision="ieee")
        base = most

    mask = in_head[:, None]
    if L != BL:
        mask = mask & (channel < L)[None, :]
    if not SPLIT:
        share = tl.where(total == 0.0, 0.0, 1.0 / total)
        y = tl.where(total[:, None] == 0.0, 0.0, acc * share[:, None])
        tl.store(out + token * out_stride + head[:, None] * out_head_stride + channel[None, :], y.to(out.dtype.element_ty), mask=mask)
        tl.store(lse + token * heads + head, tl.where(total == 0.0, -float("inf"), (tl.log2(total) + base) * LN2), mask=in_head)
    else:
        at_share = (token * splits + split) * heads + head
        if begin < end:
            tl.store(shares + at_share[:, None] * L + channel[None, :], acc, mask=mask)
        tl.store(sums + at_share, total, mask=in_head)
        tl.store(sums + tokens.to(tl.int64) * splits * heads + at_share, base, mask=in_head)


@triton.jit(do_not_specialize=["tokens", "splits"])
def mla_combine_kernel(
    shares, sums, out, lse, out_stride, out_head_stride, tokens, heads, splits,
    L: tl.constexpr, BL: tl.constexpr, BS: tl.constexpr, LN2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Shares of one query and head, [splits, L], as one; those without rows are not read."""
    pid = tl.program_id(0)
    head = pid % heads
    token = (pid // heads).to(tl.int64)
    channel = tl.program_id(1) * BL + tl.arange(0, BL)
    split = tl.arange(0, BS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (token * splits + split) * heads + head
    total = tl.load(sums + at, mask=split < splits, other=0.0)
    base = tl.load(sums + tokens.to(tl.int64) * splits * heads + at, mask=split < splits, other=-float("inf"))
    most = tl.max(base, 0)
    over = tl.where(most == -float("inf"), 0.0, most)
    weight = tl.exp2(base - over)  # powers of two, and 0
    whole = tl.sum(weight * total, 0)
    used = (base > -float("inf")) | (total != total)
    mask = used[:, None] & (channel < L)[None, :]
    x = tl.load(shares + at[:, None] * L + channel[None, :], mask=mask, other=0.0)
    y = tl.where(whole == 0.0, 0.0, tl.sum(x * weight[:, None], 0) / whole)
    tl.store(out + token * out_stride + head * out_head_stride + channel, y.to(out.dtype.element_ty), mask=channel < L)
    if tl.program_id(1) == 0:
        tl.store(lse + token * heads + head, tl.where(whole == 0.0, -float("inf"), (tl.log2(whole) + most) * LN2))


def page_constant(pool: Tensor) -> int:
    """PAGE for `row_offsets`: 0 where the rows of all pages are equally far apart."""
    pages, page, _ = pool.shape
    return 0 if page == 0 or pages <= 1 or pool.stride(0) == page * pool.stride(1) else page


def launch(
    tile: MlaTile,
    sizes: validate_mla.AttendSizes,
    q: Tensor,
    latent: Tensor,
    *,
    ids: Tensor,
    counts: Tensor | None = None,
    scale: float,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The launches of validated arguments with a given tile."""
    tokens, heads, channels = sizes.tokens, sizes.heads, sizes.channels
    out = torch.empty(tokens, heads, channels, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    form, codes, scales = FLAT, latent, latent
    if latent.dtype == torch.uint8:
        form, codes = SCALED, latent[..., :channels].view(torch.float8_e4m3fn)
        scales = latent[..., channels : fp8.row_bytes(channels)].view(torch.float32)
    elif kv_scale is not None:
        form = STATIC
    if sizes.page == 1:  # a flat cache: one page of all rows
        codes, scales = codes.transpose(0, 1), scales.transpose(0, 1)
    padded = max(triton.next_power_of_2(channels), LEAST_DOT)
    block = min(tile.heads, max(triton.next_power_of_2(heads), LEAST_DOT))
    splits = max(1, min(tile.splits, triton.cdiv(sizes.width, tile.rows)))
    shares = sums = lse
    if splits > 1:
        shares = torch.empty(tokens * splits * heads * channels, dtype=torch.float32, device=q.device)
        sums = torch.empty(2 * tokens * splits * heads, dtype=torch.float32, device=q.device)
    constant: dict[str, Any] = dict(L=channels, LN2=LN2, PDL=tile.pdl)
    mla_attend_kernel[(tokens * splits * triton.cdiv(heads, block),)](
        q, codes, scales, kv_scale, ids, counts, out, lse, shares, sums,
        q.stride(0), q.stride(1), codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), ids.stride(0),
        out.stride(0), out.stride(1), tokens, heads, sizes.rows, sizes.width, splits, scale * LOG2E,
        BL=padded, BH=block, BN=tile.rows, SPLIT=splits > 1, STAGES=tile.stages, PAGE=page_constant(codes), FORM=form, GROUP=fp8.GROUP,
        HAS_COUNTS=counts is not None, **constant,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, launch_pdl=tile.pdl,
    )  # fmt: skip
    if splits > 1:
        merge = min(tile.merge, padded)
        mla_combine_kernel[(tokens * heads, triton.cdiv(channels, merge))](
            shares, sums, out, lse, out.stride(0), out.stride(1), tokens, heads, splits,
            BL=merge, BS=triton.next_power_of_2(splits), **constant, num_warps=4, enable_fp_fusion=True, launch_pdl=tile.pdl,
        )  # fmt: skip
    return out, lse


def readable(sizes: validate_mla.AttendSizes, q: Tensor, latent: Tensor) -> None:
    """TypeError or ValueError for rows that the kernel can't read though the reference can."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        _fail("q", "dtype bfloat16, float16 or float32", q.dtype, "float64 is for the reference", TypeError)
    if latent.dtype not in (torch.uint8, fp8.E4M3, q.dtype):
        _fail("latent", f"the dtype of q, {q.dtype}, or FP8 rows", latent.dtype, "convert the queries", TypeError)
    aligned = [*latent.stride()[:2], latent.storage_offset(), latent.data_ptr()]
    if latent.dtype == torch.uint8 and any(x % 4 for x in aligned):
        _fail("latent", "rows at multiples of 4 bytes", f"strides {latent.stride()}", "a row holds FP32 scales: pad it")


def attend(
    q: Tensor,
    latent: Tensor,
    *,
    ids: Tensor,
    counts: Tensor | None = None,
    scale: float,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.mla.attend` in Triton; arguments, errors and return values as there, for 1 to 128 heads.

    BF16, FP16 or FP32 queries over rows of the same dtype or FP8. Rounds as CONTRACT says: FP8 rows as dequantised, and the
    weights. Reads no value on the host. CPU tensors only in Triton's interpreter.
    """
    sizes = validate_mla.attend(q, latent, ids=ids, counts=counts, scale=scale, kv_scale=kv_scale, kernel=KERNEL)
    readable(sizes, q, latent)
    if q.device.type == "cpu":
        interpreter.require("q")
        validate_mla.attend_values(q, latent, ids, counts, kv_scale)
    tile = mla_tile(arch.of_device(str(q.device)), kind(q.dtype, latent.dtype), sizes.heads, sizes.tokens)
    return launch(tile, sizes, q, latent, ids=ids, counts=counts, scale=scale, kv_scale=kv_scale)
