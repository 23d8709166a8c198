"""The gate: one row of a record, from problem and implementation to verdict."""

import math
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import torch

from optimized.implementation import Implementation
from parity import drift, exactly, invariants, limits, localize, metrics, path, trajectory
from parity.case import Case
from parity.metrics import Moments, Ratio
from parity.mixer import oracle_of
from parity.oracle import Oracle
from parity.path import Proof
from parity.phases import PHASES
from parity.problem import Problem
from parity.record import Row, Verdict
from parity.trajectory import CandidateError, FreeRun, ReferenceError, Step

REFERENCE = "fp32"  # the reference side of the drift, unless an implementation is named


def judge(problem: Problem, impl: Implementation, reference: Implementation | None = None) -> Row:
    """Run every check of a problem on an implementation. What the candidate raises is a FAIL with its words."""
    row = blank(problem, impl, reference)
    supported, reason = impl.supports(problem.workload())
    if not supported:
        return row | {"verdict": Verdict.SKIPPED, "reason": reason}
    if problem.batch == 0 or problem.steps == 0:
        return row | {"verdict": Verdict.VACUOUS, "reason": "no step of no sequence: nothing was compared"}
    started = time.monotonic()
    try:
        row |= _run(problem, impl, reference)
    except torch.OutOfMemoryError as error:
        row |= {"verdict": Verdict.INCONCLUSIVE, "reason": f"out of memory: {str(error).splitlines()[0]}"}
    except CandidateError as error:
        if isinstance(error.error, torch.OutOfMemoryError):
            row |= {"verdict": Verdict.INCONCLUSIVE, "reason": f"out of memory: {error}"}
        else:
            row |= {"verdict": Verdict.FAIL, "reason": f"raised {error}"}
    except ReferenceError as error:
        row |= {"verdict": Verdict.INCONCLUSIVE, "reason": f"the reference {error}"}
    return row | {"seconds": round(time.monotonic() - started, 3)}


def blank(problem: Problem, impl: Implementation, reference: Implementation | None) -> Row:
    """A row before anything ran."""
    contract = None
    if impl.contract is not None:
        rounds = {point: str(dtype).removeprefix("torch.") for point, dtype in impl.contract.resolve(problem.activation).items()}
        contract = {"rounds": rounds, "accumulate": impl.contract.accumulate, "deterministic": impl.contract.deterministic}
    return {
        "case": str(problem), "op": problem.op, "impl": impl.name, "reference": reference.name if reference else REFERENCE,
        "model": problem.model, "arch": problem.workload().arch, "heads": problem.heads, "batch": problem.batch,
        "tokens": problem.rows, "dtype": problem.dtype, "state_dtype": problem.state_dtype, "regime": problem.regime,
        "steps": problem.steps, "seed": problem.seed, "impl_hash": impl.source_hash(), "contract": contract,
        "verdict": Verdict.VACUOUS, "reason": "", "path": None, "output": None, "state": None, "drift": [], "growth_slope": None,
        "first_divergence": None, "invariants": {}, "absolute": None, "memory": None, "seconds": 0.0,
    }  # fmt: skip


def _run(problem: Problem, impl: Implementation, reference: Implementation | None) -> Row:
    cuda = problem.device.startswith("cuda")
    impl = replace(impl, kernels=impl.declared(problem.workload()))
    if cuda:
        torch.cuda.reset_peak_memory_stats(problem.device)
    if PHASES[problem.op].whole_numbers:
        return exactly.run(problem, impl)
    case, call = Case(problem), impl.load()
    proof = _prove(case, impl, reference)
    held = invariants.check(case, call, capturable=impl.capturable, library=proof.library)

    pools = case.pools()
    oracle = oracle_of(case, impl.contract, impl.contexts)
    tally = Tally(oracle, problem)
    launched: Counter[str] = Counter()
    with path.triton_launches(launched):
        for step in trajectory.walk(case, call, oracle, pools, FreeRun(case, reference)):
            tally.add(step, pools)
    left_out = [name for name in proof.hooked if launched[name] < problem.steps]
    if left_out and proof.proved:
        proof.proved = False
        proof.reason = f"not proved: {left_out[0]} was launched {launched[left_out[0]]} times in {problem.steps} steps"
    held |= invariants.untouched(pools) | {"inputs_unmodified": tally.inputs_intact, _window(problem): tally.window_exact}
    memory = {"pools_bytes": pools.bytes(), "peak_bytes": torch.cuda.max_memory_allocated(problem.device)} if cuda else None
    absolute = drift.judged(problem, tally.drift)
    verdict, reason = _verdict(proof, oracle, tally, held, drift.beyond(absolute))
    return tally.row() | {
        "verdict": verdict, "reason": reason, "path": proof.row(str(oracle.lowest).removeprefix("torch.")),
        "invariants": held, "memory": memory, "absolute": absolute,
    }  # fmt: skip


def _window(problem: Problem) -> str:
    """Raw inputs stay as they came; a mixer projects them itself."""
    return "window_projected" if problem.op == "kda.mixer" else "window_exact"


def _prove(case: Case, impl: Implementation, reference: Implementation | None) -> Proof:
    """One observed step, apart from everything that is judged."""
    call, pools, inputs = impl.load(), case.pools(), case.inputs(1)
    if case.problem.device.startswith("cuda"):  # what tunes or compiles itself does so here
        trajectory.run(call, case, case.pools(), inputs.tensors)
    tensors = [*inputs.tensors.values(), pools.state, pools.window]
    _, proof = path.observe(impl, lambda: trajectory.run(call, case, pools, inputs.tensors), tensors, case.problem.device)
    if reference is not None and (reference.load() is call or (impl.kernels and set(impl.kernels) == set(reference.kernels))):
        proof.proved, proof.reason = False, f"same path: {impl.name} compared with itself"
    return proof


class Tally:
    """Steps added up, and the first that was beyond its limit."""

    def __init__(self, oracle: Oracle, problem: Problem) -> None:
        self.oracle = oracle
        self.limits = {"output": limits.boundary(problem.activation), "state": limits.boundary(problem.pool)}
        self.total: dict[str, Moments] = {}
        self.worst_step: dict[str, float] = {"output": 0.0, "state": 0.0}
        self.ulps = torch.zeros(trajectory.ULP_BINS, dtype=torch.int64)
        self.drift: list[dict[str, Any]] = []
        self.first: dict[str, Any] | None = None
        self.largest: dict[str, Any] | None = None
        self.inputs_intact = self.window_exact = True

    def add(self, step: Step, pools: Any) -> None:
        self.ulps += step.ulps
        self.drift.append(asdict(step.drift))
        self.inputs_intact &= step.call.inputs_intact
        self.window_exact &= bool(step.window_exact.all())
        ratios = {}
        for name, moments in (("output", step.output), ("state", step.state)):
            self.total[name] = self.total[name] + moments if name in self.total else moments
            ratios[name] = metrics.noise_ratio(moments)
            self.worst_step[name] = max(self.worst_step[name], ratios[name].over(self.limits[name]))
        self._note(step, ratios, pools)

    def _note(self, step: Step, ratios: dict[str, Ratio], pools: Any) -> None:
        """Keep the first divergence in full and the largest by place."""
        name = max(ratios, key=lambda tensor: ratios[tensor].over(self.limits[tensor]))
        ratio, limit = ratios[name], self.limits[name]
        over = ratio.over(limit)
        stale = (~step.window_exact).nonzero()
        if self.first is None and (over > 1 or len(stale)):
            tensor, (row, head) = (name, ratio.worst) if over > 1 else ("window", (int(stale[0]), 0))
            self.first = localize.first_divergence(self.oracle, pools, step, tensor, row, head)
            if over > 1:
                by_head = ratio.head / limit.head >= ratio.tensor / limit.tensor
                self.first |= {"noise_ratio": ratio.head if by_head else ratio.tensor, "limit": limit.head if by_head else limit.tensor}
                self.first |= {"limit_of": "head" if by_head else "tensor"}
        if over > 1 and (self.largest is None or over > self.largest["over"]):
            row, head = ratio.worst
            sequence = step.call.inputs.tokens.place(row)[0] if name == "output" else row
            whole = name == "output" and self.oracle.case.output[0] == 1 < self.oracle.case.problem.heads  # of a mixer
            self.largest = {"step": step.call.number, "tensor": name, "sequence": sequence, "head": None if whole else head, "over": over}

    def beyond(self) -> dict[str, float]:
        """Tensors beyond their limit, by how much: of any one step, or of all of them together."""
        overs = {name: max(self.worst_step[name], metrics.noise_ratio(m).over(self.limits[name])) for name, m in self.total.items()}
        return {name: over for name, over in overs.items() if not over <= 1}

    def row(self) -> Row:
        output, state = (self._tensor(name) for name in ("output", "state"))
        output |= {"cosine": metrics.cosine(self.total["output"]), "ulp_p99": self._ulp_quantile(0.99)}
        first = None
        if self.first is not None:
            first = self.first | {"largest": self.largest}
        slope = growth_slope([(entry["step"], entry["state_rel_l2"]) for entry in self.drift])
        return {"output": output, "state": state, "drift": self.drift, "growth_slope": slope, "first_divergence": first}

    def _tensor(self, name: str) -> dict[str, Any]:
        total, limit = self.total[name], self.limits[name]
        ratio = metrics.noise_ratio(total)
        over = max(self.worst_step[name], ratio.over(limit))
        return {
            "rel_l2": metrics.rel_l2(total), "worst_head": metrics.worst_head(total), "noise_ratio": ratio.tensor,
            "noise_ratio_head": ratio.head, "near_ties": metrics.excused(total),
            "worst_step_over": self.worst_step[name], "limit": limit.tensor, "limit_head": limit.head, "would_pass": over,
        }  # fmt: skip

    def _ulp_quantile(self, share: float) -> int:
        return int((self.ulps.cumsum(0) >= share * self.ulps.sum()).nonzero()[0])


def growth_slope(points: list[tuple[int, float]]) -> float | None:
    """Least-squares slope of log(error) over log(step): 0 is bounded, 0.5 a random walk, 1 a bias that adds up."""
    logs = [(math.log(step), math.log(error)) for step, error in points if error > 0 and math.isfinite(error)]
    if len(logs) < 3:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def _verdict(proof: Proof, oracle: Oracle, tally: Tally, held: dict[str, bool], far: list[str]) -> tuple[Verdict, str]:
    """FAIL > INCONCLUSIVE > VACUOUS > PASS."""
    failures = [f"{name} is {over:.3g} times its limit in its worst step" for name, over in tally.beyond().items()] + far
    broken = sorted((name for name, kept in held.items() if not kept), key="inputs_unmodified".__ne__)  # what breaks the others first
    if broken:
        failures.append(f"invariants broken: {', '.join(broken)}")
    if failures:
        return Verdict.FAIL, "; ".join(failures)
    if not proof.proved:
        return Verdict.INCONCLUSIVE, proof.reason
    if oracle.lowest != torch.float64:
        return Verdict.INCONCLUSIVE, f"the gold passed through {oracle.lowest}"
    wrong = max(metrics.conditioning(moments) for moments in tally.total.values())
    if wrong > limits.CONDITIONING:
        return Verdict.INCONCLUSIVE, f"the contract's own reference is {wrong:.0%} wrong: the case says nothing"
    return Verdict.PASS, ""
