"""Sparse MLA: the absorbed core against the dense form and softmax written out, formats of the cache, splits."""

import math

import pytest
import torch
from torch import Tensor

from reference import fp8, mla
from reference.points import MLA_ATTEND, rounding, tapped
from tests.reference.test_kda import int32
from tests.reference.test_kda_verify import NAN
from tests.reference.test_kpool import normal

HEADS, CHANNELS, ROWS = 3, 8, 20
SCALE = 0.3


def core(ids: list[list[int]], **changed: object) -> dict:
    """Arguments of `attend` for these rows of ids, over pages of 4 rows."""
    given = dict(
        q=normal(len(ids), HEADS, CHANNELS), latent=normal(ROWS // 4, 4, CHANNELS, seed=1),
        ids=torch.tensor(ids, dtype=torch.int32), scale=SCALE,
    )  # fmt: skip
    return given | changed


def written_out(given: dict, t: int, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Softmax over these rows, one token."""
    c = given["latent"].flatten(0, 1)[rows]
    logit = given["q"][t] @ c.T * given["scale"]
    return logit.softmax(-1) @ c, logit.exp().sum(-1).log()


def test_attends_to_the_named_rows_and_to_nothing_else() -> None:
    """Known failure 34: -1, ids past the cache and a large positive id contribute nothing; what they point at is NaN or enormous."""
    ids = [[5, -1, 7, 20, -1], [5, 2147480000, 3, -(2**31), 9], [19, 18, 17, 16, 15], [4, 4, 4, 6, -1]]
    given = core(ids)
    given["latent"][0] = torch.tensor([NAN, 1e30, torch.inf, -1e30]).double()[:, None]
    given["latent"][0, 3] = normal(CHANNELS)
    out, lse = mla.attend(**given)
    for t, rows in enumerate(([5, 7], [5, 3, 9], [15, 16, 17, 18, 19], [4, 4, 4, 6])):  # one that stands thrice counts thrice
        expected, total = written_out(given, t, rows)
        torch.testing.assert_close(out[t], expected)
        torch.testing.assert_close(lse[t], total)


@pytest.mark.parametrize("ids", [[[-1, -1, -1]], [[20, -1, 99]], [[]]])
def test_a_row_without_rows_is_zero_and_minus_infinity(ids: list[list[int]]) -> None:
    out, lse = mla.attend(**core(ids, q=torch.full((1, HEADS, CHANNELS), NAN)))
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full((1, HEADS), -torch.inf))


def test_a_cache_of_no_rows_and_no_tokens_are_legal() -> None:
    out, lse = mla.attend(**core([[0, 1]], latent=torch.zeros(0, 4, CHANNELS).double()))
    assert not out.any() and lse.max() == -torch.inf
    out, lse = mla.attend(**core([[0]]) | dict(q=normal(0, HEADS, CHANNELS), ids=torch.zeros(0, 5, dtype=torch.int32)))
    assert out.shape == (0, HEADS, CHANNELS) and lse.shape == (0, HEADS)


@pytest.mark.parametrize("filler", [-1, 0, 11, 2**31 - 1])
def test_columns_past_the_count_are_not_used(filler: int) -> None:
    """Known failures 31 and 33: whatever they hold, a valid foreign row or column 0 again."""
    given = core([[5, 9, filler, filler], [filler] * 4, [1, 2, 3, 4]])
    out, lse = mla.attend(**given, counts=int32(2, 0, 9))
    for t, rows in ((0, [5, 9]), (2, [1, 2, 3, 4])):
        torch.testing.assert_close(out[t], written_out(given, t, rows)[0])
    assert not out[1].any() and lse[1].max() == -torch.inf


def test_order_has_no_say() -> None:
    given = core([list(range(12))])
    shuffled = given | {"ids": given["ids"][:, torch.randperm(12, generator=torch.Generator().manual_seed(0))]}
    for x, y in zip(mla.attend(**given), mla.attend(**shuffled), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_absorbed_and_dense_forms_agree(size: float) -> None:
    key, value, tokens = 5, 4, 6
    kv_b, q, latent = normal(HEADS * (key + value), CHANNELS, seed=2), normal(tokens, HEADS, key, seed=3) * size, normal(12, CHANNELS)
    visible = torch.arange(12) <= torch.arange(tokens)[:, None] + 3
    ids = torch.where(visible, torch.arange(12), -1).int()
    attended, lse = mla.attend(mla.absorb(q, kv_b), latent[:, None], ids=ids, scale=key**-0.5)
    out, dense_lse = mla.dense(q, latent, kv_b=kv_b, visible=visible)
    torch.testing.assert_close(mla.expand(attended, kv_b, key), out)
    torch.testing.assert_close(lse, dense_lse)


def test_huge_and_tiny_logits_stay_finite() -> None:
    for size in (1e-30, 1e4):
        given = core([[1, 2, 3, 4]])
        given["q"] = given["q"] * size
        out, lse = mla.attend(**given)
        expected, _ = written_out(given, 0, [1, 2, 3, 4])
        torch.testing.assert_close(out[0], expected)
        assert lse.isfinite().all()


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_combine_to_the_whole(parts: int) -> None:
    given = core([list(range(12)), [3, -1, 4, *[-1] * 9], [-1] * 12])
    whole = mla.attend(**given)
    split = [mla.attend(**{**given, "ids": some}) for some in given["ids"].chunk(parts, dim=1)]
    outs, lses = torch.stack([out for out, _ in split]), torch.stack([lse for _, lse in split])
    outs = torch.where(lses[..., None] == -torch.inf, NAN, outs)  # known failure 37: an empty part's output is nobody's
    for x, y in zip(mla.combine(outs, lses), whole, strict=True):
        torch.testing.assert_close(x, y)


def test_combine_anchors() -> None:
    """Known failure 37."""
    outs, lses = torch.tensor([0.0, 0.0, NAN, 2.0]).view(4, 1, 1, 1), torch.tensor([-torch.inf, -torch.inf, -torch.inf, 1.0]).view(4, 1, 1)
    for some, out, lse in (([0, 1], 0.0, -torch.inf), ([2, 3], 2.0, 1.0), ([3, 0], 2.0, 1.0), ([3, 3], 2.0, 1 + math.log(2))):
        got = mla.combine(outs[some], lses[some])
        assert got[0].item() == out and got[1].item() == torch.tensor(lse).item()


@pytest.mark.parametrize("policy", ["fp32", "pow2"])
@pytest.mark.parametrize("reserved", [False, True])
def test_fp8_rows_are_attended_to_as_dequantised(policy: fp8.Policy, reserved: bool) -> None:
    latent = normal(5, 4, 256, seed=4) * torch.logspace(-2, 2, 4)[:, None]
    rows = fp8.quantize_rows(latent, policy=policy, reserved=reserved)
    rows[..., 264:] = 0xFF  # known failure 36
    given = core([[5, 2, -1, 19]], q=normal(1, HEADS, 256))
    got = mla.attend(**{**given, "latent": rows})
    wide = mla.attend(**{**given, "latent": fp8.dequantize_rows(rows, 256).double()})
    for x, y in zip(got, wide, strict=True):
        assert torch.equal(x, y)


def test_e4m3_rows_with_one_scale() -> None:
    scale, given = torch.tensor([0.3]), core([[5, 2, -1, 19]])
    codes = fp8.quantize_tensor(given["latent"], scale)
    wide = mla.attend(**{**given, "latent": (codes.float() * 0.3).double()})
    for x, y in zip(mla.attend(**{**given, "latent": codes}, kv_scale=scale), wide, strict=True):
        assert torch.equal(x, y)


def test_points_pass_in_order_and_roundings_act() -> None:
    given, values = core([[5, 2, 3]]), dict[str, Tensor]()
    exact, _ = mla.attend(**given, at=tapped(values))
    assert tuple(values) == MLA_ATTEND
    assert {name: tuple(x.shape) for name, x in values.items()} == {
        "latent": (1, 3, CHANNELS), "q_absorbed": (1, HEADS, CHANNELS), "logit": (1, HEADS, 3), "prob": (1, HEADS, 3),
        "attended": (1, HEADS, CHANNELS),
    }  # fmt: skip
    for name in MLA_ATTEND:
        assert not torch.equal(mla.attend(**given, at=rounding({name: torch.bfloat16}))[0], exact), name


def test_rounded_weights_do_not_depend_on_what_they_are_over() -> None:
    """Weights are exp(logit) over a power of two: a constant added to all logits, or a larger one beside them, changes no rounding."""
    given = core([list(range(4, 16))])
    at = rounding({"prob": torch.bfloat16})
    out, _ = mla.attend(**given, at=at)
    parts = [mla.attend(**{**given, "ids": some}, at=at) for some in given["ids"].chunk(4, dim=1)]
    got, _ = mla.combine(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    torch.testing.assert_close(got, out)


def test_large_calls_are_taken_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    given = core([[5, 2, 3], [1, 1, 7], [-1, 0, 2]])
    whole = mla.attend(**given)
    monkeypatch.setattr(mla, "VALUES_AT_ONCE", 1)
    for x, y in zip(mla.attend(**given), whole, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("dtype", "lse"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_computes_in_the_dtype_of_the_queries_and_at_least_fp32(dtype: torch.dtype, lse: torch.dtype) -> None:
    given, values = core([[5, 2]]), dict[str, Tensor]()
    got = mla.attend(**{**given, "q": given["q"].to(dtype), "latent": given["latent"].to(dtype)}, at=tapped(values))
    assert [x.dtype for x in got] == [dtype, lse] and {x.dtype for x in values.values()} == {lse}


def test_row_offsets_go_through_the_strides_of_pages_and_rows() -> None:
    given = core([[5, 2, 19, 3]])
    far = torch.full((5, 7, CHANNELS + 3), NAN, dtype=torch.float64)[:, :4, :CHANNELS]
    far.copy_(given["latent"])
    assert torch.equal(mla.attend(**{**given, "latent": far})[0], mla.attend(**given)[0])
