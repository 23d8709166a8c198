"""The sweep: options to problems, problems to rows, rows to a record that is safe at every moment."""

import itertools
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from optimized import registry
from optimized.arch import CPU
from optimized.implementation import Implementation
from parity import gate, record, source
from parity.phases import PHASES, Phase
from parity.problem import Problem, parse, whole_number
from parity.record import Record, Row, Verdict
from parity.regimes import DEFAULT_REGIMES


@dataclass(frozen=True)
class Options:
    """What to sweep. Lists are products; `op` may name a case, `op:key=value,...`."""

    op: tuple[str, ...] = ()
    model: tuple[str, ...] = ("glm-5.3-flash",)
    heads: tuple[int, ...] = (2,)
    batch: tuple[int, ...] = (2,)
    drafts: tuple[int, ...] = ()  # none: the operator's own
    tokens: tuple[int, ...] = ()
    dtype: tuple[str, ...] = ("bf16",)
    state_dtype: tuple[str, ...] = ("fp32", "bf16")
    regime: tuple[str, ...] = DEFAULT_REGIMES
    steps: int | None = None  # None: the operator's own
    impl: tuple[str, ...] = ()
    reference: str = gate.REFERENCE
    seed: tuple[int, ...] = (-1,)
    device: str = "cpu"
    preset: str = ""  # "source": the cases of the source PRs instead


ON_GPU = replace(Options(), heads=(16, 64), batch=(1, 16))
DRAFTS, TOKENS = (1, 3), (20, 1024)  # of a sweep on a CPU, where kernels are interpreted, and on a GPU
LISTS = {field.name for field in fields(Options) if field.name not in ("steps", "reference", "device", "preset")}
NUMBERS = {"heads", "batch", "drafts", "tokens", "seed"}


def layered(device: str, config: Path | None, given: dict[str, Any]) -> Options:
    """Defaults < the configuration file < the command line. ValueError for a key or a value that is not an option's."""
    values = _from_file(config) if config is not None else {}
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("preset", "source") not in ("", "source"):
        raise ValueError(f"preset: expected source, got {values['preset']!r}; it names the cases of the source PRs")
    if values.get("preset") and (fixed := sorted(set(values) - {"preset", "impl", "reference", "device"})):
        raise ValueError(f"{fixed[0].replace('_', '-')}: --preset {values['preset']} fixes it already; leave one of the two out")
    cases = [op for op in _value("op", values.get("op", "op")) if ":" in op]
    fixed = sorted(set(values) - {"op", "impl", "reference", "device"})
    if cases and fixed:
        raise ValueError(f"{fixed[0].replace('_', '-')}: {cases[0]} fixes it already; write it into the case or leave the case out")
    devices = {str(values.pop("device"))} if "device" in values else set()
    devices |= {setting.removeprefix("device=") for case in cases for setting in case.partition(":")[2].split(",") if "device=" in setting}
    if len(devices) > 1:
        raise ValueError(f"device: one for a run, got {', '.join(sorted(devices))}")
    device = devices.pop() if devices else device
    options = replace(ON_GPU if device.startswith("cuda") else Options(), device=device)
    return replace(options, **{name: _value(name, value) for name, value in values.items()})


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config: can't read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path} is not TOML: {error}") from error
    known = {field.name.replace("_", "-") for field in fields(Options)}
    for key in values:
        if key.replace("_", "-") not in known:
            raise ValueError(f"config: {path} has {key!r}; known are {', '.join(sorted(known))}")
    named = {key.replace("-", "_"): value for key, value in values.items()}
    if len(named) < len(values):
        raise ValueError(f"config: {path} has one option in two spellings")
    return named


def _value(name: str, value: Any) -> Any:
    """An option's value from a comma-separated text, a list or a scalar."""
    if name not in LISTS:
        return _integer(name, value) if name == "steps" else str(value)
    parts = value.split(",") if isinstance(value, str) and name != "op" else value if isinstance(value, list | tuple) else [value]
    parts = [part for part in (p.strip() if isinstance(p, str) else p for p in parts) if part != ""]
    if not parts:
        raise ValueError(f"{name.replace('_', '-')}: expected at least one value")
    return tuple(dict.fromkeys(_integer(name, part) if name in NUMBERS else str(part) for part in parts))


def _integer(name: str, value: Any) -> int:
    whole = isinstance(value, float) and value.is_integer()
    return whole_number(name.replace("_", "-"), int(value) if whole else value)


@dataclass(frozen=True)
class Task:
    """One row to make."""

    problem: Problem
    impl: Implementation
    reference: Implementation | None


def tasks(options: Options) -> list[Task]:
    """Every row of a sweep, checked before the first one runs."""
    found = []
    users = [name for name in options.impl if ":" in name]
    if users and not options.op:
        raise ValueError(f"operator: {users[0]} implements one of {', '.join(registry.operators())}; name it before --impl")
    for problem in problems(options):
        interpreted = problem.workload().arch == CPU
        here = tuple(entry.name for entry in registry.implementations(problem.op) if not (interpreted and entry.patient))
        own = {entry.name for entry in registry.implementations(problem.op)}
        elsewhere = {entry.name for op in registry.operators() for entry in registry.implementations(op)} - own
        names = [name for name in options.impl or here if name not in elsewhere or options.op]
        reference = None if options.reference == gate.REFERENCE else registry.find(problem.op, options.reference)
        found += [Task(problem, registry.find(problem.op, name), reference) for name in names]
    return found


def problems(options: Options) -> list[Problem]:
    """The problems that options name, each once: cases as they are, operators times the lists."""
    if options.preset:
        return source.problems(options.device)
    ops = options.op or registry.operators()
    return list(dict.fromkeys(problem for op in ops for problem in ([parse(op, options.device)] if ":" in op else _product(op, options))))


def _product(op: str, options: Options) -> Iterator[Problem]:
    phase = PHASES.get(op, PHASES["kda.decode"])  # an operator that does not exist: the problem says so
    steps = phase.steps[options.device.startswith("cuda")] if options.steps is None else options.steps
    if phase.whole_numbers:  # no tensor of a model takes part
        options = replace(options, **{name: getattr(options, name)[:1] for name in ("model", "heads", "dtype", "state_dtype", "regime")})
    cases = itertools.product(options.model, options.heads, options.batch, options.dtype, options.state_dtype, options.regime)
    for case, seed, runs in itertools.product(cases, options.seed, _runs(phase, options)):
        yield Problem(op, *case, steps, options.device, seed, *runs)


def _runs(phase: Phase, options: Options) -> list[tuple[int, int]]:
    """Drafts and tokens. An operator of several phases decodes, unless either is named: then a verify of each, a prefill of each."""
    gpu = options.device.startswith("cuda")
    if phase.mixed:
        return [*((drafts, 0) for drafts in options.drafts), *((0, tokens) for tokens in options.tokens)] or [(0, 0)]
    drafts = (options.drafts or (DRAFTS[gpu],)) if phase.drafted else (0,)
    return list(itertools.product(drafts, (options.tokens or (TOKENS[gpu],)) if phase.varlen else (0,)))


def run(
    work: Sequence[Task],
    made: Record,
    *,
    out: Path | None = None,
    resume: Record | None = None,
    fail_fast: bool = False,
    started: Callable[[Task], None] = lambda task: None,
    finished: Callable[[Row], None] = lambda row: None,
) -> Record:
    """Make the rows of `work` in `made`, in its order, saved after each. Rows of `resume` with the same inputs, contract and
    sources are kept, and are in the record from the start; so is what is planned."""
    blanks = [gate.blank(task.problem, task.impl, task.reference) for task in work]
    made["planned"] = [{key: row[key] for key in record.PLANNED_KEYS} for row in blanks]
    old = _finished(resume, made["environment"])
    rows = [old.get(_identity(row)) for row in blanks]
    _save(made, rows, out)
    for place, task in enumerate(work):
        started(task)
        rows[place] = row = rows[place] or gate.judge(task.problem, task.impl, task.reference)
        _save(made, rows, out)
        finished(row)
        if fail_fast and row["verdict"] == Verdict.FAIL:
            break
    return made


def _save(made: Record, rows: Sequence[Row | None], out: Path | None) -> None:
    made["rows"] = [row for row in rows if row is not None]
    made["summary"] = record.summary(made["rows"])
    if out is not None:
        record.save(made, out)


def kept(work: Sequence[Task], resume: Record, environment: dict[str, Any]) -> int:
    """How many rows of `work` `resume` already has."""
    old = _finished(resume, environment)
    return sum(_identity(gate.blank(task.problem, task.impl, task.reference)) in old for task in work)


def _finished(resume: Record | None, environment: dict[str, Any]) -> dict[tuple[str, ...], Row]:
    """The rows of a record made on this device with these versions, by identity."""
    found: dict[tuple[str, ...], Row] = {}
    for row in resume["rows"] if resume else []:
        before = record.environment_of(resume or {}, row)
        same = all(before.get(key) == environment[key] for key in ("device", "arch", "torch", "triton"))
        if same and row["verdict"] != Verdict.SKIPPED:
            found[_identity(row)] = {key: value for key, value in row.items() if key != "part"}
    return found


def _identity(row: Row) -> tuple[str, ...]:
    """What makes two rows the same: inputs, implementation, its sources, its contract, the reference."""
    return tuple(str(row[key]) for key in ("case", "impl", "impl_hash", "contract", "reference"))


def interpret(device: str) -> None:
    """Choose Triton's interpreter for kernels on a CPU. Only before Triton is imported; the choice holds for the process."""
    if not device.startswith("cuda"):
        os.environ["TRITON_INTERPRET"] = "1"
