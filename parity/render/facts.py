"""What a record says in sentences, for every format: its verdict, its reasons, the first divergence, the command that reproduces it."""

import shlex
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from optimized import registry
from parity import gate
from parity import record as records
from parity.record import Record, Row, Verdict
from parity.render.cells import dig, number, one_line, share
from parity.source import REPORTED

_SEVERITY = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.VACUOUS, Verdict.PASS, Verdict.SKIPPED)
_NAMED_OPERATORS = 3
_NAMED_KERNELS = 4
_NAMED_ROWS = 20
_TELLING = ("device", "driver", "torch", "triton", "fla-core")


def compared(record: Record) -> list[Row]:
    """The rows of the parity table: all but the skipped."""
    return located(record, [row for row in record["rows"] if row["verdict"] != Verdict.SKIPPED])


def located(record: Record, rows: list[Row]) -> list[Row]:
    """The rows, with their device where those of a merged record differ in it."""
    devices = {part["environment"].get("device") for part in record.get("parts") or []}
    return [row | {"device": records.environment_of(record, row).get("device")} for row in rows] if len(devices) > 1 else rows


def headline(record: Record) -> tuple[str, str]:
    """The verdict and its sentence."""
    rows, timed, planned = record["rows"], record.get("bench") or [], record.get("planned") or []
    if not rows and not timed and not planned:
        return Verdict.VACUOUS, "nothing ran: the record has no rows"
    if not rows and not planned:
        return "TIMED", f"{_operators(timed)}: {count(len(timed))} on {_place(record)}: speed only, nothing was compared"
    summary = records.summary(rows)
    told = [f"{summary[verdict]} {verdict}" for verdict in _SEVERITY if summary[verdict]]
    if lost := records.missing(record):
        told.append(f"{len(lost)} of {len(planned)} planned rows missing")
    operators = _operators(rows or [{"op": plan["case"].partition(":")[0]} for plan in planned])
    if not compared(record):
        return records.overall(record), f"{operators}: nothing ran, {', '.join(told)}"
    kernels = [kernel["name"] for row in compared(record) for kernel in dig(row, "path.kernels") or []]
    ran = dig(record, "environment.interpreter") and any(not name.startswith("aten::") for name in kernels)
    interpreted = " (Triton's interpreter ran the kernels: verdicts, no timing)" if ran else ""
    return records.overall(record), f"{operators}: {', '.join(told)} on {_place(record)}{interpreted}"


def missing(record: Record) -> list[str]:
    """The planned rows that the record lacks, and how to make them."""
    lost = records.missing(record)
    lines = [f"{one_line(plan['impl'])} {one_line(plan['case'])}{_against(plan)}" for plan in lost[:_NAMED_ROWS]]
    if len(lost) > _NAMED_ROWS:
        lines.append(f"and {len(lost) - _NAMED_ROWS} more")
    if lost:
        lines.append("the sweep was stopped before them; the same command with --resume RECORD keeps the rows here and makes these")
    return lines


def mixed(record: Record) -> list[str]:
    """What differs between the parts of a merged record, each value with the number of its rows."""
    rows = [*record["rows"], *(record.get("bench") or [])]
    lines = []
    for key in _TELLING:
        found: dict[str, list[Row]] = {}
        for row in rows:
            value = records.environment_of(record, row).get(key)
            found.setdefault("unknown" if value is None else one_line(value), []).append(row)
        if len(found) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} ({count(len(group))})" for value, group in found.items()))
    return lines


def environment(record: Record) -> str:
    """The devices and versions that the rows were made with."""
    parts = [part["environment"] for part in record.get("parts") or [record]]
    versions = []
    for key in ("torch", "triton", "python", "driver", "commit"):
        values = dict.fromkeys(one_line(part[key]) for part in parts if part.get(key) is not None)
        versions += [f"{key} {' and '.join(values)}"] if values else []
    unclean = sum(bool(part.get("dirty")) for part in parts)
    dirty = " with uncommitted changes" + (f" in {unclean} of {len(parts)} parts" if unclean < len(parts) else "")
    return ", ".join([_place(record), *versions]) + (dirty if unclean else "")


def paths(rows: list[Row]) -> list[str]:
    """What ran: one line for each implementation and set of kernels."""
    return _grouped(rows, _path)


def from_zero(rows: list[Row]) -> list[str]:
    """How far output and state are from the reference at some steps of a decode from zero, a line a row."""
    lines = []
    for row in rows:
        drift = {entry["step"]: entry for entry in row.get("drift") or []}
        steps = [step for step in REPORTED if step in drift] if "fresh=1" in row["case"] else []
        told = ", ".join(f"{step}: {share(drift[step]['rel_l2'])} / {share(drift[step]['state_rel_l2'])}" for step in steps)
        lines += [f"{one_line(row['impl'])} from zero, output / state drift at step {told}"] if told else []
    return lines


def stale(record: Record) -> list[str]:
    """Implementations whose sources are no longer those that the record was made with, one line each."""
    changed: dict[tuple[str, str], int] = {}
    for row in [*record["rows"], *(record.get("bench") or [])]:
        made = records.environment_of(record, row)
        versions = tuple((name, made.get(name)) for name in ("torch", "triton", "fla-core") if name in made)
        if row.get("impl_hash") and row["impl_hash"] != _hash_now(row["op"], row["impl"], versions):
            changed[row["op"], row["impl"]] = changed.get((row["op"], row["impl"]), 0) + 1
    return [f"{op} {one_line(impl)}: its sources have changed since ({rows} rows)" for (op, impl), rows in changed.items()]


@lru_cache
def _hash_now(op: str, impl: str, versions: tuple[tuple[str, str | None], ...]) -> str | None:
    """Of the sources here, with the packages of the record's machine."""
    try:
        return registry.find(op, impl).source_hash(dict(versions))
    except ValueError:
        return None


def reasons(record: Record) -> list[tuple[Verdict, str]]:
    """Why rows are no PASS, worst first: one line for each verdict, implementation and reason."""
    lines: list[tuple[Verdict, str]] = []
    for verdict in (verdict for verdict in _SEVERITY if verdict != Verdict.PASS):
        rows = [row for row in record["rows"] if row["verdict"] == verdict]
        lines += [(verdict, line) for line in _grouped(rows, _reason)]
    return lines


def _reason(row: Row) -> str:
    """A row that failed is told apart from others of its implementation; skips and refusals are of the implementation."""
    which = f" [{row['dtype']}, {row['state_dtype']} state, {row['regime']}]" if row["verdict"] == Verdict.FAIL else ""
    return f"{one_line(row['impl'])}{which}: {one_line(row['reason']) or 'no reason given'}"


def _grouped(rows: list[Row], sentence: Callable[[Row], str]) -> list[str]:
    """Each sentence once, with the number of its rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(sentence(row), []).append(row)
    return [f"{text} ({count(len(group))})" for text, group in groups.items()]


def _path(row: Row) -> str:
    """Kernel names without what all of them share, with their launches; torch operators by name only where they were declared."""
    kernels = dig(row, "path.kernels") or []
    operators = [kernel for kernel in kernels if kernel["name"].startswith("aten::")]
    if len(operators) > _NAMED_KERNELS:
        kernels = [kernel for kernel in kernels if kernel not in operators]
    names = [f"{one_line(kernel['name']).strip('_').removesuffix('_kernel')} x{kernel['launches']}" for kernel in kernels]
    shown = ", ".join(names[:_NAMED_KERNELS]) + (f" and {len(names) - _NAMED_KERNELS} more" if len(names) > _NAMED_KERNELS else "")
    many = f"{len(operators)} torch operators" if len(operators) > _NAMED_KERNELS else ""
    proved = "proved" if dig(row, "path.proved") else "not proved"
    return f"{one_line(row['impl'])} ran {', '.join(filter(None, (shown, many))) or 'no kernel that was seen'}: {proved}"


def first_bad(record: Record) -> Row | None:
    """The first row of the worst verdict when that isn't PASS."""
    worst = records.worst(record["rows"])
    return next((row for row in record["rows"] if row["verdict"] == worst != Verdict.PASS), None)


def command(row: Row) -> str:
    """The command line that reproduces a row."""
    against = [] if row["reference"] == gate.REFERENCE else ["--reference", one_line(row["reference"])]
    return shlex.join(["workbench", "sweep", one_line(row["case"]), "--impl", one_line(row["impl"]), *against])


def _against(row: Row) -> str:
    return "" if row["reference"] == gate.REFERENCE else f" against {one_line(row['reference'])}"


def divergence(row: Row) -> list[tuple[str, str]]:
    """Label and text of everything known about the first value over its limit; nothing when there is none."""
    first = row.get("first_divergence")
    if not first:
        return []
    would_pass = dig(row, f"{first['tensor']}.would_pass")
    lines = [
        ("impl", one_line(row["impl"])),
        ("where", _where(first, row.get("steps"))),
        ("values", _values(first)),
        ("error", _excess(first)),
        ("point", f"{one_line(first.get('point') or 'unknown')} ({one_line(first.get('cause') or 'no cause found')})"),
        ("contract", _contract(row.get("contract") or {})),
        ("would pass", f"with limits {number(would_pass)} times as wide" if would_pass is not None else ""),
        ("largest", _largest(first.get("largest"))),
    ]
    return [(label, text) for label, text in lines if text]


def _where(first: dict[str, Any], steps: Any) -> str:
    """Step, tensor, sequence, head and channel, as far as each is known."""
    channel = first.get("channel")
    axes = channel if isinstance(channel, dict) else {"channel": ", ".join(map(str, channel)) if channel else None}
    places = {key: first.get(key) for key in ("sequence", "head")} | axes
    step = f"step {number(first['step'])}" + (f" of {steps}" if steps else "")
    return ", ".join([step, one_line(first["tensor"]), *(f"{name} {number(at)}" for name, at in places.items() if at is not None)])


def _values(first: dict[str, Any]) -> str:
    ulp = first.get("ulp")
    apart = f": {ulp} ULP apart" if ulp is not None else ""
    return f"candidate {_exact(first.get('candidate'))}, gold {_exact(first.get('gold'))}{apart}"


def _exact(value: Any) -> str:
    """Nine digits, enough to tell any two FP32 values apart."""
    return number(value, digits=9) or "unknown"


def _excess(first: dict[str, Any]) -> str:
    """How far over its limit; nothing where none was measured, as for a window, which is compared bit by bit."""
    ratio, limit = first.get("noise_ratio"), first.get("limit")
    if ratio is None:
        return ""
    of = f" of the {first['limit_of']}" if first.get("limit_of") else ""
    return f"noise ratio {number(ratio)}{of}" + (f", {number(ratio / limit)} times its limit of {number(limit)}" if limit else "")


def _contract(contract: dict[str, Any]) -> str:
    if not contract:
        return ""
    rounds = ", ".join(f"{one_line(point)} to {one_line(dtype)}" for point, dtype in (contract.get("rounds") or {}).items())
    return f"rounds {rounds or 'nothing inside'}, accumulates in {one_line(contract.get('accumulate'))}"


def _largest(largest: dict[str, Any] | None) -> str:
    if not largest:
        return ""
    places = ", ".join(f"{key} {number(largest[key])}" for key in ("step", "sequence", "head") if largest.get(key) is not None)
    return f"{places}: {number(largest['over'])} times its limit (the largest error, not the first)"


def _operators(rows: list[Row]) -> str:
    operators = list(dict.fromkeys(one_line(row["op"]) for row in rows))
    return ", ".join(operators) if len(operators) <= _NAMED_OPERATORS else f"{len(operators)} operators"


def _place(record: Record) -> str:
    """Devices with their architectures; interpreted rows, whose CPU says nothing, as cpu."""
    places: dict[str, None] = {}
    for row in [*record["rows"], *(record.get("bench") or [])] or [{}]:
        made = records.environment_of(record, row)
        arch = one_line(row.get("arch") or made.get("arch") or "cpu")
        places[arch if arch == "cpu" else f"{one_line(made.get('device') or 'unknown device')} ({arch})"] = None
    return " and ".join(places)


def count(many: int, name: str = "row") -> str:
    """1 row, 2 rows."""
    return f"{many} {name}{'' if many == 1 else 's'}"
