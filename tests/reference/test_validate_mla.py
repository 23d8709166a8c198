"""What sparse MLA operators refuse, by name and with the rule that was broken; nothing is touched."""

from typing import Any

import pytest
import torch

from reference import fp8, kpool, mla, validate_mla
from reference.mla_cache import MlaCache, Sequences
from tests.reference.test_kda import int32
from tests.reference.test_kda_verify import NAN
from tests.reference.test_kpool import scored
from tests.reference.test_mla import core
from tests.reference.test_mla_layer import cache, normal, table, weights

E4M3 = torch.float8_e4m3fn


def bytes_of(scales: list[float]) -> torch.Tensor:
    """A cache of three 132-byte rows with these scales."""
    rows = fp8.quantize_rows(normal(3, 128))
    rows[:, 128:132] = torch.tensor(scales)[:, None].view(torch.uint8)
    return rows[:, None]


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"ids": torch.zeros(1, 2).long()}, TypeError, "ids: expected dtype int32, got int64; ids are int32"),
        ({"ids": torch.zeros(1, 2)}, TypeError, "ids: expected dtype int32, got float32; "),
        ({"ids": [[0]]}, TypeError, r"ids: expected a tensor \[T, W\], got list; "),
        ({"ids": torch.zeros(2, 2).int()}, ValueError, r"ids: expected shape \[1, 2\], got \[2, 2\]; T, H and L come from q"),
        ({"counts": torch.zeros(1).long()}, TypeError, "counts: expected dtype int32, got int64; "),
        ({"counts": int32(1, 1)}, ValueError, r"counts: expected shape \[1\], got \[2\]; "),
        ({"q": torch.zeros(1, 8)}, TypeError, r"q: expected a tensor \[T, H, L\], got \[1, 8\]; "),
        ({"q": torch.zeros(1, 0, 8)}, ValueError, "q: expected 1 to 4096 heads for reference, got 0; "),
        ({"q": torch.zeros(1, 3, 16)[..., ::2]}, ValueError, "q: expected the last dimension contiguous"),
        ({"latent": torch.zeros(20, 8)}, TypeError, r"latent: expected a tensor \[pages, P, C\], got \[20, 8\]; .*cache\[:, None\]"),
        ({"latent": torch.zeros(5, 4, 9)}, ValueError, "latent: expected rows of 8 channels, got 9; "),
        ({"latent": torch.zeros(5, 4, 8).int()}, TypeError, "latent: expected a floating dtype, float8_e4m3fn, or uint8 rows"),
        ({"latent": torch.zeros(5, 4, 8).to(E4M3)}, ValueError, "kv_scale: expected a scale .*, got none"),
        ({"kv_scale": torch.ones(1)}, ValueError, r"kv_scale: expected a scale for .* only there, got one with torch\.float64 rows; "),
        ({"latent": torch.zeros(5, 4, 8).to(E4M3), "kv_scale": 0.5}, TypeError, "kv_scale: expected an FP32 tensor"),
        ({"latent": torch.zeros(5, 4, 8).to(E4M3), "kv_scale": torch.ones(2)}, TypeError, "kv_scale: expected an FP32 tensor"),
        ({"scale": 0.0}, ValueError, "scale: expected a positive finite number, got 0.0; "),
        ({"scale": NAN}, ValueError, "scale: expected a positive finite number, got nan; "),
        ({"scale": -1.0}, ValueError, "scale: expected a positive finite number, got -1.0; "),
    ],
)  # fmt: skip
def test_attend_refuses(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        mla.attend(**core([[1, 2]]) | changed)


@pytest.mark.parametrize("scale", [0.0, NAN, torch.inf, -1.0])
def test_a_scale_of_zero_or_nan_is_refused_where_it_is_used(scale: float) -> None:
    given = core([[1, 2]], q=normal(1, 3, 128), latent=bytes_of([0.1, scale, 0.2]))
    with pytest.raises(ValueError, match=r"latent: expected positive finite scales, got \[.*\]; quantise the rows again"):
        mla.attend(**given)
    for unused in (dict(ids=int32(0, 2)[None]), dict(ids=int32(0, 2, 1)[None], counts=int32(2)), dict(ids=int32(-1, 7)[None])):
        assert all(x.isfinite().all() or x.max() == -torch.inf for x in mla.attend(**{**given, **unused}))
    given = core([[1, 2]]) | dict(latent=torch.zeros(5, 4, 8).to(E4M3), kv_scale=torch.tensor([scale]))
    with pytest.raises(ValueError, match="kv_scale: expected positive finite scales, got "):
        mla.attend(**given)


@pytest.mark.parametrize(("kernel", "width"), [("flash_mla_sm90", 2112), ("flash_mla_sm90", 2051), ("flash_mla_sm100_h64", 64)])
def test_a_width_that_the_kernel_refuses_is_refused_by_name(kernel: str, width: int) -> None:
    given = core([[1] * width], q=normal(1, 64, 8), counts=None, kv_scale=None)
    with pytest.raises(
        ValueError, match=f"ids: expected a width that is a multiple of 128 for {kernel} .*, got {width}; allocate align_width"
    ):
        validate_mla.attend(**given, kernel=kernel)
    assert validate_mla.attend(**given, kernel="triton").width == width


@pytest.mark.parametrize(("kernel", "heads"), [("flash_mla_sm90", 129), ("triton", 130), ("flash_mla_sm100_h64", 65)])
def test_heads_that_the_kernel_cannot_serve_are_refused_by_name(kernel: str, heads: int) -> None:
    given = core([[1] * 128], q=normal(1, heads, 8), counts=None, kv_scale=None)
    with pytest.raises(ValueError, match=rf"q: expected 1 to \d+ heads for {kernel}, got {heads}; shard the heads"):
        validate_mla.attend(**given, kernel=kernel)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"owner": int32(0)}, ValueError, r"owner: expected shape \[6\], got \[1\]; one for each token"),
        ({"position": torch.zeros(6).long()}, TypeError, "position: expected dtype int32, got int64; "),
        ({"block_table": torch.zeros(2, 4)}, TypeError, "block_table: expected dtype int32, got float32; "),
        ({"pool_keys": torch.zeros(8, 4, 9)}, ValueError, r"pool_keys: expected shape \[8, 4, 8\], got \[8, 4, 9\]; "),
        ({"head_weight": torch.zeros(6, 4)}, ValueError, r"head_weight: expected shape \[6, 3\], got \[6, 4\]; "),
        ({"index_q": torch.zeros(6, 8)}, TypeError, r"index_q: expected a tensor \[T, Hi, D\], got \[6, 8\]; "),
    ],
)  # fmt: skip
def test_scores_refuse(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        kpool.scores(**scored() | changed)


@pytest.mark.parametrize(("name", "value"), [("page", 6), ("page", 0), ("page", 8.0), ("top", 0)])
def test_select_refuses(name: str, value: object) -> None:
    given = dict(owner=int32(0), position=int32(3), block_table=int32(0)[None], page=8) | {name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got {value}; "):
        kpool.select(torch.zeros(1, 2), **given)


def layer(**changed: Any) -> None:
    rows = Sequences(int32(0), int32(0), int32(0, 6), table(5))
    given = dict(hidden=normal(6, 12), weights=weights(), cache=cache(), sequences=rows) | changed
    mla.layer(**given)


def replaced(of: object, **changed: Any) -> Any:
    return type(of)(**{**vars(of), **changed})


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"hidden": normal(6, 11)}, ValueError, r"hidden: expected shape \[6, 12\], got \[6, 11\]; it must fit"),
        ({"weights": replaced(weights(), heads=5)}, ValueError, "q_b_proj: expected a multiple of 5 heads, got 24; "),
        ({"weights": replaced(weights(), kv_b_proj=normal(43, 8))}, ValueError, r"kv_b_proj: expected shape \[44, 8\], got \[43, 8\]; "),
        ({"weights": replaced(weights(), k_norm_bias=None)}, TypeError, "k_norm_bias: expected a tensor, got NoneType; "),
        ({"cache": replaced(cache(), pool_keys=normal(15, 4, 4))}, ValueError, "cache.pool_keys: expected 15 pages of 2 pools"),
        ({"cache": replaced(cache(), latent=normal(15, 6, 8))}, ValueError, "cache.latent: expected pages of a multiple of 4"),
        ({"cache": replaced(cache(), latent=normal(1, 8, 8).expand(15, 8, 8))}, ValueError, "cache.latent: expected distinct elements"),
        ({"cache": replaced(cache(), ring=normal(3, 3, 8))}, ValueError, "ring: expected at least 4 rows, 4 .* S with S drafts, got 3; "),
        ({"cache": replaced(cache(), latent=cache().latent.to(E4M3), scale=torch.zeros(1))}, ValueError, "cache.scale: expected positive"),
        ({"sequences": Sequences(int32(0), int32(0), int32(0, 6), table(5).long())}, TypeError, "table: expected dtype int32"),
        ({"sequences": Sequences(int32(0, 1), int32(0, 0), int32(0, 6, 6), table(5))}, ValueError, "table: expected a row for each of 2"),
        ({"sequences": Sequences(int32(0, 0), int32(0, 0), int32(0, 3, 6), table(5, 2))}, ValueError, "slots: expected distinct"),
        ({"sequences": Sequences(int32(0), int32(35), int32(0, 6), table(5))}, ValueError, "expected at least 6 blocks .* short"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps: expected a positive finite float, got 0.0"),
        ({"top": 0}, ValueError, "top: expected at least one pool, got 0; "),
    ],
)  # fmt: skip
def test_the_layer_refuses_before_anything_is_touched(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    kept = changed.get("cache", cache())
    before = MlaCache(**{name: None if x is None else x.clone() for name, x in vars(kept).items()})
    with pytest.raises(kind, match=message):
        layer(**{"cache": kept, **changed})
    for name in ("latent", "pool_keys", "ring"):
        x, y = getattr(kept, name), getattr(before, name)
        torch.testing.assert_close(x.float(), y.float(), equal_nan=True)


def test_combine_refuses() -> None:
    with pytest.raises(ValueError, match=r"lses: expected shape \[2, 1, 3\], got \[2, 1, 4\]; "):
        mla.combine(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 4))
    with pytest.raises(ValueError, match="outs: expected at least one part, got 0; "):
        mla.combine(torch.zeros(0, 1, 3, 8), torch.zeros(0, 1, 3))


def test_pool_keys_refuse() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"index_k: expected a tensor \[\.\.\., 4, D\], got \[3, 8\]; a pool has 4 tokens"):
        kpool.pool_keys(x, x, ape=torch.zeros(4, 8))
