"""A page in a terminal: the verdict, one table, the first divergence, the command that reproduces it."""

from io import StringIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from parity.record import Record
from parity.render import cells, page

_STYLES = {
    "PASS": "green", "FAIL": "bold red", "WORSE": "bold red", "INCONCLUSIVE": "yellow", "VACUOUS": "yellow", "SKIPPED": "dim",
    "STALE": "yellow", "MISSING": "yellow", "MIXED": "yellow",
}  # fmt: skip
_UNCUT = 10_000  # columns that no table reaches
_FOLDED = ("impl", "invariants")


def render(record: Record, *, width: int = 110, color: bool = False) -> str:
    """The record for a terminal of this width. A table that can't fold to it is wider: nothing is cut off."""
    return lay(page.of(record), width=width, color=color)


def lay(blocks: page.Page, *, width: int = 110, color: bool = False) -> str:
    """The page for a terminal of this width."""
    console = Console(file=StringIO(), width=_UNCUT, force_terminal=color, color_system="standard" if color else None, markup=False,
                      highlight=False, emoji=False, legacy_windows=False)  # fmt: skip
    for block in blocks:
        match block:
            case page.Headline(verdict, sentence):
                _line(console, verdict, f"  {sentence}")
            case page.Lines(lines):
                for verdict, text in lines:
                    _line(console, verdict, f" {text}" if verdict else text)
            case page.Facts(title, facts):
                _line(console, "", f"\n{title}")
                for label, text in facts:
                    _line(console, "", f"  {label:<11}{text}")
            case page.Command(title, text):
                _line(console, "", f"\n{title}:\n{text}")
            case cells.Table():
                _print(console, block, width)
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
