"""Contracts belong to an operator and to a form of its reference: a rounding that nobody applies is refused."""

from typing import Any

import pytest

from optimized import registry
from reference.points import Contract


def with_contract(contract: Contract) -> Any:
    def candidate(q: object, k: object, **x: object) -> None: ...

    candidate.contract = contract  # type: ignore[attr-defined]
    return candidate


@pytest.mark.parametrize(
    ("op", "contract", "says"),
    [
        ("kda.decode", Contract(rounds={"gcum": "bf16"}), "gcum of kda.decode can't round, the recurrence has no such point"),
        ("kda.verify", Contract(rounds={"beta": "bf16", "w": "fp16", "u": "fp16"}), "w, u of kda.verify can't round"),
        ("kda.decode", Contract(accumulate="mma_bf16"), "accumulate of kda.decode, a recurrence, is fp32, got 'mma_bf16'"),
        ("kda.prefill", Contract(rounds={"aqk": "bf16"}), "for the chunk form name its accumulate"),
        ("kda.prefill", Contract(rounds={"delta": "bf16"}, accumulate="mma_bf16"), "delta of kda.prefill can't round, the chunk form"),
    ],
)
def test_a_contract_that_no_form_of_the_operator_has_is_refused(op: str, contract: Contract, says: str) -> None:
    with pytest.raises(ValueError, match="contract: ") as refused:
        registry.of_function(op, with_contract(contract))
    assert says in str(refused.value)


def test_a_contract_of_the_operators_form_is_taken() -> None:
    for op, contract in (
        ("kda.decode", Contract(rounds={"read": "bf16"})),
        ("kda.prefill", Contract(rounds={"read": "bf16"})),
        ("kda.prefill", Contract(rounds={"gcum": "bf16"}, accumulate="mma_bf16")),
    ):
        assert registry.of_function(op, with_contract(contract)).contract == contract
