"""Tables of what is not a record: dispatch and doctor."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from optimized.dispatch import Choice
from optimized.gemm_tiles import MixerPlan
from optimized.prefill_tiles import PrefillTile
from optimized.tiles import Tile
from parity.doctor import Finding


def dispatch(title: str, choices: Mapping[str, Choice]) -> Table:
    """Architecture, implementation, tile, reason, and what was passed over."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("arch", "runs", "tile", "why", "passed over"):
        table.add_column(column)
    for name, choice in choices.items():
        tile = str(choice.tile or "") if isinstance(choice.tile, MixerPlan) else _tile(choice.tile)
        passed = "; ".join(f"{impl}: {reason}" for impl, reason in choice.rejected)
        table.add_row(name, choice.impl, tile, choice.reason, passed)
    return table


def _tile(tile: Tile | PrefillTile | None) -> str:
    return f"{tile.rows} rows, {tile.warps} warps, {tile.stages} stages" if tile else ""


def doctor(findings: list[Finding]) -> Table:
    """One finding a line."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        mark = {True: "ok", False: "WRONG", None: "-"}[finding.ok]
        table.add_row(mark, finding.name, Text(finding.found))
    return table
