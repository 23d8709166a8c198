"""A record as GitHub Markdown, to paste in a README."""

import re
from collections.abc import Iterable

from parity.record import Record
from parity.render import cells, facts


def render(record: Record) -> str:
    """Verdict, where it was made, parity table, reasons, first divergence, speed table."""
    verdict, sentence = facts.headline(record)
    blocks = [f"**{verdict}** {_escape(sentence)}", f"Made on {_escape(facts.environment(record))}."]
    if rows := facts.compared(record):
        blocks += [_table(cells.parity(rows)), _list(facts.paths(rows))]
    if stale := facts.stale(record):
        blocks.append(_list(f"STALE {line}" for line in stale))
    if reasons := facts.reasons(record):
        blocks.append(_list(f"{verdict} {reason}" for verdict, reason in reasons))
    if bad := facts.first_bad(record):
        if lines := facts.divergence(bad):
            blocks.append("**First divergence**\n\n" + _list(f"{label}: {text}" for label, text in lines))
        blocks.append(f"```\n{facts.command(bad)}\n```")
    if timed := record.get("bench"):
        blocks.append(_table(cells.bench(timed)))
    return "\n\n".join(blocks) + "\n"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_escape(line)}" for line in lines)


def _table(table: cells.Table) -> str:
    lines = [[column.title.replace("/\n", "/").replace("\n", " ") for column in table.columns], *table.lines]
    head, *body = ["| " + " | ".join(map(_escape, line)) + " |" for line in lines]
    rule = "|" + "|".join(" ---: " if column.right else " --- " for column in table.columns) + "|"
    caption = [_escape(table.caption) + "\n"] if table.caption else []
    return "\n".join([*caption, head, rule, *body])


def _escape(text: str) -> str:
    """Text that Markdown shows as it stands, also inside a cell."""
    return re.sub(r"([\\|*_<`\[])", r"\\\1", text)
