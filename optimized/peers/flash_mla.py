"""The FlashMLA baseline of `mla.attend`: `flash_mla_sparse_fwd` under our signature.

Needs the package flash_mla (sgl-flash-mla, whose legacy kernels serve SM90, or a build from source). It takes 64 or 128 heads,
widths that are multiples of 128 and BF16 rows: heads and ids are padded here, and FP8 rows, or pages that are apart, are gathered
and dequantised for some queries at a time. Source: FlashMLA, `flash_mla_sparse_fwd`; spec of the model, section 6.7.
"""

import functools
import importlib
import importlib.util
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized import arch, contracts
from reference import mla, validate_mla
from reference.widths import RULES, align_width, check_width, padded_heads

CONTRACT = contracts.MLA_ATTEND
CHANNELS = 512
QUERIES_AT_ONCE = 64  # whose rows are gathered: 142 MB at a width of 2176
PROBE_WIDTH = 128


def rule_of(arch_name: str, heads: int) -> str:
    """The name in `widths.RULES` of the kernel that serves so many heads."""
    if arch_name == "sm90":
        return "flash_mla_sm90"
    return "flash_mla_sm100_h64" if heads <= RULES["flash_mla_sm100_h64"].heads[-1] else "flash_mla_sm100_h128"


def supports(arch_name: str, dtype: torch.dtype, heads: int, channels: int) -> tuple[bool, str]:
    """Whether FlashMLA runs this problem, and why or why not."""
    if importlib.util.find_spec("flash_mla") is None:
        return False, "flash_mla is not installed: pip install sgl-flash-mla (CUDA 13), or build FlashMLA from source"
    if arch_name not in ("sm90", "sm100", "sm103", "sm107"):
        return False, f"FlashMLA's sparse kernels are for sm90, sm100, sm103 and sm107, not {arch_name}"
    if dtype != torch.bfloat16:
        return False, f"FlashMLA takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if channels != CHANNELS:
        return False, f"FlashMLA takes rows of {CHANNELS} channels, not {channels}"
    most = RULES[rule_of(arch_name, heads)].heads[-1]
    if not 1 <= heads <= most:
        return False, f"FlashMLA takes up to {most} heads, not {heads}"
    return True, "bfloat16, 512 channels, heads padded to 64 or 128 and ids to a multiple of 128"


def _package() -> Any:
    try:
        return importlib.import_module("flash_mla")
    except ImportError as error:
        raise ImportError("flash_mla: pip install sgl-flash-mla (CUDA 13), or choose another implementation") from error


def _forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """FlashMLA's own launch: `(out, lse)`, lse in its own base. Releases differ in what they let choose."""
    function = _package().flash_mla_sparse_fwd
    known, options = inspect.signature(function).parameters, {}
    if "return_log2_lse" in known:
        options["return_log2_lse"] = False
    if "use_legacy" in known and arch.of_device(str(q.device)) == "sm90":
        options["use_legacy"] = True
    out, _, lse = function(q, kv, indices, scale, d_v=CHANNELS, **options)
    return out, lse


@functools.cache
def lse_unit(device: str) -> float:
    """What turns this release's LSE into a natural logarithm, as measured: 128 equal logits have ln 128, or log2 128."""
    q = torch.zeros(1, 64, CHANNELS, dtype=torch.bfloat16, device=device)
    indices = torch.zeros(1, 1, PROBE_WIDTH, dtype=torch.int32, device=device)
    _, lse = _forward(q, q[:, :1].contiguous(), indices, 1.0)
    natural = math.log(PROBE_WIDTH)
    return 1.0 if abs(float(lse[0, 0]) - natural) < 1 else math.log(2.0)


def attend(
    q: Tensor,
    latent: Tensor,
    *,
    ids: Tensor,
    counts: Tensor | None = None,
    scale: float,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.mla.attend` with FlashMLA's kernel; arguments, errors and return values as there.

    Copies: queries padded to 64 or 128 heads, ids padded in width and cut by counts; FP8 rows of 64 queries at a time. Call it once
    before a CUDA graph is captured: the first call finds the base of the LSE. ImportError without the package, ValueError for what
    `supports` refuses.
    """
    validate_mla.attend(q, latent, ids=ids, counts=counts, scale=scale, kv_scale=kv_scale)
    _package()
    name, (_, heads, channels) = arch.of_device(str(q.device)), q.shape
    kernel = rule_of(name, heads)
    full = padded_heads(heads, kernel)
    runs, reason = supports(name, q.dtype, heads, channels)
    if not runs:
        raise ValueError(f"q: {reason}; choose another implementation")
    lse = q.new_full((len(q), heads), -torch.inf, dtype=torch.float32)
    if len(q) == 0 or latent.numel() == 0 or ids.shape[1] == 0:
        return torch.zeros_like(q), lse
    if counts is not None:
        ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= counts[:, None], -1)
    ids = F.pad(ids, (0, align_width(ids.shape[1], kernel) - ids.shape[1]), value=-1)
    check_width(ids.shape[1], kernel)
    wide = F.pad(q, (0, 0, 0, full - heads)).contiguous()
    if latent.dtype == torch.bfloat16 and (flat := _flat(latent)) is not None:
        out, lse = _forward(wide, flat, ids[:, None].contiguous(), scale)
    else:
        pieces = zip(wide.split(QUERIES_AT_ONCE), ids.split(QUERIES_AT_ONCE), strict=True)
        parts = [_forward(some, *_gathered(latent, rows, kv_scale), scale) for some, rows in pieces]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    out, lse = out[:, :heads], lse[:, :heads] * lse_unit(str(q.device))
    empty = lse.isinf()  # of either sign, by release
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)


def _flat(latent: Tensor) -> Tensor | None:
    """The cache as rows [rows, 1, C], None where pages are apart."""
    pages, page, channels = latent.shape
    if page > 1 and pages > 1 and latent.stride(0) != page * latent.stride(1):
        return None
    step = latent.stride(1) if page > 1 else latent.stride(0)
    return latent.as_strided((pages * page, 1, channels), (step, step, 1))


def _gathered(latent: Tensor, ids: Tensor, kv_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of some queries as a cache of their own, BF16, and ids into it."""
    rows = mla.read_rows(latent, CHANNELS, ids.flatten().long(), kv_scale, torch.bfloat16)
    inside = (ids >= 0) & (ids < latent.shape[0] * latent.shape[1])
    own = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view_as(ids)
    return rows[:, None].contiguous(), torch.where(inside, own, -1)[:, None].contiguous()
