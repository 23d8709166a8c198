"""What a table's cell, caption or line says, for every format: the renderers only lay it out."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parity.record import Row

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f]")
_LEVELS = "▁▂▃▄▅▆▇█"
_SPARKS = 8  # characters of a sparkline


@dataclass(frozen=True)
class Column:
    """One fact of a row; a fixed one goes to the caption when all rows agree on it."""

    title: str
    cell: Callable[[Row], str]
    fixed: bool = False
    right: bool = True


@dataclass(frozen=True)
class Table:
    """Columns that differ between rows, and in the caption those that don't."""

    caption: str
    columns: list[Column]
    lines: list[list[str]]


def legal(text: object) -> str:
    """The text without control characters, which no terminal should obey and XML can't hold."""
    return _ILLEGAL.sub("", str(text))


def one_line(text: object) -> str:
    """The same, on one line."""
    return " ".join(legal(text).split())


def number(value: Any, digits: int = 3) -> str:
    """Significant digits without padding; NaN and inf by name; nothing for None."""
    if value is None:
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return one_line(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if isinstance(value, int):
        return str(value)
    text = f"{value:.{digits}g}"
    if "e" in text and 1 <= abs(float(text)) < 1e6:
        return f"{float(text):.0f}"
    return _exponent(text)


def share(value: Any) -> str:
    """A relative error: percent from 0.01 % to 100 %, else scientific."""
    if value is None or not math.isfinite(value) or value == 0:
        return number(value)
    return f"{100 * value:.3g}%" if 1e-4 <= abs(value) <= 1 else _exponent(f"{value:.2e}")


def _exponent(text: str) -> str:
    return re.sub(r"e\+?(-?)0*(?=\d)", r"e\1", text)


def dig(row: Any, path: str) -> Any:
    """row["a"]["b"] for "a.b", None where anything on the way is missing."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def parity(rows: list[Row]) -> Table:
    """The parity table. Seeds derive from the case: they get a column only where nothing else tells two rows apart."""
    others = [column for column in _IDENTITY if column.title != "seed"]
    distinct = len({tuple(column.cell(row) for column in others) for row in rows}) == len(rows)
    identity = others if distinct and len({row.get("seed") for row in rows}) > 1 else _IDENTITY
    return table([*identity, *_MEASURED], rows)


def bench(rows: list[Row]) -> Table:
    """The speed table: rows of one case adjacent, the fastest of several marked."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(key) for key in _BENCH_CASE), []).append(row)
    marked = []
    for group in cases.values():
        timed = [row for row in group if row["us"] is not None and math.isfinite(row["us"])]
        fastest = min(timed, key=lambda row: row["us"]) if len(timed) > 1 else None
        marked += [{**row, "fastest": row is fastest} for row in group]
    timings = table(_BENCH, marked)
    note = "* fastest of its case" if any(row["fastest"] for row in marked) else ""
    return Table("; ".join(filter(None, (timings.caption, note))), timings.columns, timings.lines)


def table(columns: list[Column], rows: list[Row]) -> Table:
    kept, caption = [], []
    for column in columns:
        values = {column.cell(row) for row in rows}
        if column.fixed and len(values) == 1 and values != {""}:
            caption.append(f"{column.title} {values.pop()}")
        elif values != {""}:
            kept.append(column)
    return Table("All rows: " + ", ".join(caption) if caption else "", kept, [[column.cell(row) or "-" for column in kept] for row in rows])


def over(ratio: Any, limit: Any) -> bool:
    """Whether a ratio breaks its limit; NaN does."""
    return ratio is not None and limit is not None and not ratio <= limit


def _noise(tensor: str) -> Callable[[Row], str]:
    """ratio/limit of the whole tensor, or of the worst head when only that one breaks its limit."""

    def cell(row: Row) -> str:
        values = row.get(tensor) or {}
        whole = values.get("noise_ratio"), values.get("limit")
        head = values.get("noise_ratio_head"), values.get("limit_head")
        by_head = over(*head) and not over(*whole)
        ratio, limit = (number(value) for value in (head if by_head else whole))
        return (f"{ratio}/{limit}" if limit else ratio) + (" head" if by_head else "")

    return cell


def _one_minus_cosine(row: Row) -> str:
    cosine = dig(row, "output.cosine")
    return "" if cosine is None else number(1 - cosine)


def _last_drift(row: Row) -> str:
    drift = row.get("drift")
    return share(drift[-1].get("state_rel_l2")) if drift else ""


def sparkline(values: Sequence[Any]) -> str:
    """A curve in one word, from zero to its own largest value; `!` where a value is not finite; nothing for less than two values."""
    if len(values) < 2:
        return ""
    width = min(len(values), _SPARKS)
    shown = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    finite = [value for value in shown if isinstance(value, int | float) and math.isfinite(value)]
    top = max((abs(value) for value in finite), default=0) or 1
    return "".join(_LEVELS[round(abs(value) / top * (len(_LEVELS) - 1))] if value in finite else "!" for value in shown)


def drift_of(row: Row) -> tuple[str, list[Any]]:
    """What drifts in a row, and its values by step: the state; the output where there is no state."""
    drift = row.get("drift") or []
    key = "state_rel_l2" if any(entry.get("state_rel_l2") is not None for entry in drift) else "rel_l2"
    return key, [entry.get(key) for entry in drift]


def _absolute(row: Row) -> str:
    """The worst drift in shares of its absolute limit, where there is one."""
    return share(max((entry["over"] for entry in (row.get("absolute") or {}).values()), default=None))


def _invariants(row: Row) -> str:
    invariants = row.get("invariants") or {}
    return one_line(", ".join(name for name, held in invariants.items() if not held)) or ("ok" if invariants else "")


def _us(row: Row) -> str:
    spread = f" ({number(row['us_min'])}..{number(row['us_max'])})" if row.get("us_min") is not None else ""
    return number(row["us"]) + spread + (" *" if row["fastest"] else "")


def _rate(key: str, row: Row) -> str:
    """Tera per second: a count over microseconds."""
    return number(row[key] / row["us"] / 1e6) if row.get(key) and row["us"] else ""


def _field(key: str, title: str = "", right: bool = True) -> Column:
    return Column(title or key, lambda row: number(row.get(key)), fixed=True, right=right)


_SHAPE = [_field("heads"), _field("batch")]
_DTYPES = [_field("dtype", right=False), _field("state_dtype", "state", right=False)]
_TOKENS = Column("tokens", lambda row: "" if row.get("tokens") == row.get("batch") else number(row.get("tokens")), fixed=True)
_IMPL = Column("impl", lambda row: one_line(row["impl"]), right=False)
_DEVICE = _field("device", right=False)
_LEADING = [_field("op", right=False), _IMPL, _field("model", right=False)]
_IDENTITY = [
    *_LEADING, _field("reference", right=False), _DEVICE, _field("arch", right=False), *_SHAPE, _TOKENS, *_DTYPES,
    _field("regime", right=False), _field("steps"), _field("seed"),
]  # fmt: skip
_MEASURED = [
    Column("output\nnoise/\nlimit", _noise("output")),
    Column("output\nrel L2", lambda row: share(dig(row, "output.rel_l2"))),
    Column("output\n1-cos", _one_minus_cosine),
    Column("state\nnoise/\nlimit", _noise("state")),
    Column("state\ndrift", _last_drift),
    Column("drift\nby step", lambda row: sparkline(drift_of(row)[1]), right=False),
    Column("growth", lambda row: number(row.get("growth_slope"))),
    Column("of drift\nlimits", _absolute),
    Column("invariants", _invariants, fixed=True, right=False),
    Column("verdict", lambda row: str(row["verdict"]), right=False),
]
_BENCH_CASE = ("device", "op", "model", "heads", "batch", "tokens", "dtype", "state_dtype")
_BENCH = [
    *_LEADING, _DEVICE, *_SHAPE, _TOKENS, *_DTYPES,
    Column("us (min..max)", _us),
    _field("ceiling", right=False),
    Column("ceiling us", lambda row: number(row.get("ceiling_us"))),
    Column("ratio", lambda row: number(row.get("ratio"))),
    Column("TB/s", lambda row: _rate("bytes", row)),
    Column("TFLOP/s", lambda row: _rate("flops", row) if row.get("ceiling") == "matmul" else ""),
    Column("launches", lambda row: number(row.get("launches"))),
]  # fmt: skip
