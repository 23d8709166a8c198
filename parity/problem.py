"""A problem: everything that makes a parity row reproducible, and its one-line spelling."""

import hashlib
from dataclasses import Field, dataclass, fields
from typing import Any

import torch

from optimized import arch, registry
from optimized.implementation import Workload
from parity.phases import PHASES
from reference.points import DTYPES
from reference.presets import Preset, preset

DRAFTS = 3  # of a verify, unless a problem says otherwise
TOKENS = 70  # of a prefill: a chunk of 64 and some
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


RANGES = {
    "heads": (1, 4096),
    "batch": (0, 1 << 20),
    "drafts": (0, 7),
    "tokens": (0, 1 << 24),
    "contexts": (0, 1 << 20),
    "steps": (0, 1 << 20),
    "seed": (-1, (1 << 31) - 1),
}


def check_device(device: str) -> None:
    """ValueError for a device that torch doesn't have here."""
    kind, colon, index = device.partition(":")
    if device == "cpu":
        return
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {device} is not here ({torch.cuda.device_count()} CUDA devices); use cpu")


@dataclass(frozen=True)
class Problem:
    """One row of a sweep. heads: on this rank. batch: sequences. drafts: S of a verify. tokens: of a prefill's step, in all
    its sequences. contexts: of a mixer with tokens, how many sequences these are; the others are generations. seed -1: derived
    from everything else.

    A mixer decodes; with drafts it verifies, with tokens it prefills, and with contexts it does both in one batch.
    """

    op: str
    model: str = "glm-5.3-flash"
    heads: int = 2
    batch: int = 2
    dtype: str = "bf16"
    state_dtype: str = "fp32"
    regime: str = "random"
    steps: int = 16
    device: str = "cpu"
    seed: int = -1
    drafts: int = 0
    tokens: int = 0
    contexts: int = 0

    def __post_init__(self) -> None:
        from parity.regimes import REGIMES

        preset(self.model)
        for name, allowed in (("dtype", DTYPES), ("state_dtype", STATE_DTYPES), ("regime", REGIMES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{_option(name)}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{_option(name)}: expected {least} to {most}, got {getattr(self, name)}")
        check_device(self.device)
        if self.op not in registry.operators():
            raise ValueError(f"operator: expected one of {', '.join(registry.operators())}, got {self.op!r}")
        phase = PHASES[self.op]
        for name, taken, otherwise in (("drafts", phase.drafted, DRAFTS), ("tokens", phase.varlen, TOKENS)):
            if getattr(self, name) and not taken:
                raise ValueError(f"{name}: {self.op} takes none, got {getattr(self, name)}")
            if not getattr(self, name) and taken and not phase.mixed:
                object.__setattr__(self, name, otherwise)
        self._check_contexts(phase.mixed)
        if self.seed < 0:
            object.__setattr__(self, "seed", self._derived_seed())

    def _check_contexts(self, mixed: bool) -> None:
        if self.contexts and not (mixed and self.tokens):
            raise ValueError(f"contexts: expected none without tokens of a mixer, got {self.contexts}; they share tokens=N")
        if self.contexts > self.batch:
            raise ValueError(f"contexts: expected at most the {self.batch} sequences of the batch, got {self.contexts}")
        if mixed and self.tokens and self.drafts and self.prefilled == self.batch:
            raise ValueError(f"drafts: expected none where every sequence is a context, got {self.drafts}; contexts=N leaves some out")

    def _derived_seed(self) -> int:
        """Stable over processes. The device and the count of steps are left out: a longer run starts with the same steps."""
        key = "|".join(str(getattr(self, f.name)) for f in self._shown() if f.name not in ("seed", "device", "steps"))
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1

    def _shown(self) -> list[Field[Any]]:
        """The fields that mean something to this operator."""
        return [f for f in fields(self) if f.name not in ("drafts", "tokens", "contexts") or getattr(self, f.name)]

    @property
    def rows(self) -> int:
        """Rows of the activations in a step."""
        if PHASES[self.op].flushes or PHASES[self.op].whole_numbers:
            return 0
        return (self.tokens if self.batch else 0) + (self.batch - self.prefilled) * (1 + self.drafts)

    @property
    def prefilled(self) -> int:
        """Sequences whose step is tokens of a prefill; the others decode or verify."""
        if not PHASES[self.op].varlen or (PHASES[self.op].mixed and not self.tokens):
            return 0
        return self.contexts or self.batch

    @property
    def shape(self) -> Preset:
        return preset(self.model)

    @property
    def activation(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def pool(self) -> torch.dtype:
        return STATE_DTYPES[self.state_dtype]

    def workload(self) -> Workload:
        """What an implementation is asked whether it supports."""
        kda = self.shape.kda
        return Workload(
            self.op, arch.of_device(self.device), self.activation, self.pool, self.heads, self.batch, kda.key_dim, kda.value_dim,
            kda.lower_bound, self.shape.hidden, self.prefilled, self.rows, self.drafts,
        )  # fmt: skip

    def __str__(self) -> str:
        settings = ",".join(f"{_option(f.name)}={getattr(self, f.name)}" for f in self._shown()[1:])
        return f"{self.op}:{settings}"


def parse(case: str, device: str = "cpu") -> Problem:
    """The problem that `str(problem)` spells: `op:key=value,...`; keys left out take their defaults, the device the one given."""
    op, _, settings = case.partition(":")
    problem_fields = {_option(f.name): f for f in fields(Problem)[1:]}
    values: dict[str, int | str] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if key not in problem_fields or not equals:
            raise ValueError(f"case: expected key=value with a key of {', '.join(problem_fields)}, got {setting!r}")
        field = problem_fields[key]
        if field.name in values:
            raise ValueError(f"case: {key} stands twice in {case!r}")
        values[field.name] = whole_number(f"case: {key}", value) if field.type is int else value
    return Problem(op, **{"device": device, **values})  # type: ignore[arg-type]


def whole_number(name: str, value: object) -> int:
    """The integer that `value` is or that its decimal digits spell; ValueError for anything else."""
    digits = str(value).strip().removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{name}: expected a whole number, got {value!r}")
    return int(str(value))


def _option(name: str) -> str:
    return name.replace("_", "-")
