"""Two records of the same cases: what got worse beyond noise, what got better, what is missing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from parity import limits
from parity import record as records
from parity.record import Record, Row, Verdict

_RANKS = {Verdict.PASS: 0, Verdict.SKIPPED: 1, Verdict.VACUOUS: 2, Verdict.INCONCLUSIVE: 3, Verdict.FAIL: 4}
_RATIOS = (("noise_ratio", "limit", "noise/limit"), ("noise_ratio_head", "limit_head", "noise/limit of the worst head"))
_TIMED = ("op", "impl", "model", "heads", "batch", "tokens", "dtype", "state_dtype")
_CEILINGS = ("copy", "read_modify_write", "matmul")
Timings = dict[tuple[str, ...], Row]


class Turn(StrEnum):
    """Which way something went."""

    WORSE = "WORSE"
    BETTER = "BETTER"
    CHANGED = "CHANGED"  # neither


@dataclass(frozen=True)
class Change:
    """What changed of one row or one timing. `row` identifies it; before and after are numbers or words."""

    turn: Turn
    what: str
    before: Any
    after: Any
    row: Row


@dataclass(frozen=True)
class Comparison:
    """Changes, worst first, of so many rows and timings that both records have; how many of those fail in both."""

    changes: list[Change]
    rows: int
    timings: int
    failing: int

    def exit_code(self) -> int:
        """1 when something got worse or is missing; 3 when nothing was in both records; else 0."""
        if any(change.turn == Turn.WORSE for change in self.changes):
            return 1
        return 0 if self.rows or self.timings else 3


def compare(old: Record, new: Record) -> Comparison:
    """What changed from `old` to `new`: rows by case, implementation, reference and device, timings by what they timed."""
    before, after = ({records.identity(record, row): row for row in record["rows"]} for record in (old, new))
    both = [(before[key], after[key]) for key in before if key in after]
    changes = [change for pair in both for change in _of_rows(*pair)]
    changes += [Change(Turn.WORSE, "row", row["verdict"], "missing", row) for key, row in before.items() if key not in after]
    lost = [plan for plan in records.missing(new) if records.identity(new, plan) not in before]
    changes += [Change(Turn.WORSE, "row", "planned", "missing", plan) for plan in lost]
    changes += [_added(row) for key, row in after.items() if key not in before]
    timed, again = (_timings(record) for record in (old, new))
    changes += [change for key, row in timed.items() for change in _of_timings(row, again.get(key))]
    changes += [Change(Turn.CHANGED, "us", "not timed", row["us"], row) for key, row in again.items() if key not in timed]
    failing = sum(was["verdict"] == now["verdict"] == Verdict.FAIL for was, now in both)
    order = list(Turn)
    return Comparison(sorted(changes, key=lambda change: order.index(change.turn)), len(both), len(timed.keys() & again.keys()), failing)


def _added(row: Row) -> Change:
    return Change(Turn.WORSE if row["verdict"] == Verdict.FAIL else Turn.CHANGED, "row", "not there", row["verdict"], row)


def _of_rows(old: Row, new: Row) -> Iterator[Change]:
    was, now = Verdict(old["verdict"]), Verdict(new["verdict"])
    if was != now:
        turn = Turn.WORSE if _RANKS[now] > _RANKS[was] else Turn.BETTER if now == Verdict.PASS else Turn.CHANGED
        yield Change(turn, "verdict", was.value, now.value, new)
    unchecked = [name for name in old["invariants"] or {} if name not in (new["invariants"] or {})]
    if unchecked and now != Verdict.SKIPPED:
        yield Change(Turn.WORSE, "invariants", "checked", f"not checked: {', '.join(unchecked)}", new)
    if old["contract"] != new["contract"]:
        yield Change(Turn.CHANGED, "contract", _contract(old), _contract(new), new)
    for what, before, after, floor in _errors(old, new):
        if grown := _grown(before, after, floor):
            yield Change(grown, what, before, after, new)


def _contract(row: Row) -> str:
    rounds = (row["contract"] or {}).get("rounds") or {}
    return ", ".join(f"{point} to {dtype}" for point, dtype in rounds.items()) or "rounds nothing inside"


def _errors(old: Row, new: Row) -> Iterator[tuple[str, Any, Any, float]]:
    """Each error of both rows, with the size below which it doesn't count."""
    for tensor in ("output", "state"):
        for ratio, limit, name in _RATIOS:
            before, after = (_ratio(row, tensor, ratio, limit) for row in (old, new))
            yield f"{tensor} {name}", before, after, limits.GROWTH_FLOOR
    for key, name in (("state_rel_l2", "state drift"), ("rel_l2", "output drift")):
        yield name, *((row["drift"] or [{}])[-1].get(key) for row in (old, new)), 0.0


def _ratio(row: Row, tensor: str, ratio: str, limit: str) -> float | None:
    values = row[tensor] or {}
    found, most = values.get(ratio), values.get(limit)
    return found / most if found is not None and most else None


def _grown(before: float | None, after: float | None, floor: float) -> Turn | None:
    if before is None or after is None:
        return None
    finite = math.isfinite(before), math.isfinite(after)
    if not all(finite):
        return None if finite[0] == finite[1] else Turn.WORSE if finite[0] else Turn.BETTER
    if after > limits.GROWTH * max(before, floor):
        return Turn.WORSE
    return Turn.BETTER if before > limits.GROWTH * max(after, floor) else None


def _timings(record: Record) -> Timings:
    """Timings by what they timed, and on what."""
    found = {}
    for row in record.get("bench") or []:
        device = records.environment_of(record, row).get("device")
        found[*(str(row.get(key)) for key in _TIMED), str(device)] = row
    return found


def _of_timings(old: Row, new: Row | None) -> Iterator[Change]:
    """A timing beyond the spread of both runs. A ceiling says something about the machine, not about a kernel."""
    ceiling = old["op"] == "device" or old["impl"].partition(" ")[0] in _CEILINGS
    worse = Turn.CHANGED if ceiling else Turn.WORSE
    if new is None:
        yield Change(worse, "us", old["us"], "missing", old)
    elif old["us"] is not None and new["us"] is None:
        yield Change(worse, "us", old["us"], f"not timed: {new.get('reason') or 'no reason given'}", new)
    elif new["us"] is not None and old["us"] is None:
        yield Change(Turn.CHANGED, "us", "not timed", new["us"], new)
    elif new["us"] is not None:
        if _slower(old, new):
            yield Change(worse, "us", _spread(old), _spread(new), new)
        elif _slower(new, old):
            yield Change(Turn.CHANGED if ceiling else Turn.BETTER, "us", _spread(old), _spread(new), new)


def _slower(old: Row, new: Row) -> bool:
    return bool(new["us_min"] > old["us_max"] and new["us"] > limits.RUNS_APART * old["us"])


def _spread(row: Row) -> tuple[float, float, float]:
    return row["us"], row["us_min"], row["us_max"]
