"""The FlashMLA adapter around a stand-in that is as particular as the package: padding, widths, bases of the LSE, FP8 in pieces."""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import arch
from optimized.peers import flash_mla
from reference import mla
from tests.optimized.attention import NAN, away, core

ROWS = dict(channels=512, pages=3, page=4)


def particular(base: float, empty: float, calls: list[tuple[int, ...]]) -> Any:
    """A release of `flash_mla_sparse_fwd`: what it asserts, an LSE in its base, and its own LSE for a row without rows."""

    def flash_mla_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512) -> tuple[Tensor, Tensor, Tensor]:
        assert q.dtype == kv.dtype == torch.bfloat16 and q.shape[1] in (64, 128) and q.is_contiguous() and d_v == 512
        assert kv.shape[1:] == (1, 512) and indices.dtype == torch.int32 and indices.shape[1] == 1 and indices.shape[2] % 128 == 0
        calls.append((*q.shape[:2], kv.shape[0], indices.shape[2]))
        out, lse = mla.attend(q, kv, ids=indices[:, 0], scale=sm_scale)
        out[lse == -torch.inf] = NAN
        return out, lse, (lse / math.log(base)).masked_fill(lse == -torch.inf, empty)

    return flash_mla_sparse_fwd


@pytest.fixture(params=[(math.e, -math.inf), (2.0, math.inf)], ids=["natural", "base 2"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the calls of a stand-in that is installed, on a device that says it is Hopper."""
    seen: list[tuple[int, ...]] = []
    module = ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = particular(*request.param, seen)  # type: ignore[attr-defined]
    module.__spec__ = SimpleNamespace(name="flash_mla")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr(arch, "of_device", lambda device: "sm90")
    flash_mla.lse_unit.cache_clear()
    return seen


IDS = [[5, -1, 7, 99, 2], [3, 3, 3, 11, 10], [-1, -1, 99, -5, -1]]


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 128])
def test_heads_and_ids_are_padded_and_the_lse_is_natural(calls: list[tuple[int, ...]], heads: int) -> None:
    assert away(flash_mla.attend, core(IDS, heads=heads, **ROWS)) <= 1
    assert calls[0] == (3, 64 if heads <= 64 else 128, 12, 128)


def test_the_real_width_is_2176(calls: list[tuple[int, ...]]) -> None:
    given = core(torch.arange(2051)[None] % 12, **ROWS)
    flash_mla.attend(**given)
    assert calls[0][3] == 2176


def test_columns_past_the_count_are_cut(calls: list[tuple[int, ...]]) -> None:
    given = core(IDS, counts=torch.tensor([1, 2, 5], dtype=torch.int32), **ROWS)
    given["latent"].view(12, 512)[[7, 2, 11, 10]] = NAN
    out, lse = flash_mla.attend(**given)
    assert out.isfinite().all() and lse[:2].isfinite().all()


@pytest.mark.parametrize("form", ["scaled", "reserved", "static", "apart"])
def test_other_rows_are_gathered_in_bounded_pieces(calls: list[tuple[int, ...]], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "QUERIES_AT_ONCE", 2)
    given = core(IDS, form="plain" if form == "apart" else form, **ROWS)
    if form == "apart":
        far = torch.full((3, 6, 512), NAN, dtype=torch.bfloat16)
        far[:, :4] = given["latent"]
        given["latent"] = far[:, :4]
    out, lse = flash_mla.attend(**given)
    rows = mla.read_rows(given["latent"], 512, torch.arange(12), given.get("kv_scale"), torch.bfloat16)
    plain = {**given, "latent": rows[:, None], "kv_scale": None}
    for x, y in zip((out, lse), mla.attend(**plain), strict=True):
        torch.testing.assert_close(x, y)
    assert [call[2] for call in calls[:2]] == [2 * 128, 128]


def test_without_the_package_it_is_not_supported_and_does_not_run() -> None:
    runs, reason = flash_mla.supports("sm90", torch.bfloat16, 64, 512)
    assert not runs and reason.startswith("flash_mla is not installed")
    with pytest.raises(ImportError, match="flash_mla: pip install sgl-flash-mla"):
        flash_mla.attend(**core(IDS, **ROWS))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("sm80", torch.bfloat16, 64, 512), "for sm90, sm100, sm103 and sm107, not sm80"),
        (("sm90", torch.float16, 64, 512), "takes bfloat16, not float16"),
        (("sm90", torch.bfloat16, 129, 512), "takes up to 128 heads, not 129"),
        (("sm90", torch.bfloat16, 64, 576), "takes rows of 512 channels, not 576"),
    ],
)
def test_what_it_does_not_run_is_said(calls: list[Any], given: tuple[Any, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    runs, reason = flash_mla.supports(*given)
    assert not runs and says in reason
    assert flash_mla.supports("sm90", torch.bfloat16, 16, 512)[0]


def test_more_heads_than_it_serves_are_refused_by_name(calls: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="q: expected 1 to 128 heads for flash_mla_sm90, got 130; shard the heads"):
        flash_mla.attend(**core(IDS, heads=130, **ROWS))
