"""The HTML report: one file that asks for nothing, in which whatever a record says is text."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from parity import merge, record, render
from tests.parity.test_merge import part
from tests.parity.test_render import failed, of, row, timed

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br", "link", "img", "input", "hr", "base", "source"}
HOSTILE = "</style></title><script>alert('1')</script><img src=x onerror=\"alert(2)\">&lt;b&amp;`${x}`]]>--><!--"


class Document(HTMLParser):
    """Elements with their attributes and text; fails on a tag that closes another one or is left open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.comments: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def said(self) -> str:
        return "\n".join(data for tag, data in self.texts if tag != "style")


def rendered(*rows: record.Row, **changed: Any) -> Document:
    return Document(render.render(of(*rows) | changed, "html"))


def drifting(**changed: Any) -> record.Row:
    drift = [{"step": step, "state_rel_l2": 1e-7 * step**0.5, "rel_l2": 2e-3} for step in range(1, 65)]
    return row(**{"drift": drift} | changed)


def test_the_file_asks_for_nothing_from_anywhere() -> None:
    text = render.render(record.load(ROOT / "results/h200/kda_decode_sweep.json"), "html")
    document = Document(text)
    assert text.startswith("<!DOCTYPE html>\n<html") and not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in document.elements}
    assert not {"src", "href", "srcset", "style", "data"} & {name for _, attributes in document.elements for name in attributes}
    assert not [name for _, attributes in document.elements for name in attributes if name.startswith("on")]
    (policy,) = (meta["content"] for meta in document.tags("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")


def test_hostile_strings_are_text_wherever_they_stand() -> None:
    bad = failed(impl=HOSTILE, reason=HOSTILE, case=f"kda.decode:{HOSTILE}", regime=HOSTILE, dtype=HOSTILE, model=HOSTILE, op=HOSTILE)
    bad["first_divergence"] |= {"point": HOSTILE, "cause": HOSTILE, "tensor": "state"}
    bad["path"] = {"kernels": [{"name": HOSTILE, "launches": 1}], "proved": True}
    other = drifting(impl=HOSTILE + "2", arch=HOSTILE, state_dtype=HOSTILE, invariants={HOSTILE: False})
    bench = timed(HOSTILE, 1.0) | {"ceiling": HOSTILE}
    planned = [{"case": HOSTILE, "impl": HOSTILE, "reference": HOSTILE}]
    made = of(bad, other, row("SKIPPED", HOSTILE), bench=(bench,)) | {"planned": planned}
    made["environment"] |= {"device": HOSTILE, "driver": HOSTILE, "commit": HOSTILE}
    document = Document(render.render(made, "html"))
    assert not {"script", "img"} & {tag for tag, _ in document.elements} and document.comments == []
    assert document.said().count(HOSTILE) > 20
    assert len(document.tags("style")) == 1
    for control in ("\x00", "\x1b[2J", "\x85", "\ud800"):
        assert control not in render.render(of(failed(reason=f"a{control}b", impl=f"c{control}d")), "html")


def test_every_line_of_a_table_has_the_cells_of_its_head() -> None:
    text = render.render(of(row(), failed(heads=3), bench=(timed("triton", 1.0), timed("fla", 2.0))), "html")
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    assert len(tables) == 3  # matrix, parity, speed
    for table in tables:
        lines = [re.findall(r"<t[hd][ >]", line) for line in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)]
        assert len(lines) > 1 and len({len(line) for line in lines}) == 1


def test_the_report_says_what_the_text_says() -> None:
    made = of(row(), failed(heads=3), row("SKIPPED", "no fla", impl="fla"))
    said = Document(render.render(made, "html")).said()
    words = [word for line in render.render(made, "text").splitlines() for word in re.findall(r"[\w.%/:-]+", line) if len(word) > 1]
    assert len(words) > 80 and [word for word in words if word.rstrip(":") not in said] == []
    for told in (
        "kda.decode: 1 FAIL, 1 PASS, 1 SKIPPED on cpu",
        "First divergence",
        "workbench sweep kda.decode:heads=2,seed=7 --impl triton",
    ):
        assert told in said


def test_the_matrix_counts_verdicts_by_architecture_and_dtype() -> None:
    h200 = part(row(arch="sm90"), row("FAIL", arch="sm90", heads=3), row(arch="sm90", heads=4, dtype="fp16"))
    b200 = part(row(arch="sm100"), device="B200", arch="sm100")
    text = render.render(merge.merge([h200, b200], []), "html")
    (matrix,) = re.findall(r'<table class="matrix">.*?</table>', text, re.DOTALL)
    plain = [re.sub(r"<[^>]+>", "|", line) for line in matrix.split("<tr>")[1:]]
    told = [[cell.strip() for cell in line.split("|") if cell.strip()] for line in plain]
    assert told == [
        ["bf16 / fp32 state", "fp16 / fp32 state"],
        ["sm90, H200", "PASS", "1", "FAIL", "1", "PASS", "1"],
        ["sm100, B200", "PASS", "1", "-"],
    ]
    assert re.findall(r'<td class="(\w+)">', matrix) == ["fail", "pass", "pass", "skipped"]


def test_curves_lie_inside_their_plot_and_say_whose_they_are() -> None:
    absolute = {"state rel L2": {"worst": 8e-7, "limit": 2.4e-3, "over": 1e-3}}
    document = rendered(drifting(absolute=absolute), drifting(impl="fla"), drifting(regime="slow"))
    assert len(document.tags("svg")) == 2 and document.said().count("limit 0.24%") == 1
    curves = [line for line in document.tags("polyline") if "curve" in str(line["class"])]
    assert [line["class"] for line in curves] == ["curve c0", "curve c1", "curve c0"]
    for line in curves:
        points = [tuple(map(float, point.split(","))) for point in str(line["points"]).split()]
        assert len(points) == 64 and all(58 <= x <= 370 and 10 <= y <= 196 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points) and points[0][1] > points[-1][1]  # drift grows: up
    assert "triton kda.decode:heads=2,seed=7: 8.00e-7 at the end" in document.said()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), None])
def test_a_curve_of_values_without_a_logarithm_is_left_out(value: Any) -> None:
    drift = [{"step": step, "state_rel_l2": value} for step in range(1, 9)]
    assert rendered(row(drift=drift)).tags("svg") == []
    assert len(rendered(row(drift=drift), drifting()).tags("svg")) == 1


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    drift = [{"step": step, "state_rel_l2": step * 1e-7} for step in range(1, 4097)]
    (line,) = (line for line in rendered(row(drift=drift)).tags("polyline") if "curve" in str(line["class"]))
    points = str(line["points"]).split()
    assert len(points) <= 97 and points[0].startswith("58.0,") and points[-1].startswith("370.0,")


def test_missing_rows_and_an_empty_record_are_shown() -> None:
    planned = [{"case": "kda.decode:heads=9", "impl": "triton", "reference": "fp32"}]
    said = rendered(row(), planned=planned).said()
    assert "INCONCLUSIVE" in said and "1 of 1 planned rows missing" in said and "triton kda.decode:heads=9" in said
    assert "nothing ran: the record has no rows" in rendered().said()
