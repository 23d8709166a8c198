"""The trajectory: candidate and references step by step from one shared initial state.

The gate's side restarts from the candidate's own pools at every step; the drift's side runs freely. Both in slices of
sequences, so that gold never needs a second pool in FP64.
"""

import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimized import contracts
from optimized.implementation import Implementation
from parity import metrics, ties
from parity.buffers import same_bits
from parity.case import Call, Case, Pools, StepInputs
from parity.metrics import Moments
from parity.mixer import MixerOracle, oracle_of
from parity.oracle import Operator, Oracle, Stored
from parity.phases import PHASES
from reference.points import rounding

SLICE_BYTES = 45_000_000  # of FP64 state at a time
ULP_BINS = 4096


class CandidateError(Exception):
    """What a call of an implementation raised, or a result that is no output."""

    def __init__(self, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        super().__init__(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{place}")
        self.error = error


class ReferenceError(Exception):
    """What the implementation on the reference's side raised."""


@dataclass
class Drift:
    """Free-running candidate against free-running reference after one step."""

    step: int
    cosine: float
    rel_l2: float
    state_rel_l2: float
    injected: float
    propagated: float


@dataclass
class Step:
    """A call, judged."""

    call: Call
    output: Moments
    state: Moments
    window_exact: Tensor  # [N] bool; of a mixer: within its limit
    ulps: Tensor  # histogram of the output's distance from gold in its own dtype
    drift: Drift


class FreeRun:
    """The reference side of the drift: the FP32 reference, or a named implementation, on its own pools.

    Of a mixer, the reference stores its projections in the activation dtype, as anything does that hands them to a cell.
    """

    def __init__(self, case: Case, reference: Implementation | None) -> None:
        self.case = case
        self.oracle = oracle_of(case, contracts.MIXER if case.layer is not None else None, None)
        self.pools: Pools | None = None
        self.call: Operator | None = None
        pools = case.pools()
        if reference is not None:
            self.pools, self.call = pools, reference.load()
        else:
            self.state, self.window = pools.state[pools.index].float(), pools.window[pools.index].float()

    def step(self, inputs: StepInputs) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Advance; yields (sequences, out, state) slice by slice."""
        if self.call is not None and self.pools is not None:
            pools = self.pools
            try:
                out = run(self.call, self.case, pools, inputs.tensors).unflatten(1, self.case.output)
            except CandidateError as error:
                raise ReferenceError(f"raised {error}") from error
            for part in slices(self.case):
                yield part, out[inputs.tokens.rows(part)], pools.state[pools.index[part]]
            return
        for part in slices(self.case):
            contract = rounding(self.oracle.roundings)
            after = self.oracle.predict(inputs.tokens[part], self.state[part], self.window[part], torch.float32, contract)
            self.state[part], self.window[part] = after.state, after.window
            yield part, after.out, after.state


def slices(case: Case) -> Iterator[slice]:
    """Sequences in runs whose FP64 state fits `SLICE_BYTES`."""
    problem, kda = case.problem, case.kda
    size = max(1, SLICE_BYTES // (problem.heads * kda.key_dim * kda.value_dim * 8))
    for start in range(0, problem.batch, size):
        yield slice(start, min(start + size, problem.batch))


def run(call: Operator, case: Case, pools: Pools, x: dict[str, Tensor], **changed: Any) -> Tensor:
    """One call of an implementation on pools; `changed` replaces arguments. TypeError when what comes back is no output."""
    arguments = {**case.given, **case.settings, **x, **pools.arguments(), **changed}
    leading = next(iter(x.values()))
    try:
        out = PHASES[case.problem.op].call(case, call, arguments)
    except (Exception, SystemExit) as error:
        raise CandidateError(error) from error
    _check_output(out, leading.dtype, (leading.shape[0], math.prod(case.output)))
    return out


def walk(case: Case, call: Operator, oracle: Oracle, pools: Pools, free: FreeRun) -> Iterator[Step]:
    """Every step of the case, candidate on `pools`."""
    for number in range(1, case.problem.steps + 1):
        yield _judge(case, oracle, pools, free, _call(case, call, pools, number))


def _call(case: Case, call: Operator, pools: Pools, number: int) -> Call:
    inputs = case.inputs(number)
    before = inputs.projection.rows.clone()
    state_before, window_before = pools.state[pools.index], pools.window[pools.index]
    out = run(call, case, pools, inputs.tensors)
    intact = same_bits(before, inputs.projection.rows) and inputs.projection.intact() and case.weights_intact()
    return Call(number, inputs, state_before, window_before, out.unflatten(1, case.output), intact)


def _check_output(out: object, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != dtype:
        got = f"{list(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise CandidateError(TypeError(f"output: expected {list(shape)} {dtype}, got {got}"))


def _judge(case: Case, oracle: Oracle, pools: Pools, free: FreeRun, call: Call) -> Step:
    """The step's moments, its ULP histogram and its drift, slice by slice."""
    outputs, states, windows, cells = [], [], [], []
    ulps = torch.zeros(ULP_BINS, dtype=torch.int64, device=call.out.device)
    sums = torch.zeros(8, dtype=torch.float64, device=call.out.device)
    for part, free_out, free_state in free.step(call.inputs):
        start = (call.inputs.tokens[part], call.state_before[part], call.window_before[part])
        out, state, window = call.out[call.inputs.tokens.rows(part)], pools.state[pools.index[part]], pools.window[pools.index[part]]
        judged = oracle.judged(*start, Stored(out, state, window))
        gold, exact, floor = judged.gold, judged.exact, judged.floor
        outputs.append(metrics.moments(out, gold.out, exact.out, floor.out, out.dtype))
        states.append(metrics.moments(state, gold.state, exact.state, floor.state, state.dtype))
        windows.append(judged.window_held)
        cells += [judged.cell] if judged.cell is not None else []
        distance = metrics.ulp_distance(out, exact.out.to(out.dtype)).clamp(max=ULP_BINS - 1).flatten()
        ulps.scatter_add_(0, distance, torch.ones_like(distance))
        sums += _drift_sums(out, free_out, state, free_state, exact.state)
    drift = _drift(call.number, sums)
    step = Step(call, metrics.joined(outputs), metrics.joined(states), torch.cat(windows), ulps.cpu(), drift)
    if isinstance(oracle, MixerOracle):  # of a mixed batch: nothing more
        oracle.allow(call, cells, pools, step.state)
    else:
        ties.allow(oracle, call, pools, step.output, step.state)
    return step


def _drift_sums(out: Tensor, free_out: Tensor, state: Tensor, free_state: Tensor, one_step: Tensor) -> Tensor:
    out, free_out, state, free_state = out.double(), free_out.double(), state.double(), free_state.double()
    return torch.stack([
        (out * free_out).sum(), out.square().sum(), free_out.square().sum(), (out - free_out).square().sum(),
        free_state.square().sum(), (state - free_state).square().sum(),
        (state - one_step).square().sum(), (one_step - free_state).square().sum(),
    ])  # fmt: skip


def _drift(number: int, sums: Tensor) -> Drift:
    dot, out, free_out, out_difference, free_state, difference, injected, propagated = sums.tolist()

    def relative(part: float, whole: float) -> float:
        return (part / whole) ** 0.5 if whole > 0 else (0.0 if part == 0 else float("inf"))

    cosine = dot / (out * free_out) ** 0.5 if out * free_out > 0 else float(out == free_out)
    return Drift(
        number, cosine, relative(out_difference, free_out), relative(difference, free_state),
        relative(injected, free_state), relative(propagated, free_state),
    )  # fmt: skip
