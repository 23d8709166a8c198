"""Named points: each use of the one mechanism does what it says, and a contract that can't hold is refused."""

import pytest
import torch

from reference.points import ACTIVATION, KDA_CELL, Contract, exact, flipped, grafted, rounding, tapped, tie_distance

BF16 = torch.bfloat16
STEP = 2.0**-7  # of BF16 at 1
FP32_STEP = 2.0**-23


def column(*values: float) -> torch.Tensor:
    """A row for each value, so that no row's size covers for another's."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_exact_is_the_identity() -> None:
    x = column(1 + FP32_STEP)
    assert exact("beta", x) is x


def test_rounding_rounds_to_nearest_even_at_its_points_only() -> None:
    at = rounding({"beta": BF16})
    x = column(1 + STEP / 2, 1 + 3 * STEP / 2, 1 + STEP / 4, -1 - 3 * STEP / 4)
    assert at("beta", x).flatten().tolist() == [1.0, 1 + 2 * STEP, 1.0, -1 - STEP]
    assert at("beta", x).dtype == torch.float64
    assert at("decay", x) is x


def test_tapped_records_copies_after_the_inner_mechanism() -> None:
    values: dict[str, torch.Tensor] = {}
    at = tapped(values, rounding({"beta": BF16}))
    x = column(1 + STEP / 4)
    for name in ("beta", "decay"):
        returned = at(name, x)
        returned.zero_()
        assert values[name].item() == (1.0 if name == "beta" else 1 + STEP / 4)
        x = column(1 + STEP / 4)


def test_grafted_replaces_its_points_and_leaves_the_rest_to_the_inner_mechanism() -> None:
    at = grafted({"core": torch.ones(1, 1)}, rounding({"beta": BF16, "core": BF16}))
    x = column(1 + STEP / 4)
    assert at("core", x).item() == 1.0 and at("core", x).dtype == torch.float64
    assert at("beta", x).item() == 1.0
    assert at("decay", x) is x


def test_tapped_records_at_its_points_only() -> None:
    values: dict[str, torch.Tensor] = {}
    at = tapped(values, points=("beta",))
    at("beta", column(1.0)), at("decay", column(2.0))
    assert list(values) == ["beta"]


@pytest.mark.parametrize("sign", [1, -1])
def test_flipped_sends_marked_values_to_the_other_neighbour_and_moves_nothing_else(sign: int) -> None:
    x = column(1 + STEP / 4, 1 + 3 * STEP / 4, 1.0, 1 + STEP / 4) * sign
    at = flipped({"q": BF16, "k": BF16}, {"q": torch.tensor([True, True, True, False])})
    assert (at("q", x) * sign).flatten().tolist() == [1 + STEP, 1, 1 + STEP, 1]
    assert (at("k", x) * sign).flatten().tolist() == [1, 1 + STEP, 1, 1]
    assert at("v", x) is x


def test_a_tie_is_as_far_as_the_point_where_rounding_changes_sides() -> None:
    tie = 1 + STEP / 2
    x = column(tie, tie + FP32_STEP, tie - 9 * FP32_STEP, -1 - STEP / 4, 1 + STEP)
    assert tie_distance(x, BF16).flatten().tolist() == [0, FP32_STEP, 9 * FP32_STEP, STEP / 4, STEP / 2]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45])
def test_the_other_side_of_zero_and_of_less_than_the_smallest_is_finite(value: float) -> None:
    x = column(value, value)
    assert flipped({"q": BF16}, {"q": torch.ones(2, dtype=torch.bool)})("q", x).isfinite().all() and tie_distance(x, BF16).isfinite().all()


@pytest.mark.parametrize("point", ["state", "out", "betta"])
def test_a_contract_refuses_boundary_and_unknown_points(point: str) -> None:
    with pytest.raises(ValueError, match=rf"contract: {point} can't round; interior points are conv, q, k, g, decay.*gate$"):
        Contract(rounds={"beta": BF16, point: BF16})


def test_a_contract_refuses_an_unknown_accumulation() -> None:
    with pytest.raises(ValueError, match="accumulate is one of fp32, mma_bf16, mma_tf32, mma_fp8, got 'fp16'"):
        Contract(accumulate="fp16")


def test_a_contract_is_a_copy_that_nobody_can_change() -> None:
    rounds = {"beta": BF16}
    contract = Contract(rounds=rounds)
    rounds["core"] = BF16
    assert dict(contract.rounds) == {"beta": BF16}
    with pytest.raises(TypeError):
        contract.rounds["core"] = BF16  # type: ignore[index]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [(BF16, {"conv": BF16, "beta": torch.float16}), (torch.float32, {"beta": torch.float16})],
)
def test_resolve_fills_in_the_activation_dtype_and_drops_fp32(activation: torch.dtype, expected: dict[str, torch.dtype]) -> None:
    contract = Contract(rounds={"conv": ACTIVATION, "beta": torch.float16, "core": torch.float32})
    assert contract.resolve(activation) == expected


def test_the_points_stand_in_the_order_of_computation() -> None:
    from reference import kda

    seen: dict[str, torch.Tensor] = {}
    one = torch.ones(1, 1)
    kda.decode(
        one, one, v=one, f=one, beta=one, gate=one, conv_weight=torch.ones(3, 4), a_log=torch.zeros(1), dt_bias=torch.zeros(1),
        norm_weight=torch.ones(1), state=torch.ones(1, 1, 1, 1), window=torch.ones(1, 3, 3), slots=torch.zeros(1, dtype=torch.int32),
        lower_bound=None, at=tapped(seen),
    )  # fmt: skip
    assert tuple(seen) == KDA_CELL
