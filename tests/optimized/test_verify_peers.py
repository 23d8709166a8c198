"""FLA's recurrence under contract A and the eager loop under contract B: the reference's numbers under the declared roundings."""

import importlib.util

import pytest
import torch
from torch import Tensor

from optimized import interpreter
from optimized.peers import eager_verify
from parity import limits, metrics
from parity.buffers import same_bits
from reference import kda_verify
from reference.points import ACTIVATION, Contract, rounding
from tests.optimized.test_kda_decode import ACTIVATIONS, NAN, Cell, cell, int32
from tests.optimized.test_kda_verify import away, copied, drafted

FP32, BF16 = torch.float32, torch.bfloat16
CONTRACT = Contract(rounds={"conv": ACTIVATION, "core": ACTIVATION})

needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None or not interpreter.active(),
    reason="needs fla-core and TRITON_INTERPRET=1 before the first import of triton",
)


@pytest.mark.parametrize(("dtype", "state_dtype"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_the_eager_loop_follows_the_reference(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    given = drafted((3, -1, 0, 2), (3, 9, 2, 1), dtype=dtype, state_dtype=state_dtype, fresh=torch.tensor([False, True, True, False]))
    for counts in ((3, 9, 2, 1), (1, 0, 3, 2)):
        assert away(eager_verify.verify, given | {"accepted": int32(*counts)}, CONTRACT) <= 1


def test_the_eager_loop_takes_batches_of_nobody() -> None:
    for slots in ((), (-1, 7)):
        given = drafted(slots, tuple(9 for _ in slots))
        before = copied(given)
        assert not eager_verify.verify(**given).any() and same_bits(given["state"], before["state"])


def snapshots(dtype: torch.dtype, state_dtype: torch.dtype, drafts: int = 2) -> Cell:
    """Three sequences, the second one padding, with 1+S slots each of a pool of ten; what isn't theirs is NaN."""
    given = cell(*range(3 * (1 + drafts)), pool=10, dtype=dtype, state_dtype=state_dtype, key_dim=16, value_dim=24)
    taken = torch.tensor([[7, 2, 4], [-1, 2, 99], [0, 5, 9]], dtype=torch.int32)
    window = torch.randn(10, 3 + drafts, given["window"].shape[2], generator=torch.Generator().manual_seed(5)).to(dtype)
    given["state"][[1, 3, 6, 8]], window[[1, 2, 3, 4, 5, 6, 8, 9]] = NAN, NAN
    return given | {"slots": taken, "window": window}


def converted(given: Cell, dtype: torch.dtype) -> Cell:
    return {name: x.to(dtype, copy=True) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}


@needs_fla
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_flas_recurrence_follows_the_snapshots(dtype: torch.dtype, state_dtype: torch.dtype, lower_bound: float | None) -> None:
    from optimized.peers import fla_verify

    given, rounds, live = snapshots(dtype, state_dtype) | {"lower_bound": lower_bound}, CONTRACT.resolve(dtype), [7, 2, 4, 0, 5, 9]
    for step, counts in enumerate(((1, 5, 0), (3, 0, 2), (2, 1, 3))):
        given |= {name: cell(*range(9), dtype=dtype, key_dim=16, value_dim=24, seed=step)[name] for name in ACTIVATIONS}
        given |= {"accepted": int32(*counts), "fresh": torch.tensor([False, True, step == 1])}
        gold, single = converted(given, torch.float64), converted(given, FP32)
        expected, floor = (kda_verify.verify_snapshots(**side, at=rounding(rounds)) for side in (gold, single))
        out = fla_verify.verify_snapshots(**given)
        assert torch.equal(given["window"][[7, 0]].double(), gold["window"][[7, 0]]) and given["window"][[1, 2, 9]].isnan().all()
        assert (out[3:6] == 0).all() and given["state"][[1, 3, 6, 8]].isnan().all()
        for candidate, x, healthy in (
            (out.unflatten(1, (2, -1)), expected.unflatten(1, (2, -1)), floor.unflatten(1, (2, -1))),
            (given["state"][live], gold["state"][live], single["state"][live]),
        ):
            m = metrics.moments(candidate, x, x, healthy, candidate.dtype)
            assert metrics.noise_ratio(m).over(limits.boundary(candidate.dtype)) <= 1
