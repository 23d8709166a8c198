"""A record in a terminal: the verdict, one table, the first divergence, the command that reproduces it."""

from io import StringIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from parity.record import Record
from parity.render import cells, facts

_STYLES = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow", "VACUOUS": "yellow", "SKIPPED": "dim", "STALE": "yellow"}
_UNCUT = 10_000  # columns that no table reaches
_FOLDED = ("impl", "invariants")


def render(record: Record, *, width: int = 110, color: bool = False) -> str:
    """The record for a terminal of this width. A table that can't fold to it is wider: nothing is cut off."""
    console = Console(file=StringIO(), width=_UNCUT, force_terminal=color, color_system="standard" if color else None, markup=False,
                      highlight=False, emoji=False, legacy_windows=False)  # fmt: skip
    verdict, sentence = facts.headline(record)
    _line(console, verdict, f"  {sentence}")
    if rows := facts.compared(record):
        _print(console, cells.parity(rows), width)
        for path in facts.paths(rows):
            _line(console, "", path)
        for line in facts.from_zero(rows):
            _line(console, "", line)
    for line in facts.stale(record):
        _line(console, "STALE", f" {line}")
    for reason_verdict, reason in facts.reasons(record):
        _line(console, reason_verdict, f" {reason}")
    if timed := record.get("bench"):
        _print(console, cells.bench(timed), width)
    if bad := facts.first_bad(record):
        if lines := facts.divergence(bad):
            _line(console, "", "\nFirst divergence")
            for label, text in lines:
                _line(console, "", f"  {label:<11}{text}")
        others = sum(row["verdict"] == bad["verdict"] for row in record["rows"]) - 1
        more = f" (the first of {others + 1} such rows)" if others else ""
        _line(console, "", f"\nReproduce{more}:\n{facts.command(bad)}")
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _line(console: Console, verdict: str, text: str) -> None:
    console.print(Text.assemble((verdict, _STYLES.get(verdict, "")), text), soft_wrap=True)


def _print(console: Console, table: cells.Table, width: int) -> None:
    if table.caption:
        _line(console, "", f"\n{table.caption}")
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column, *values in zip(table.columns, *table.lines, strict=True):
        folds = column.title in _FOLDED
        least = None if folds else max(map(len, [*column.title.split("\n"), *values]))
        grid.add_column(column.title, justify="right" if column.right else "left", no_wrap=not folds, overflow="fold", min_width=least)
    for line in table.lines:
        grid.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    if Measurement.get(console, console.options, grid).minimum > width:
        grid.padding = 0
    console.print("")
    console.print(grid, width=max(width, Measurement.get(console, console.options, grid).minimum))
    console.print("")
