"""What a comparison of two records says, as a page and as JSON."""

import json
from typing import Any

from parity.compare import Change, Comparison, Turn
from parity.record import Record, plain
from parity.render import cells, facts, page
from parity.render.cells import Column, number, one_line
from parity.render.facts import count

_SHOWN = ("op", "impl", "model", "heads", "batch", "tokens", "dtype", "state_dtype", "regime", "steps", "case")
_COMMANDS = 5


def of(found: Comparison, old: Record, new: Record) -> page.Page:
    """The verdict, both machines, a table of changes, and the commands that reproduce the worst of them."""
    blocks: page.Page = [page.Headline(*_headline(found))]
    blocks.append(page.Lines([("", f"{name}: {facts.environment(made)}") for name, made in (("old", old), ("new", new))]))
    if found.changes:
        blocks.append(cells.table(_COLUMNS, [change.row | {"change": change} for change in found.changes]))
    if found.failing:
        blocks.append(page.Lines([("FAIL", f"in both records: {found.failing} of {found.rows} rows")]))
    rows = [change.row for change in found.changes if change.turn == Turn.WORSE and "case" in change.row]
    commands = list(dict.fromkeys(facts.command(row) for row in rows))
    if commands:
        more = f", the first {_COMMANDS} of {len(commands)}" if len(commands) > _COMMANDS else ""
        blocks.append(page.Command(f"Reproduce what got worse{more}", "\n".join(commands[:_COMMANDS])))
    return blocks


def dumps(found: Comparison) -> str:
    """The comparison as JSON."""
    changes = [{"turn": change.turn, "what": change.what, "before": change.before, "after": change.after,
                **{key: change.row[key] for key in _SHOWN if change.row.get(key) is not None}} for change in found.changes]  # fmt: skip
    told = {"rows": found.rows, "timings": found.timings, "failing": found.failing, "changes": changes}
    return json.dumps(plain(told), indent=1, allow_nan=False) + "\n"


def _headline(found: Comparison) -> tuple[str, str]:
    compared = f"{count(found.rows)} and {count(found.timings, 'timing')} in both records"
    if not (found.rows or found.timings) and not found.changes:
        return "VACUOUS", f"nothing was compared: {compared}"
    turns = [change.turn for change in found.changes]
    counts = ", ".join(f"{turns.count(turn)} {turn.lower()}" for turn in Turn if turn in turns) or "nothing changed"
    if not (found.rows or found.timings) and Turn.WORSE not in turns:
        return "VACUOUS", f"nothing was compared: {compared}; {counts}"
    return ("WORSE" if Turn.WORSE in turns else "PASS"), f"{counts}: {compared}"


def _value(value: Any) -> str:
    """A number, a word, or a time with its spread."""
    return f"{number(value[0])} ({number(value[1])}..{number(value[2])})" if isinstance(value, tuple | list) else number(value)


def _times(change: Change) -> str:
    """How many times as much."""
    pair = [value[0] if isinstance(value, tuple | list) else value for value in (change.before, change.after)]
    if not all(isinstance(value, int | float) and value == value for value in pair) or not pair[0]:
        return ""
    return f"x{number(pair[1] / pair[0])}"


def _plain_field(key: str, title: str = "", right: bool = False) -> Column:
    return Column(title or key, lambda row: number(row.get(key)), fixed=True, right=right)


def _from_case(key: str, title: str, right: bool = False) -> Column:
    """A field of the row; of a planned row, of which only the case is known, what the case says."""

    def cell(row: dict[str, Any]) -> str:
        if row.get(key) is not None or "case" not in row:
            return number(row.get(key))
        op, _, settings = str(row["case"]).partition(":")
        known = dict(setting.partition("=")[::2] for setting in settings.split(",")) | {"op": op}
        return one_line(known.get(key.replace("_", "-"), ""))

    return Column(title, cell, fixed=True, right=right)


_COLUMNS = [
    Column("turn", lambda row: str(row["change"].turn), right=False),
    Column("what", lambda row: one_line(row["change"].what), right=False),
    Column("old", lambda row: _value(row["change"].before)),
    Column("new", lambda row: _value(row["change"].after)),
    Column("new/old", lambda row: _times(row["change"])),
    _from_case("op", "op"), _plain_field("impl"), _from_case("model", "model"), _plain_field("reference"),
    _from_case("heads", "heads", True), _from_case("batch", "batch", True), _from_case("drafts", "drafts", True),
    _from_case("tokens", "tokens", True), _from_case("dtype", "dtype"), _from_case("state_dtype", "state"),
    _from_case("regime", "regime"), _from_case("steps", "steps", True), _from_case("seed", "seed", True),
]  # fmt: skip
