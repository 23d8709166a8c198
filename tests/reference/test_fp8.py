"""E4M3 rows to the bit, against integers and exact fractions that know nothing of torch's casts."""

import bisect
import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from reference import fp8

NAN, INF = float("nan"), float("inf")
CASTS = [447.0, 448.0, 449.0, 464.0, 465.0, 1e4, INF, -INF, -500.0]


def decode(code: int) -> Fraction:
    """The value of an E4M3 code below 0x7F: sign, four bits of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8) * Fraction(1, 64)
    return -size if sign else size


POSITIVE = [decode(code) for code in range(0x7F)]
MIDPOINTS = [float(a + b) / 2 for a, b in itertools.pairwise(POSITIVE)]


def encode(x: float) -> int:
    """Nearest code, ties to the even one, saturated; by comparing with the values on both sides."""
    if math.isnan(x):
        return 0x7F
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    if math.isinf(x) or abs(x) >= 448:
        return sign | 0x7E
    size = Fraction(abs(x))
    above = bisect.bisect(POSITIVE, size)
    return sign | min(range(max(above - 1, 0), min(above, 0x7E) + 1), key=lambda code: (abs(POSITIVE[code] - size), code & 1))


def single(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def row_of(x: list[float], policy: str) -> bytes:
    """The bytes of one row of FP32 values; divisions of FP32 by FP32 rounded from FP64 are those of FP32."""
    codes, scales = bytearray(), bytearray()
    for first in range(0, len(x), 128):
        group = x[first : first + 128]
        scale = max(single(max(map(abs, group)) / 448), single(1e-4))
        if policy == "pow2":
            exponent = -200
            while Fraction(2) ** exponent < Fraction(scale):
                exponent += 1
            scale = 2.0**exponent
        codes += bytes(encode(single(value / scale)) for value in group)
        scales += struct.pack("<f", scale)
    return bytes(codes + scales)


def bits(x: Tensor) -> bytes:
    return bytes(x.view(torch.uint8).flatten().tolist())


def rows(count: int = 6, channels: int = 512) -> Tensor:
    """Rows of very different sizes, one of them zero, one with a group of zeros, one whose codes are near ties."""
    x = torch.randn(count, channels, generator=torch.Generator().manual_seed(3))
    x *= torch.tensor([1.0, 1e-6, 300.0, 0.0, 1e4, 0.03])[:count, None]
    x[0, 128:256] = 0
    x[5, :126] = torch.tensor(MIDPOINTS)[-126:] * 0.0137  # where a product with 1 / scale falls on the other side
    x[5, 126:128] = 448 * 0.0137
    return x


@pytest.mark.parametrize("policy", ["fp32", "pow2"])
@pytest.mark.parametrize("reserved", [False, True])
def test_rows_are_those_of_the_formula_to_the_bit(policy: fp8.Policy, reserved: bool) -> None:
    x = rows()
    quantized = fp8.quantize_rows(x, policy=policy, reserved=reserved)
    assert quantized.shape == (6, 656 if reserved else 528) and quantized.dtype == torch.uint8
    expected = [row_of(row, policy) + bytes(128 if reserved else 0) for row in x.tolist()]
    assert [bits(row) for row in quantized] == expected


@pytest.mark.parametrize("policy", ["fp32", "pow2"])
def test_dequantised_rows_are_code_times_scale_as_stored(policy: fp8.Policy) -> None:
    quantized = fp8.quantize_rows(rows(), policy=policy)
    values = fp8.dequantize_rows(quantized, 512)
    for got, row in zip(values.tolist(), quantized, strict=True):
        data = bits(row)
        scales = struct.unpack("<4f", data[512:528])
        assert got == [single(float(decode(code)) * scales[i // 128]) for i, code in enumerate(data[:512])]


def test_scales_that_are_no_powers_of_two_are_used_as_stored() -> None:
    """Known failure 35: a power of two below them errs by a third and more."""
    scales = torch.tensor([0.0137, 0.9, 1.5, 3.3])
    row = torch.cat([torch.full((512,), 0x38, dtype=torch.uint8), scales.view(torch.uint8)])  # 0x38 is 1.0
    assert torch.equal(fp8.dequantize_rows(row, 512), scales.repeat_interleave(128))


def test_a_pow2_scale_is_the_next_power_of_two_and_an_exact_one_stays() -> None:
    scale = fp8.scale_of(torch.tensor([448.0, 449.0, 447.0, 896.0, 0.0]), "pow2", 1e-4)
    assert scale.tolist() == [1.0, 2.0, 1.0, 2.0, 2.0**-13]


def test_reserved_bytes_are_zero_and_never_read() -> None:
    """Known failure 36: stale memory before the write, BF16 NaN after it."""
    x, pool = rows(), torch.full((6, 656), 0xFF, dtype=torch.uint8)
    pool[:] = fp8.quantize_rows(x, reserved=True)
    assert not pool[:, 528:].any()
    expected = fp8.dequantize_rows(pool, 512)
    pool[:, 528:] = 0xFF
    assert torch.equal(fp8.dequantize_rows(pool, 512), expected) and expected.isfinite().all()


def test_every_code_and_every_midpoint_rounds_to_nearest_even() -> None:
    values = [*map(float, POSITIVE), *MIDPOINTS]
    values += [math.nextafter(x, side) for x in MIDPOINTS for side in (-INF, INF)]
    values += [-x for x in values]
    x = torch.tensor(values, dtype=torch.float32)
    assert list(bits(fp8.saturate(x))) == [encode(value) for value in x.tolist()]


def test_saturation_is_explicit_and_nan_stays_nan() -> None:
    """Known failure 38."""
    x = torch.tensor([*CASTS, NAN])
    codes = list(bits(fp8.saturate(x)))
    assert codes[:-1] == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE] and codes[-1] & 0x7F == 0x7F


def test_nothing_beyond_448_reaches_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions of torch saturate by themselves; this must not depend on it."""
    monkeypatch.setattr(fp8, "E4M3", torch.float32)
    assert fp8.saturate(torch.tensor([*CASTS])).tolist() == [447.0, *[448.0] * 6, -448.0, -448.0]


@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e-12, 448.0, 449.0])
def test_small_and_large_groups_have_finite_scales(amax: float) -> None:
    x = torch.zeros(128)
    x[5] = amax
    row = fp8.quantize_rows(x)
    scale, values = fp8.row_scales(row, 128), fp8.dequantize_rows(row, 128)
    assert scale.isfinite().all() and (scale > 0).all() and values.isfinite().all()
    assert values[5] == (single(448 * float(scale)) if amax >= 448 else 0.0)


def test_one_scale_for_the_tensor() -> None:
    x, scale = rows(), torch.tensor([0.75])
    codes = fp8.quantize_tensor(x, scale)
    assert codes.dtype == torch.float8_e4m3fn
    assert list(bits(codes)) == [encode(single(value / 0.75)) for value in x.flatten().tolist()]
    assert fp8.dequantize_tensor(codes, scale).tolist() == [[single(float(decode(c)) * 0.75) for c in bits(row)] for row in codes]


@pytest.mark.parametrize("channels", [0, 100, 576 - 512])
def test_channels_that_are_no_multiple_of_128_are_refused(channels: int) -> None:
    with pytest.raises(ValueError, match=f"x: expected a last dimension that is a multiple of 128, got {channels}; "):
        fp8.quantize_rows(torch.zeros(2, channels))


def test_rows_of_other_sizes_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: expected rows of 528 or 656 bytes for 512 channels, got 584; "):
        fp8.dequantize_rows(torch.zeros(1, 584, dtype=torch.uint8), 512)
    with pytest.raises(TypeError, match=r"rows: expected dtype uint8, got torch\.float32; "):
        fp8.dequantize_rows(torch.zeros(1, 528), 512)
    with pytest.raises(ValueError, match="policy: expected fp32 or pow2, got 'ue8m0'; "):
        fp8.quantize_rows(torch.zeros(1, 128), policy="ue8m0")  # type: ignore[arg-type]
