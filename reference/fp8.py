"""E4M3 rows of the latent cache: 528 and 656 bytes with a scale for each 128 channels, or one scale for the tensor.

A 528-byte row is 512 codes and four FP32 scales; a 656-byte row adds 128 reserved bytes, zero, where other models keep a
rotary part. A scale is used as it is stored, whatever its policy. Source: spec of the model, section 7 (SGLang; FlashMLA;
vLLM 55277).
"""

from typing import Literal

import torch
from torch import Tensor

from reference.validate import _fail

GROUP = 128  # channels of one scale
RESERVED = 128  # bytes of the longer row after its scales
LARGEST = 448.0
LEAST_ROW_SCALE = 1e-4  # of a KV row: amax / 448 is raised to it, so that a zero row has a scale
E4M3 = torch.float8_e4m3fn

Policy = Literal["fp32", "pow2"]


def row_bytes(channels: int, reserved: bool = False) -> int:
    """Bytes of a row: 528 for 512 channels, 656 with the reserved part."""
    return channels + channels // GROUP * 4 + (RESERVED if reserved else 0)


def saturate(x: Tensor) -> Tensor:
    """E4M3 of x to nearest even, clamped to +-448 before the cast: a cast alone differs there between versions. NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def scale_of(amax: Tensor, policy: Policy, least: float) -> Tensor:
    """max(amax / 448, least) in FP32, raised to a power of two by `pow2`."""
    if policy not in ("fp32", "pow2"):
        _fail("policy", "fp32 or pow2", repr(policy), "fp32 stores the scale as it is, pow2 raises it to a power of two")
    scale = (amax.float() / LARGEST).clamp(min=least)
    if policy == "fp32":
        return scale
    mantissa, exponent = torch.frexp(scale)  # exact, unlike log2
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def quantize_rows(x: Tensor, *, policy: Policy = "fp32", reserved: bool = False, least: float = LEAST_ROW_SCALE) -> Tensor:
    """Rows [..., L] as bytes [..., L + L/32], plus 128 zero bytes with `reserved`: s = max(amax / 448, least), code = e4m3(x / s).

    amax over each 128 channels, all in FP32. Returns uint8: L codes, L/128 FP32 scales. ValueError when L is no multiple of 128.
    """
    channels = x.shape[-1]
    if channels == 0 or channels % GROUP:
        _fail("x", f"a last dimension that is a multiple of {GROUP}", channels, "a scale belongs to 128 channels")
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = scale_of(groups.abs().amax(-1), policy, least)
    codes = saturate(groups / scale[..., None]).flatten(-2).view(torch.uint8)
    parts = [codes, scale.view(torch.uint8)]
    if reserved:
        parts.append(codes.new_zeros(*codes.shape[:-1], RESERVED))
    return torch.cat(parts, dim=-1)


def dequantize_rows(rows: Tensor, channels: int) -> Tensor:
    """code * scale in FP32, [..., channels]; the reserved bytes are not read."""
    check_rows(rows, channels)
    codes = rows[..., :channels].contiguous().view(E4M3).float()
    return (codes.unflatten(-1, (-1, GROUP)) * row_scales(rows, channels)[..., None]).flatten(-2)


def row_scales(rows: Tensor, channels: int) -> Tensor:
    """The FP32 scales [..., channels/128] of rows of bytes, as stored."""
    return rows[..., channels : row_bytes(channels)].contiguous().view(torch.float32)


def check_rows(rows: Tensor, channels: int, name: str = "rows") -> None:
    """TypeError or ValueError unless these are rows of bytes of one of the two formats."""
    if rows.dtype != torch.uint8:
        _fail(name, "dtype uint8", rows.dtype, "rows with scales are bytes: quantize_rows makes them", TypeError)
    widths = (row_bytes(channels), row_bytes(channels, reserved=True))
    if channels == 0 or channels % GROUP or rows.shape[-1] not in widths:
        _fail(name, f"rows of {widths[0]} or {widths[1]} bytes for {channels} channels", rows.shape[-1], "quantize_rows makes them")


def quantize_tensor(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3(x / scale) with one static scale, an FP32 tensor of a single value."""
    return saturate(x.float() / scale)


def dequantize_tensor(codes: Tensor, scale: Tensor) -> Tensor:
    """code * scale in FP32."""
    return codes.float() * scale
