"""Records into one: the newest row of each case, every part's own environment kept.

Parts are taken in the order in which they were begun; those that don't say when come first, in the order in which they were
named. A later part's row replaces an earlier one's of the same case, implementation, reference and device. Timed rows are
replaced by whole cases, so that nothing is set beside what ran in another run.
"""

from collections.abc import Sequence
from typing import Any

from parity import record as records
from parity.record import Record, Row

_TIMED = ("op", "model", "heads", "batch", "tokens", "dtype", "state_dtype")
Part = dict[str, Any]


def merge(found: Sequence[Record], command: list[str]) -> Record:
    """One record of all; `command` is what made it. Parts that hold no row any more are left out."""
    parts = sorted((part for record in found for part in _parts(record)), key=lambda part: part["environment"].get("began") or "")
    rows: dict[tuple[str, ...], Row] = {}
    planned: dict[tuple[str, ...], Row] = {}
    timed: dict[tuple[str, ...], list[Row]] = {}
    for place, part in enumerate(parts):
        for kept, name in ((rows, "rows"), (planned, "planned")):
            kept |= {_key(part, row, records.PLANNED_KEYS): row | {"part": place} for row in part[name]}
        timed |= _cases(part, place)
    bench = [row for group in timed.values() for row in group]
    return _numbered({"schema": records.SCHEMA, "command": command, "rows": [*rows.values()], "planned": [*planned.values()],
                      "bench": bench, "parts": parts})  # fmt: skip


def _parts(record: Record) -> list[Part]:
    """A record taken apart again: environment, command and the rows of each of its parts."""
    own = {"environment": record["environment"], "command": record.get("command") or []}
    parts = [dict(part) for part in record.get("parts") or [own]]
    for place, part in enumerate(parts):
        for name in ("rows", "planned", "bench"):
            part[name] = [row for row in record.get(name) or [] if row.get("part", 0) == place]
    return parts


def _key(part: Part, row: Row, names: Sequence[str]) -> tuple[str, ...]:
    return (*(str(row.get(name)) for name in names), str(part["environment"].get("device")))


def _cases(part: Part, place: int) -> dict[tuple[str, ...], list[Row]]:
    """The timed rows of a part by what they timed."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in part["bench"]:
        cases.setdefault(_key(part, row, _TIMED), []).append(row | {"part": place})
    return cases


def _numbered(made: Record) -> Record:
    """Parts without the rows that were taken out of them, counted anew; the environment is what they agree on."""
    lists = ("rows", "planned", "bench")
    used = sorted({row["part"] for name in lists for row in made[name]})
    parts = [{key: made["parts"][place][key] for key in ("environment", "command")} for place in used]
    for name in lists:
        made[name] = [row | {"part": used.index(row["part"])} for row in made[name]]
    environments = [part["environment"] for part in parts]
    keys = dict.fromkeys(key for environment in environments for key in environment)
    agreed = {key: _agreed([environment.get(key) for environment in environments]) for key in keys}
    return made | {"environment": agreed, "parts": parts, "summary": records.summary(made["rows"])}


def _agreed(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None
