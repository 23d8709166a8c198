"""Renderings of a record: every table, file and README number comes from here."""

from collections.abc import Callable

from parity import record
from parity.record import Record
from parity.render import junit, markdown, text

_RENDERERS: dict[str, Callable[[Record], str]] = {
    "text": text.render,
    "json": record.dumps,
    "junit": junit.render,
    "markdown": markdown.render,
}
FORMATS = tuple(_RENDERERS)


def render(record: Record, format: str) -> str:
    """The record in a format of FORMATS; ValueError for any other."""
    if format not in _RENDERERS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}; choose one of these")
    return _RENDERERS[format](record)
