"""What paired answers say, as a page and as JSON."""

import json
from dataclasses import asdict
from typing import Any

from parity import limits
from parity.accuracy import ALPHA, Paired
from parity.render import cells, page
from parity.render.cells import Column, number, one_line
from parity.render.facts import count


def of(found: list[Paired], names: tuple[str, str]) -> page.Page:
    """The verdict, a line a task, and what the columns mean."""
    blocks: page.Page = [page.Headline(*_headline(found[0]))]
    if found[0].questions:
        blocks += [
            cells.table(_COLUMNS, [{"paired": paired} for paired in found]),
            page.Lines([("", line) for line in _notes(found, names)]),
        ]
    return blocks


def dumps(found: list[Paired]) -> str:
    """The same as JSON."""
    return json.dumps([asdict(paired) | {"difference": paired.difference} for paired in found], indent=1, allow_nan=False) + "\n"


def _headline(whole: Paired) -> tuple[str, str]:
    if not whole.questions:
        return "VACUOUS", "nothing was compared: no questions"
    split = f"{whole.only_a} against {whole.only_b} discordant of {count(whole.questions, 'question')}, exact McNemar p = {number(whole.p)}"
    if whole.p >= ALPHA:
        return "EVEN", f"no difference shown: {split}"
    return ("WORSE", f"B is worse than A: {split}") if whole.worse else ("BETTER", f"B is better than A: {split}")


def _notes(found: list[Paired], names: tuple[str, str]) -> list[str]:
    lines = [
        f"A is {one_line(names[0])}, B is {one_line(names[1])}. Differences are B's share of right answers minus A's, "
        f"with their {limits.CONFIDENCE:.0%} interval.",
        f"shows: the smallest observed difference that so many discordant answers call significant (p < {ALPHA:.2g}). "
        f"detects: the smallest true one that they find with a power of {limits.POWER:.0%}.",
    ]
    few = [paired.task for paired in found if paired.significant is None]
    if few:
        lines.append(f"none: with so few discordant answers no split is significant ({', '.join(map(one_line, few))}).")
    if len(found) > 1:
        lines.append("The verdict is that of all questions; p of single tasks is not corrected for their number.")
    return lines


def _signed(value: float) -> str:
    """Percentage points."""
    return f"{100 * value:+.2f}%"


def _least(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.2f}%"


def _share(right: int, paired: Paired) -> str:
    return f"{100 * right / paired.questions:.2f}%"


def _column(title: str, cell: Any, right: bool = True) -> Column:
    return Column(title, lambda row: cell(row["paired"]), right=right)


_COLUMNS = [
    _column("task", lambda paired: one_line(paired.task), right=False),
    _column("questions", lambda paired: number(paired.questions)),
    _column("A", lambda paired: _share(paired.both + paired.only_a, paired)),
    _column("B", lambda paired: _share(paired.both + paired.only_b, paired)),
    _column("only A\nright", lambda paired: number(paired.only_a)),
    _column("only B\nright", lambda paired: number(paired.only_b)),
    _column("p", lambda paired: number(paired.p)),
    _column("difference", lambda paired: _signed(paired.difference)),
    _column("interval", lambda paired: f"{_signed(paired.low)}..{_signed(paired.high)}"),
    _column("shows", lambda paired: _least(paired.significant)),
    _column("detects", lambda paired: _least(paired.detectable)),
]
