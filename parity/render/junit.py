"""A record as JUnit XML: one suite for each operator, one case for each row."""

import math
from xml.etree import ElementTree as ET

from parity import record as records
from parity.record import Record, Row, Verdict
from parity.render import facts
from parity.render.cells import legal

_OUTCOMES = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render(record: Record) -> str:
    """FAIL is a failure, SKIPPED a skip, all else but PASS an error, and so is a missing row or a record in which nothing was compared."""
    root = ET.Element("testsuites", name="workbench")
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        suite = _suite(root, op, record)
        for row in record["rows"]:
            if row["op"] == op:
                _case(suite, row)
    if lost := records.missing(record):
        suite = _suite(root, "missing", record)
        for plan in lost:
            case = ET.SubElement(suite, "testcase", name=legal(plan["case"]), classname=legal(f"missing.{plan['impl']}"))
            ET.SubElement(case, "error", message="planned and never run", type="MISSING")
    elif records.worst(record["rows"]) == Verdict.VACUOUS and not facts.first_bad(record):
        case = ET.SubElement(_suite(root, "workbench", record), "testcase", name="nothing ran", classname="workbench")
        ET.SubElement(case, "error", message=facts.headline(record)[1])
    for element in [*root, root]:
        element.set("tests", str(len(list(element.iter("testcase")))))
        for count, tag in _OUTCOMES.items():
            element.set(count, str(len(list(element.iter(tag)))))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _suite(root: ET.Element, name: str, record: Record) -> ET.Element:
    suite = ET.SubElement(root, "testsuite", name=legal(name))
    properties = ET.SubElement(suite, "properties")
    for key, value in record["environment"].items():
        if value is not None:
            ET.SubElement(properties, "property", name=legal(key), value=legal(value))
    return suite


def _case(suite: ET.Element, row: Row) -> None:
    case = ET.SubElement(suite, "testcase", name=legal(row["case"]), classname=legal(f"{row['op']}.{row['impl']}"))
    seconds = row.get("seconds")
    if seconds is not None and math.isfinite(seconds):
        case.set("time", f"{seconds:.3f}")
    if row["verdict"] == Verdict.PASS:
        return
    tag = {Verdict.FAIL: "failure", Verdict.SKIPPED: "skipped"}.get(row["verdict"], "error")
    outcome = ET.SubElement(case, tag, message=legal(row["reason"]), type=legal(row["verdict"]))
    if tag != "skipped":
        outcome.text = legal("\n".join([*(f"{label}: {text}" for label, text in facts.divergence(row)), facts.command(row)]))
