"""The tensors of a problem: weights, initial pools and the inputs of each step, all from its seed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity import layer, regimes
from parity.buffers import GuardedRows, same_bits
from parity.phases import PHASES
from parity.problem import Problem
from parity.tokens import Tokens
from reference.kda_replay import Replay
from reference.kda_weights import KdaWeights

SPARE_SLOTS = 2  # slots that no sequence of the case names
POOL_GAP = 48  # elements between slots: a padded pool


@dataclass
class Pools:
    """State and conv window by slot, in guarded memory; slots that nobody names hold NaN."""

    state_rows: GuardedRows
    window_rows: GuardedRows
    state: Tensor  # [slots, H, V, K]
    window: Tensor  # [slots, 3, channels]
    slots: Tensor  # int32 [N]
    caches: dict[str, GuardedRows]  # by name, of `replay`
    replay: Replay | None  # the candidate's own, where its operator has drafts

    @property
    def index(self) -> Tensor:
        return self.slots.long()

    def spare(self) -> Tensor:
        """The slots that the case does not name."""
        named = torch.zeros(self.state.shape[0], dtype=torch.bool, device=self.state.device)
        named[self.index] = True
        return (~named).nonzero().flatten()

    def arguments(self) -> dict[str, Any]:
        """The pools as an operator's arguments."""
        replay = {} if self.replay is None else {"replay": self.replay}
        return {"state": self.state, "window": self.window, "slots": self.slots, **replay}

    def guarded(self) -> list[GuardedRows]:
        """All memory of the pools."""
        return [self.state_rows, self.window_rows, *self.caches.values()]

    def take(self, other: "Pools") -> None:
        """Become a copy of other pools of the case."""
        self.slots.copy_(other.slots)
        for own, theirs in zip(self.guarded(), other.guarded(), strict=True):
            own.rows.copy_(theirs.rows)

    def bytes(self) -> int:
        return self.state_rows.rows.numel() * self.state.itemsize + self.window_rows.rows.numel() * self.window.itemsize


@dataclass
class StepInputs:
    """The arguments of one step: activations as views of one wide projection, others by sequence; the activations run by run."""

    projection: GuardedRows
    activations: dict[str, Tensor]
    others: dict[str, Tensor]
    tokens: Tokens

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.activations | self.others


@dataclass
class Call:
    """One call of the candidate: what it started from and what it made of it."""

    number: int
    inputs: StepInputs
    state_before: Tensor  # [N, H, V, K], the candidate's own
    window_before: Tensor  # [N, 3, channels]
    out: Tensor  # [T, H, V], of a mixer [T, 1, hidden]
    inputs_intact: bool


class Case:
    """One problem's data on its device."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.regime = regimes.REGIMES[problem.regime]
        self.kda = problem.shape.kda
        heads, key_dim, value_dim = problem.heads, self.kda.key_dim, self.kda.value_dim
        self.channels = heads * (2 * key_dim + value_dim)
        generator = self.generator(0)
        a_log = torch.rand(heads, generator=generator, device=problem.device) * 1.3863  # exp(a_log) in [1, 4]
        self.weights = {
            "conv_weight": (self._normal((self.channels, 4), generator) * 0.5).to(problem.activation),
            "a_log": a_log,
            "dt_bias": regimes.gate_bias(self.regime, self.kda, a_log, generator),
            "norm_weight": (1 + 0.1 * self._normal((value_dim,), generator)).to(problem.activation),
        }
        self.layer: KdaWeights | None = None
        self.output = (heads, value_dim)  # the shape of a row of the output
        owned: dict[str, Any] = self.weights
        if PHASES[problem.op].mixed:
            self.layer = layer.weights(self)
            self.output, owned = (1, problem.shape.hidden), {"weights": self.layer}
        self._owned = owned
        self.given: dict[str, Any] = {name: _copied(weight) for name, weight in owned.items()}  # what a candidate may damage
        self.settings = {"lower_bound": self.kda.lower_bound, "norm_eps": problem.shape.norm_eps}

    def generator(self, stream: int) -> torch.Generator:
        """Random numbers of a stream: 0 weights, 1 pools, 2 + step its activations, -step what else it draws."""
        generator = torch.Generator(self.problem.device)
        generator.manual_seed(self.problem.seed * 100_003 + stream)
        return generator

    def _normal(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.problem.device)

    def weights_intact(self) -> bool:
        """What candidates were given still is what the references read."""
        pairs = [(self.given[name], weight) for name, weight in self._owned.items()]
        tensors = [pair for pair in pairs if isinstance(pair[1], Tensor)]
        for given, own in pairs:
            if isinstance(own, KdaWeights):
                tensors += zip(vars(given).values(), vars(own).values(), strict=True)
        return all(same_bits(given, own) for given, own in tensors)

    def pools(self) -> Pools:
        """The initial pools, new memory at every call and the same values."""
        problem, kda = self.problem, self.kda
        generator = self.generator(1)
        count = problem.batch + SPARE_SLOTS
        row = (problem.heads, kda.value_dim, kda.key_dim)
        state_rows = GuardedRows(count, problem.heads * kda.value_dim * kda.key_dim, POOL_GAP, problem.pool, problem.device)
        window_rows = GuardedRows(count, 3 * self.channels, POOL_GAP, problem.activation, problem.device)
        slots = torch.randperm(count, generator=generator, device=problem.device)[: problem.batch].to(torch.int32)
        for slot in slots.tolist():  # a row at a time: a large pool needs no second copy
            state_rows.rows[slot] = (self._normal(row, generator) * self.regime.state).flatten().to(problem.pool)
            window_rows.rows[slot] = self._normal((3 * self.channels,), generator).to(problem.activation)
        state = state_rows.rows.unflatten(1, row)
        caches = self._caches(count)
        replay = Replay(**{name: part.rows.unflatten(1, (problem.drafts, -1)) for name, part in caches.items()}) if caches else None
        return Pools(state_rows, window_rows, state, window_rows.rows.unflatten(1, (3, self.channels)), slots, caches, replay)

    def _caches(self, count: int) -> dict[str, GuardedRows]:
        """Replay caches, poisoned: what no verify has written must not be read."""
        problem = self.problem
        if not problem.drafts:
            return {}
        widths = {"qkv": self.channels, "f": problem.heads * self.kda.key_dim, "beta": problem.heads}
        return {
            name: GuardedRows(count, problem.drafts * width, POOL_GAP, problem.activation, problem.device) for name, width in widths.items()
        }

    def inputs(self, step: int) -> StepInputs:
        """The arguments of one step, all but weights, settings and pools."""
        problem = self.problem
        x = self.activations(step)
        width = sum(part.shape[1] for part in x.values())
        projection = GuardedRows(problem.rows, width, 8 - width % 8, problem.activation, problem.device)
        views = dict(zip(x, projection.rows.split([part.shape[1] for part in x.values()], dim=1), strict=True))
        for name, part in x.items():
            views[name].copy_(part)
        arguments, tokens = PHASES[problem.op].make(self, step, views)
        return StepInputs(projection, views, arguments, tokens)

    def activations(self, step: int) -> dict[str, Tensor]:
        """[T, D] each, in the dtype of the case."""
        problem = self.problem
        if self.layer is not None:
            return {"hidden": layer.hidden(self, self.generator(2 + step))}
        x = regimes.token_inputs(self.regime, self.kda, self.weights["a_log"], problem.rows, self.generator(2 + step))
        return {name: value.to(problem.activation) for name, value in x.items()}


def _copied(weights: Any) -> Any:
    return weights.clone() if isinstance(weights, Tensor) else KdaWeights(**{name: x.clone() for name, x in vars(weights).items()})
