"""Where a step first went wrong: tensor, sequence, head, channel, and the point of the computation that explains it.

A fused kernel shows only what it stores, so a point is found by hypothesis: the reference with one thing changed, through
the same named points. The hypothesis that makes the residual collapse is the cause; when none does, the cause is unknown.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity import limits, metrics
from parity.case import Pools
from parity.mixer import MixerOracle
from parity.oracle import Judged, Oracle, Prediction, Stored
from parity.phases import PHASES
from parity.tokens import Tokens
from parity.trajectory import Step
from reference.points import BOUNDARY, KDA_CELL, KDA_MIXER, At, exact, rounding

ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Hypothesis:
    """One thing changed, and the step that this predicts for one sequence."""

    point: str
    cause: str
    prediction: Prediction


def first_divergence(oracle: Oracle, pools: Pools, step: Step, tensor: str, row: int, head: int) -> dict[str, Any]:
    """The facts of a step beyond its limit, for the worst head of a row of `tensor`: of the output, or a sequence's state or window."""
    call, tokens = step.call, step.call.inputs.tokens
    sequence, token = tokens.place(row) if tensor == "output" else (row, 0)
    start = _start(step, sequence)
    own = call.out[tokens.rows(slice(sequence, sequence + 1))], *(x[pools.index[[sequence]]] for x in (pools.state, pools.window))
    stored = Stored(*own)
    judged = oracle.judged(*start, stored)
    gold = judged.gold
    facts: dict[str, Any] = {"step": call.number, "tensor": tensor, "sequence": sequence, "head": head}
    if tensor == "output" and tokens.longest > 1:
        facts["token"] = token
    if tensor == "window":
        return facts | _in_window(oracle, stored.window[0], gold.window[0])
    out, state = stored.out, stored.state[0]
    axes = {"output": ("value",), "state": ("value", "key")}[tensor]
    if tensor == "output" and oracle.case.layer is not None:
        facts["head"], axes = None, ("hidden",)
    candidate, expected = (out[token], gold.out[token]) if tensor == "output" else (state, gold.state[0])
    facts |= _element(candidate[head], expected[head], axes)
    fallback = "out" if tensor == "output" else "state"
    if not bool(candidate.isfinite().all()):
        return facts | {"point": fallback, "cause": "not finite where the gold is"}
    return facts | _explain(oracle, step, sequence, stored, judged, fallback)


def _in_window(oracle: Oracle, window: Tensor, gold: Tensor) -> dict[str, Any]:
    """The first channel of a window [3, channels] that differs, with its section and head."""
    if oracle.case.layer is None:
        tap, channel = (int(i) for i in (window != gold).T.nonzero()[0].flip(0))
    else:  # the newest differ by their rounding
        tap, channel = divmod(int((window - gold).abs().nan_to_num(torch.inf).argmax()), window.shape[1])
    kda, heads = oracle.case.kda, oracle.case.problem.heads
    keys = heads * kda.key_dim
    section = "qkv"[min(channel // keys, 2)]
    place, width = channel - "qkv".index(section) * keys, kda.value_dim if section == "v" else kda.key_dim
    return {
        "head": place // width, "channel": {"tap": tap, "channel": channel}, "candidate": float(window[tap, channel]),
        "gold": float(gold[tap, channel]), "ulp": None, "point": "conv" if oracle.case.layer is None else "proj_qkv",
        "cause": f"section {section} of the window is not the raw inputs shifted by one",
    }  # fmt: skip


def _start(step: Step, sequence: int) -> tuple[Tokens, Tensor, Tensor]:
    row = slice(sequence, sequence + 1)
    return step.call.inputs.tokens[row], step.call.state_before[row], step.call.window_before[row]


def _element(candidate: Tensor, gold: Tensor, axes: tuple[str, ...]) -> dict[str, Any]:
    """The element with the largest error beyond rounding."""
    error = metrics.beyond_rounding(candidate.double(), gold.double(), candidate.dtype)
    flat = int(torch.where(candidate.isfinite(), error, torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), candidate.shape)]
    value, expected = candidate.flatten()[flat], gold.flatten()[flat]
    ulp = metrics.ulp_distance(value[None], expected[None].to(value.dtype)).item() if value.isfinite() else None
    return {"channel": dict(zip(axes, index, strict=True)), "candidate": float(value), "gold": float(expected), "ulp": ulp}


def _explain(oracle: Oracle, step: Step, sequence: int, stored: Stored, judged: Judged, fallback: str) -> dict[str, str]:
    """The hypothesis that leaves the least of the residual, over the heads that are off; unknown when it leaves too much."""

    out, state, gold = stored.out, stored.state[0], judged.gold

    def residual(prediction: Prediction) -> Tensor:  # [H]
        return _share(*(x.transpose(0, 1) for x in (out, prediction.out, gold.out))) + _share(state, prediction.state[0], gold.state[0])

    before = residual(gold)
    off = before >= limits.OFF_HEADS * before.max()
    found = [(float(residual(h.prediction)[off].sum()), h) for h in _hypotheses(oracle, step, sequence, judged.at)]
    left, best = min(found, key=lambda pair: pair[0])
    if left <= limits.EXPLAINED**2 * float(before[off].sum()):
        return {"point": best.point, "cause": best.cause}
    hint = "" if oracle.declared else "; if it rounds inside on purpose, declare that as its contract"
    return {"point": fallback, "cause": f"unknown: no hypothesis explains it{hint}"}


def _share(candidate: Tensor, predicted: Tensor, gold: Tensor) -> Tensor:
    """Squared error beyond rounding of each head, relative to the gold; infinite where only one of the two is finite."""
    error = metrics.beyond_rounding(candidate.double(), predicted, candidate.dtype)
    error = torch.where(candidate.isfinite() == predicted.isfinite(), error.nan_to_num(0.0, 0.0, 0.0), torch.inf)
    return error.square().flatten(1).sum(1) / gold.square().flatten(1).sum(1).clamp(min=limits.SMALLEST_NORMAL)


def _hypotheses(oracle: Oracle, step: Step, sequence: int, contract: At) -> Iterator[Hypothesis]:
    tokens, state, window = _start(step, sequence)

    def predict(at: At = exact, state: Tensor = state, window: Tensor = window, **changed: object) -> Prediction:
        return oracle.predict(tokens, state, window, torch.float64, lambda name, value: at(name, contract(name, value)), **changed)

    for point in KDA_CELL if oracle.case.layer is None else KDA_MIXER:
        for name, dtype in ROUNDED.items():
            if oracle.roundings.get(point) != dtype and (point not in BOUNDARY or point == "state"):
                yield Hypothesis(point, f"{point} rounded to {name}", predict(rounding({point: dtype})))
    for first, second in itertools.combinations(sorted(set(KDA_CELL) - BOUNDARY - {"norm", "gate"}), 2):
        dtype = oracle.case.problem.activation
        if dtype != torch.float32:
            pair = predict(rounding({first: dtype, second: dtype}))
            yield Hypothesis(first, f"{first} and {second} rounded to {oracle.case.problem.dtype}", pair)
    for point in oracle.roundings:
        unrounded = oracle.predict(tokens, state, window, torch.float64, _without(point, contract))
        yield Hypothesis(point, f"{point} not rounded, against its contract", unrounded)
    if oracle.roundings:
        yield Hypothesis("conv", "nothing rounded inside, against its contract", oracle.predict(tokens, state, window, torch.float64))
    if isinstance(oracle, MixerOracle):
        for point, cause, layer in oracle.mistaken():
            yield Hypothesis(point, cause, oracle.predict(tokens, state, window, torch.float64, rounding(oracle.roundings), layer=layer))
    inputs = step.call.inputs
    for cause, runs in PHASES[oracle.case.problem.op].mistaken(oracle.case, step.call.number, inputs.activations).items():
        own = runs[sequence : sequence + 1]
        yield Hypothesis("state", cause, oracle.predict(own, state, window, torch.float64, rounding(oracle.roundings)))
    if oracle.chunked:  # the chunk form has other points
        return
    yield Hypothesis("decay", "decay applied after the update", predict(_decay_after_update()))
    yield Hypothesis("decay", "no decay", predict(_replaced("decay", 1.0)))
    yield Hypothesis("delta", "update dropped", predict(_replaced("delta", 0.0)))
    yield Hypothesis("g", "dt_bias dropped", predict(dt_bias=torch.zeros_like(oracle.case.weights["dt_bias"])))
    neighbour = oracle.case.weights["dt_bias"].roll(oracle.case.kda.key_dim)
    yield Hypothesis("g", "dt_bias of the head before", predict(dt_bias=neighbour))
    yield Hypothesis("conv", "window ignored", predict(window=torch.zeros_like(window)))

    right = predict()
    kept = Prediction(right.out, state.double(), right.window)
    yield Hypothesis("delta", "update not stored: the slot holds the state from before the step", kept)
    if state.shape[-1] == state.shape[-2]:
        turned = predict(state=state.mT)
        yield Hypothesis("state", "state read and stored transposed", Prediction(turned.out, turned.state.mT, turned.window))
        yield Hypothesis("state", "state read transposed", turned)
        yield Hypothesis("state", "state stored transposed", Prediction(right.out, right.state.mT, right.window))
    for other in range(step.call.state_before.shape[0]):
        if other != sequence:
            taken = predict(state=step.call.state_before[other : other + 1])
            cause = f"stale slot: state of sequence {other}"
            yield Hypothesis("state", cause, taken)
            yield Hypothesis("state", cause, Prediction(taken.out, state.double(), taken.window))
    fresh = predict(state=torch.zeros_like(state))
    yield Hypothesis("state", "state ignored: started from zero", fresh)


def _without(point: str, contract: At) -> At:
    return lambda name, x: x if name == point else contract(name, x)


def _replaced(point: str, value: float) -> At:
    return lambda name, x: torch.full_like(x, value) if name == point else x


def _decay_after_update() -> At:
    """Hold the decay back at its point, and apply it to the updated state."""
    held: dict[str, Tensor] = {}

    def at(name: str, x: Tensor) -> Tensor:
        if name == "decay":
            held["decay"] = x
            return torch.ones_like(x)
        return x * held["decay"][:, :, None, :] if name == "state" else x

    return at
