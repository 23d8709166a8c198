"""Latent rows into every form of cache: the reference's bytes, and nothing beside them."""

import importlib.util

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from parity.buffers import same_bits
from reference import fp8, mla
from reference.mla_cache import MlaCache

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
import triton.language as tl

from optimized import mla_store

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")

CHANNELS = 256
TABLE = torch.tensor([[4, 0, -1], [2, 5, 9]], dtype=torch.int32)
OWNER = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1], dtype=torch.int32)
POSITION = torch.tensor([3, 4, 0, 7, 9, -1, 12, 8], dtype=torch.int32)  # 9, 12 and 8 have no page


def rows(dtype: torch.dtype) -> Tensor:
    """Of very different sizes, one of them zero, one beyond a static scale, and near ties."""
    x = torch.randn(8, CHANNELS, generator=torch.Generator().manual_seed(5))
    x *= torch.tensor([1.0, 300.0, 1e-6, 0.0, 1.0, 1.0, 1.0, 1.0])[:, None]
    x[2, :128] = torch.arange(128) * 0.0137 / 16
    x[3, 200] = 448.0
    return x.to(dtype)


def caches(form: str, dtype: torch.dtype) -> list[MlaCache]:
    """Two of pages that are apart, every byte 0xFF."""
    width = {"scaled": fp8.row_bytes(CHANNELS), "reserved": fp8.row_bytes(CHANNELS, reserved=True)}.get(form, CHANNELS)
    kind = {"plain": dtype, "static": torch.float8_e4m3fn}.get(form, torch.uint8)
    made = []
    for _ in range(2):
        wide = torch.full((6, 6, (width + 16) * kind.itemsize), 0xFF, dtype=torch.uint8).view(kind)
        keys, scale = torch.zeros(6, 1, 4), torch.tensor([0.0137]) if form == "static" else None
        made.append(MlaCache(wide[:, :4, :width], keys, torch.zeros(1, 4, 8), scale))
    return made


@pytest.mark.parametrize("form", ["plain", "scaled", "reserved", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("policy", ["fp32", "pow2"])
def test_the_bytes_are_the_references(form: str, dtype: torch.dtype, policy: fp8.Policy) -> None:
    given = rows(dtype)
    ours, theirs = caches(form, dtype)
    where = dict(owner=OWNER, position=POSITION, block_table=TABLE, policy=policy)
    mla_store.store(given, cache=ours, **where)
    mla.store(given, cache=theirs, **where)
    whole = [cache.latent.as_strided((6, 6, cache.latent.stride(1)), cache.latent.stride()) for cache in (ours, theirs)]
    bytes_ = [x.contiguous().view(torch.uint8) for x in whole]
    assert torch.equal(*bytes_)
    touched = (bytes_[0] != 0xFF).any(-1).nonzero().tolist()
    assert touched == [[0, 0], [2, 0], [4, 3], [5, 3]]


@pytest.mark.parametrize("form", ["plain", "scaled", "static"])
def test_nan_stays_nan_and_infinity_is_as_in_the_reference(form: str) -> None:
    given = rows(torch.float32)
    given[0, 5], given[3, 130], given[1, 7] = torch.nan, torch.inf, -torch.inf
    ours, theirs = caches(form, torch.float32)
    for module, cache in ((mla_store, ours), (mla, theirs)):
        module.store(given, cache=cache, owner=OWNER, position=POSITION, block_table=TABLE)
    values = [mla.read_rows(cache.latent, CHANNELS, torch.arange(24), cache.scale, torch.float32) for cache in (ours, theirs)]
    assert torch.equal(*(x.nan_to_num(7.0) for x in values)) and torch.equal(*(x.isnan() for x in values))
    assert values[0][19].isnan().any()  # page 4, row 3


@triton.jit
def clamped_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, mla_store._clamped(tl.load(x + i), 448.0))


def test_nothing_beyond_448_reaches_the_cast() -> None:
    """A cast may saturate by itself; this must not depend on it."""
    x = torch.tensor([447.0, 449.0, -449.0, torch.inf, -torch.inf, 1e4, 0.0, torch.nan])
    y = torch.empty_like(x)
    clamped_kernel[(1,)](x, y, N=8)
    assert y[:7].tolist() == [447.0, 448.0, -448.0, 448.0, -448.0, 448.0, 0.0] and y[7].isnan()


def test_an_odd_pitch_and_wide_rows_are_refused() -> None:
    cache = caches("scaled", torch.float32)[0]
    where = dict(owner=OWNER, position=POSITION, block_table=TABLE)
    odd = MlaCache(torch.zeros(6, 4, 265, dtype=torch.uint8)[..., :264], cache.pool_keys, cache.ring)
    with pytest.raises(ValueError, match=r"cache\.latent: expected rows at multiples of 4 bytes, got strides "):
        mla_store.store(rows(torch.float32), cache=odd, **where)
    with pytest.raises(TypeError, match="row: expected dtype bfloat16, float16 or float32, got "):
        mla_store.store(rows(torch.float64), cache=cache, **where)
    with pytest.raises(ValueError, match="policy: expected fp32 or pow2, got 'ue8m0'; "):
        mla_store.store(rows(torch.float32), cache=cache, **where, policy="ue8m0")  # type: ignore[arg-type]


def test_what_was_stored_is_attended_to() -> None:
    """Through the core kernel: written and read in one format."""
    from optimized import mla_attend

    cache = caches("reserved", torch.bfloat16)[0]
    given = rows(torch.bfloat16).nan_to_num(0, 0, 0)
    mla_store.store(given, cache=cache, owner=OWNER, position=POSITION, block_table=TABLE)
    ids = torch.tensor([[4 * 4 + 3, 0, 2 * 4, 5 * 4 + 3]], dtype=torch.int32)
    q = torch.randn(1, 3, CHANNELS, generator=torch.Generator().manual_seed(6)).bfloat16()
    out, _ = mla_attend.attend(q, cache.latent, ids=ids, scale=0.05)
    stored = fp8.dequantize_rows(fp8.quantize_rows(given[[0, 1, 2, 3]]), CHANNELS).bfloat16()
    expected, _ = mla_attend.attend(q, stored[:, None], ids=torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), scale=0.05)
    assert same_bits(out, expected)
