"""A page as GitHub Markdown, to paste in a README."""

import re

from parity.record import Record
from parity.render import cells, page


def render(record: Record) -> str:
    """The record as Markdown."""
    return lay(page.of(record))


def lay(blocks: page.Page) -> str:
    """The page as Markdown."""
    return "\n\n".join(map(_block, blocks)) + "\n"


def _block(block: page.Block) -> str:
    match block:
        case page.Headline(verdict, sentence):
            return f"**{verdict}** {_escape(sentence)}"
        case page.Note(text):
            return _escape(text)
        case page.Lines(lines):
            return "\n".join(f"- {_escape(f'{verdict} {text}'.strip())}" for verdict, text in lines)
        case page.Facts(title, facts):
            return f"**{title}**\n\n" + "\n".join(f"- {_escape(f'{label}: {text}')}" for label, text in facts)
        case page.Command(title, text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{_escape(title)}:\n\n{fence}\n{text}\n{fence}"
        case cells.Table():
            return _table(block)


def _table(table: cells.Table) -> str:
    lines = [[column.title.replace("/\n", "/").replace("\n", " ") for column in table.columns], *table.lines]
    head, *body = ["| " + " | ".join(map(_escape, line)) + " |" for line in lines]
    rule = "|" + "|".join(" ---: " if column.right else " --- " for column in table.columns) + "|"
    caption = [_escape(table.caption) + "\n"] if table.caption else []
    return "\n".join([*caption, head, rule, *body])


def _escape(text: str) -> str:
    """Text that Markdown shows as it stands, also inside a cell."""
    return re.sub(r"([\\|*_<`\[])", r"\\\1", text)
