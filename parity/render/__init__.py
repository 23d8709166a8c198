"""Renderings: every table, file and README number comes from here."""

from collections.abc import Callable
from typing import Any

from parity import record
from parity.record import Record
from parity.render import html, junit, markdown, page, text

_RENDERERS: dict[str, Callable[[Record], str]] = {
    "text": text.render,
    "json": record.dumps,
    "junit": junit.render,
    "markdown": markdown.render,
    "html": html.render,
}
_LAYOUTS: dict[str, Callable[[page.Page], str]] = {"text": text.lay, "markdown": markdown.lay, "html": html.lay}
FORMATS, LAYOUTS = tuple(_RENDERERS), tuple(_LAYOUTS)
SUFFIXES = {".json": "json", ".xml": "junit", ".md": "markdown", ".html": "html"}


def render(record: Record, format: str) -> str:
    """The record in a format of FORMATS; ValueError for any other."""
    return _of(_RENDERERS, format)(record)


def lay(blocks: page.Page, format: str) -> str:
    """A page that is no record's, in a format of LAYOUTS; ValueError for any other."""
    return _of(_LAYOUTS, format)(blocks)


def _of(known: dict[str, Callable[[Any], str]], format: str) -> Callable[[Any], str]:
    if format not in known:
        raise ValueError(f"format: expected one of {', '.join(known)}, got {format!r}; choose one of these")
    return known[format]
