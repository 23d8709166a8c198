"""A page as one HTML file that needs nothing else: no script, no font, no picture, nothing from a network.

The document is built as a tree and written by the library, so that what a record says is text wherever it stands.
"""

from pathlib import Path
from xml.etree import ElementTree as ET

from parity import record as records
from parity.record import Record, Row, Verdict
from parity.render import cells, curves, facts, page
from parity.render.cells import legal, one_line

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LOUD = ("PASS", "FAIL", "WORSE", "BETTER", "INCONCLUSIVE", "VACUOUS", "SKIPPED", "STALE", "MISSING", "MIXED", "TIMED")


def render(record: Record) -> str:
    """The record, with the matrix of architectures and dtypes and the drift curves."""
    blocks = page.of(record)
    body = _body(blocks)
    place = 1 + sum(isinstance(block, page.Headline | page.Note) for block in blocks)
    for section in filter(None, (curves.section(facts.compared(record)), _matrix(record))):
        body.insert(place - 1, section)
    return _document(blocks, body)


def lay(blocks: page.Page) -> str:
    """The page as HTML."""
    return _document(blocks, _body(blocks))


def _document(blocks: page.Page, body: ET.Element) -> str:
    root = ET.Element("html", lang="en")
    head = ET.SubElement(root, "head")
    ET.SubElement(head, "meta", charset="utf-8")
    ET.SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    ET.SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    title = next((f"{block.verdict} {block.sentence}" for block in blocks if isinstance(block, page.Headline)), "GLM Workbench")
    ET.SubElement(head, "title").text = legal(title)
    ET.SubElement(head, "style").text = _STYLE
    outer = ET.SubElement(root, "body")
    outer.append(body)
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _body(blocks: page.Page) -> ET.Element:
    main = ET.Element("main")
    for block in blocks:
        main.append(_block(block))
    return main


def _block(block: page.Block) -> ET.Element:
    match block:
        case page.Headline(verdict, sentence):
            header = ET.Element("header")
            line = ET.SubElement(header, "h1")
            _badge(line, verdict)
            ET.SubElement(line, "span").text = legal(sentence)
            return header
        case page.Note(text):
            return _text("p", text, "note")
        case page.Lines(lines):
            told = ET.Element("ul")
            for verdict, text in lines:
                item = ET.SubElement(told, "li")
                if verdict:
                    _badge(item, verdict)
                ET.SubElement(item, "span").text = legal(text)
            return told
        case page.Facts(title, known):
            section = _section(title)
            listed = ET.SubElement(section, "dl")
            for label, text in known:
                listed.append(_text("dt", label))
                listed.append(_text("dd", text))
            return section
        case page.Command(title, text):
            section = _section(title)
            section.append(_text("pre", text))
            return section
        case cells.Table():
            return _table(block)


def _text(tag: str, text: str, kind: str = "") -> ET.Element:
    element = ET.Element(tag, {"class": kind} if kind else {})
    element.text = legal(text)
    return element


def _section(title: str) -> ET.Element:
    section = ET.Element("section")
    section.append(_text("h2", title))
    return section


def _badge(parent: ET.Element, verdict: str) -> None:
    parent.append(_text("b", verdict, f"badge {verdict.lower()}" if verdict in _LOUD else "badge"))


def _table(table: cells.Table) -> ET.Element:
    figure = ET.Element("figure")
    if table.caption:
        figure.append(_text("figcaption", table.caption))
    grid = ET.SubElement(ET.SubElement(figure, "div", {"class": "scroll"}), "table")
    heading = ET.SubElement(ET.SubElement(grid, "thead"), "tr")
    for column in table.columns:
        title = ET.SubElement(heading, "th", {"class": "right"} if column.right else {}, scope="col")
        first, *rest = column.title.split("\n")
        title.text = legal(first)
        for line in rest:
            ET.SubElement(title, "br").tail = legal(line)
    body = ET.SubElement(grid, "tbody")
    for values in table.lines:
        row = ET.SubElement(body, "tr")
        for column, value in zip(table.columns, values, strict=True):
            cell = ET.SubElement(row, "td", {"class": "right"} if column.right else {})
            if value in _LOUD:
                _badge(cell, value)
            else:
                cell.text = legal(value)
    return figure


def _matrix(record: Record) -> ET.Element | None:
    """Architectures down, dtypes across: the verdicts of each cell, counted."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in record["rows"]:
        made = records.environment_of(record, row)
        where = one_line(row["arch"])
        where = where if where == "cpu" else f"{where}, {one_line(made.get('device') or 'unknown device')}"
        state = f" / {one_line(row['state_dtype'])} state" if row.get("state_dtype") else ""
        found.setdefault((where, f"{one_line(row['dtype'])}{state}"), []).append(row)
    if not found:
        return None
    places, dtypes = (list(dict.fromkeys(key[axis] for key in found)) for axis in (0, 1))
    section = _section("Architectures and dtypes")
    grid = ET.SubElement(ET.SubElement(section, "div", {"class": "scroll"}), "table", {"class": "matrix"})
    heading = ET.SubElement(ET.SubElement(grid, "thead"), "tr")
    for title in ("", *dtypes):
        ET.SubElement(heading, "th", scope="col").text = legal(title)
    body = ET.SubElement(grid, "tbody")
    for place in places:
        line = ET.SubElement(body, "tr")
        ET.SubElement(line, "th", scope="row").text = legal(place)
        for dtype in dtypes:
            _verdicts(ET.SubElement(line, "td"), found.get((place, dtype), []))
    return section


def _verdicts(cell: ET.Element, rows: list[Row]) -> None:
    for verdict, count in records.summary(rows).items():
        if count:
            _badge(cell, verdict)
            cell[-1].tail = f" {count} "
    cell.set("class", str(records.worst(rows) if rows else Verdict.SKIPPED).lower())
    if not rows:
        cell.text = "-"
