"""Metrics: rounding is allowed for and nothing else is, and no head is averaged away."""

import math

import pytest
import torch
from torch import Tensor

from parity import limits, metrics

SIXTEEN = [torch.bfloat16, torch.float16]
NAN, INF = math.nan, math.inf


def gap(value: float, dtype: torch.dtype) -> float:
    """Distance from |value| to the next larger value of `dtype`."""
    x = torch.tensor(abs(value), dtype=dtype)
    return float(torch.nextafter(x, torch.tensor(INF, dtype=dtype)).double() - x.double())


def one_head(candidate: Tensor, gold: Tensor, floor: Tensor, stored: torch.dtype = torch.float32) -> metrics.Moments:
    """Moments of tensors [N, H, D]; `floor` is a healthy reference, the gold is exact."""
    return metrics.moments(candidate, gold, gold, floor, stored)


def moments_of(heads: int = 2, **changed: Tensor) -> metrics.Moments:
    """A gold of ones, a floor of 2^-20 and no error: [1, heads, 4]."""
    gold = torch.ones(1, heads, 4, dtype=torch.float64)
    tensors = {"candidate": gold.clone(), "floor": gold + 2.0**-20} | changed
    return one_head(tensors["candidate"], gold, tensors["floor"])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_half_ulp_is_half_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    normal, least = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = [1.0, 1.5, 2.0, -2.0, 3.0, 1024.0, 0.7, -0.1, normal, 2 * normal, normal / 2, least, 3 * least, 0.0]
    stored = torch.tensor(values, dtype=dtype).double()
    assert metrics.half_ulp(stored, dtype).tolist() == [gap(float(value), dtype) / 2 for value in stored]


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_half_ulp_below_a_power_of_two_is_that_of_the_smaller_binade(dtype: torch.dtype) -> None:
    above, below = metrics.half_ulp(torch.tensor([2.0, 2.0 - 2.0**-30], dtype=torch.float64), dtype).tolist()
    assert above == 2 * below == torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 3e3])
def test_a_correctly_rounded_value_is_no_error(dtype: torch.dtype, scale: float) -> None:
    gold = (torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * scale).double()  # FP32 values: torch rounds FP64 twice
    stored = gold.to(dtype)
    assert metrics.beyond_rounding(stored.double(), gold, dtype).max() == 0
    two_off = torch.nextafter(torch.nextafter(stored, torch.full_like(stored, INF)), torch.full_like(stored, INF)).double()
    assert metrics.beyond_rounding(two_off, gold, dtype).min() > 0


def test_an_fp32_boundary_is_allowed_no_rounding() -> None:
    gold = torch.tensor([1.0 + 2.0**-30], dtype=torch.float64)
    assert metrics.beyond_rounding(torch.ones(1).double(), gold, torch.float32).item() == 2.0**-30


def test_values_that_a_kernel_may_flush_compare_equal() -> None:
    gold = torch.tensor([2.0**-127, -(2.0**-130), 2.0**-126], dtype=torch.float64)
    assert metrics.beyond_rounding(torch.zeros(3, dtype=torch.float64), gold, torch.float32).tolist() == [0, 0, 2.0**-126]


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32])
def test_ulp_distance_counts_values_also_across_zero(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    up = torch.nextafter(torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype))
    pairs = [
        (1.0, 1.0, 0),
        (float(up), 1.0, 1),
        (-1.0, -float(up), 1),
        (0.0, -0.0, 0),
        (2 * least, -least, 3),
        (1.0, 2.0, 1 / torch.finfo(dtype).eps),
    ]
    candidate, gold = (torch.tensor([pair[side] for pair in pairs], dtype=dtype) for side in (0, 1))
    assert metrics.ulp_distance(candidate, gold).tolist() == [pair[2] for pair in pairs]


def test_an_error_as_large_as_the_floor_has_ratio_one() -> None:
    ratio = metrics.noise_ratio(moments_of(candidate=torch.ones(1, 2, 4).double() - 2.0**-20))
    assert (ratio.tensor, ratio.head) == (1, 1)


def test_an_error_three_times_the_floor_in_one_of_two_heads() -> None:
    candidate = torch.ones(1, 2, 4, dtype=torch.float64)
    candidate[0, 1] += 3 * 2.0**-20
    ratio = metrics.noise_ratio(moments_of(candidate=candidate))
    assert ratio.head == 3 and ratio.worst == (0, 1)
    assert ratio.tensor == pytest.approx(3 / math.sqrt(2))


def test_an_exact_reference_leaves_the_least_floor() -> None:
    exact = torch.ones(1, 2, 4, dtype=torch.float64)
    ratio = metrics.noise_ratio(moments_of(candidate=exact + 4 * limits.LEAST_FLOOR, floor=exact))
    assert (ratio.tensor, ratio.head) == (4, 4)


def test_an_error_where_the_gold_is_zero_is_infinitely_far() -> None:
    zero, tiny = torch.zeros(1, 2, 4, dtype=torch.float64), torch.full((1, 2, 4), 1e-30, dtype=torch.float64)
    assert metrics.noise_ratio(one_head(tiny, zero, zero)).tensor == INF
    assert not metrics.noise_ratio(one_head(tiny, zero, zero)).within(limits.FP32_BOUNDARY)


def test_tensors_of_exact_zeros_have_ratio_zero_and_cosine_one() -> None:
    zero = torch.zeros(2, 3, 4, dtype=torch.float64)
    m = one_head(zero, zero, zero)
    assert metrics.noise_ratio(m) == metrics.Ratio(0.0, 0.0, (0, 0))
    assert (metrics.cosine(m), metrics.rel_l2(m)) == (1.0, 0.0)


def test_no_sequence_at_all_has_ratio_zero_and_no_worst_head() -> None:
    nothing = torch.zeros(0, 3, 4, dtype=torch.float64)
    m = one_head(nothing, nothing, nothing)
    assert metrics.noise_ratio(m) == metrics.Ratio(0.0, 0.0, (0, 0)) and metrics.worst_head(m) is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_value_that_is_not_finite_is_beyond_every_limit(value: float) -> None:
    candidate = torch.ones(1, 2, 4, dtype=torch.float64)
    candidate[0, 1, 2] = value
    m = moments_of(candidate=candidate)
    ratio = metrics.noise_ratio(m)
    assert (ratio.tensor, ratio.head, ratio.worst) == (INF, INF, (0, 1))
    assert not ratio.within(limits.FP32_BOUNDARY) and ratio.over(limits.FP32_BOUNDARY) == INF
    assert math.isnan(metrics.rel_l2(m)) and math.isnan(metrics.cosine(m))
    worst = metrics.worst_head(m)
    assert worst is not None and (worst["head"], worst["rel_l2"]) == (1, INF)


def test_a_value_that_is_not_finite_counts_wherever_it_stands_in_a_sum_of_steps() -> None:
    bad = torch.ones(1, 2, 4, dtype=torch.float64)
    bad[0, 0, 0] = NAN
    total = moments_of() + moments_of(candidate=bad) + moments_of()
    assert metrics.noise_ratio(total).tensor == INF


def test_one_bad_head_in_4096_is_named_with_its_place() -> None:
    gold = torch.randn(64, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    floor, candidate = gold * (1 + 2.0**-22), gold.clone()
    candidate[37, 11] *= 1 + 2.0**-14
    m = one_head(candidate, gold, floor)
    ratio, worst = metrics.noise_ratio(m), metrics.worst_head(m)
    assert ratio.worst == (37, 11) and ratio.head == pytest.approx(256)
    assert ratio.tensor < limits.FP32_BOUNDARY.tensor and not ratio.within(limits.FP32_BOUNDARY)
    assert worst == {"sequence": 37, "head": 11, "rel_l2": pytest.approx(2.0**-14)}


def test_a_head_that_the_reference_hit_exactly_is_judged_by_the_median_head() -> None:
    exact = torch.ones(1, 3, 4, dtype=torch.float64)
    floor = exact + 2.0**-20
    floor[0, 2] = 1
    ratio = metrics.noise_ratio(one_head(exact + 2.0**-20, exact, floor))
    assert ratio.head == 1


def test_cosine_and_relative_l2_by_hand() -> None:
    gold, candidate = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1) for x in ([3.0, 4.0], [4.0, 3.0]))
    m = one_head(candidate, gold, gold)
    assert metrics.cosine(m) == pytest.approx(24 / 25)
    assert metrics.rel_l2(m) == pytest.approx(math.sqrt(2) / 5)
    assert metrics.worst_head(m) == {"sequence": 0, "head": 0, "rel_l2": pytest.approx(1 / 3)}
    assert metrics.cosine(one_head(-gold, gold, gold)) == pytest.approx(-1)


def test_conditioning_is_the_relative_error_of_the_reference() -> None:
    gold = torch.ones(1, 2, 4, dtype=torch.float64)
    assert metrics.conditioning(one_head(gold, gold, gold * 1.25)) == 0.25


def test_near_ties_explain_errors_of_their_own_elements_only() -> None:
    gold = torch.ones(2, dtype=torch.float64)
    ties = torch.tensor([2.0**-8, 0.0])
    assert metrics.beyond_rounding(gold + 2.0**-7, gold, torch.float32, ties).tolist() == [2.0**-8, 2.0**-7]
    assert metrics.beyond_rounding(gold + 2.0**-7, gold, torch.bfloat16, ties).tolist() == [0.0, 2.0**-8]
    assert metrics.beyond_rounding(gold + 2.0**-9, gold, torch.float32, ties).tolist() == [0.0, 2.0**-9]


def test_a_near_tie_may_carry_a_value_past_a_power_of_two_where_half_an_ulp_is_more() -> None:
    gold, tie = torch.tensor([1 - 2.0**-9], dtype=torch.float64), torch.tensor([2.0**-8])
    candidate = torch.tensor([1 + 2.0**-7], dtype=torch.float64)  # of 1 + 2^-9 + 2^-12, rounded
    assert metrics.beyond_rounding(candidate, gold, torch.bfloat16, tie + 2.0**-9).item() == 0
    assert metrics.beyond_rounding(candidate, gold, torch.bfloat16).item() > 0


def test_what_is_no_number_is_beyond_every_limit() -> None:
    for ratio in (metrics.Ratio(math.nan, 0.0, (0, 0)), metrics.Ratio(0.0, math.nan, (0, 0))):
        assert ratio.over(limits.ROUNDED_BOUNDARY) == math.inf
