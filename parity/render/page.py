"""What a report says and in which order, for every format: a page is a list of blocks that text, markdown and HTML lay out."""

from dataclasses import dataclass

from parity.record import Record
from parity.render import cells, facts


@dataclass(frozen=True)
class Headline:
    """A verdict and its sentence."""

    verdict: str
    sentence: str


@dataclass(frozen=True)
class Note:
    """What a terminal's reader knows already."""

    text: str


@dataclass(frozen=True)
class Lines:
    """One sentence a line, after its verdict where it has one."""

    lines: list[tuple[str, str]]


@dataclass(frozen=True)
class Facts:
    """Labels with what is known of each."""

    title: str
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class Command:
    """What to type, and what it does."""

    title: str
    text: str


Block = Headline | Note | Lines | Facts | Command | cells.Table
Page = list[Block]


def of(record: Record) -> Page:
    """Verdict, where it was made, parity table, what ran, what is missing or stale, reasons, speed table, first divergence, command."""
    page: Page = [Headline(*facts.headline(record)), Note(f"Made on {facts.environment(record)}.")]
    if rows := facts.compared(record):
        page += [cells.parity(rows), Lines([("", line) for line in [*facts.paths(rows), *facts.from_zero(rows)]])]
    for verdict, told in (("MISSING", facts.missing(record)), ("MIXED", facts.mixed(record)), ("STALE", facts.stale(record))):
        page += [Lines([(verdict, line) for line in told])] if told else []
    if reasons := facts.reasons(record):
        page.append(Lines([(str(verdict), reason) for verdict, reason in reasons]))
    if timed := record.get("bench"):
        page.append(cells.bench(facts.located(record, timed)))
    if bad := facts.first_bad(record):
        if found := facts.divergence(bad):
            page.append(Facts("First divergence", found))
        others = sum(row["verdict"] == bad["verdict"] for row in record["rows"]) - 1
        more = f" (the first of {others + 1} such rows)" if others else ""
        page.append(Command(f"Reproduce{more}", facts.command(bad)))
    return page
