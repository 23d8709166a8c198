"""Drift by step as SVG: one plot for each operator, dtypes and regime; one line a row, both axes logarithmic."""

import math
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

from parity.record import Row
from parity.render.cells import dig, drift_of, legal, one_line, share

_WIDTH, _HEIGHT = 380, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 10, 34
_POINTS = 96  # of a line: more can't be seen
_COLORS = 6  # of page.css
_NAMES = {"state_rel_l2": "state", "rel_l2": "output"}
_ABSOLUTE = {"state_rel_l2": "state rel L2", "rel_l2": "output rel L2"}
Point = tuple[float, float]


def section(rows: Sequence[Row]) -> ET.Element | None:
    """The plots of all rows with a curve, with one key of colors; None where no row has one."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if len(_points(row)) > 1:
            key = (one_line(row["op"]), one_line(row["dtype"]), one_line(row["state_dtype"]), one_line(row["regime"]), drift_of(row)[0])
            groups.setdefault(key, []).append(row)
    if not groups:
        return None
    colors = {name: place % _COLORS for place, name in enumerate(dict.fromkeys(one_line(row["impl"]) for row in rows))}
    found = ET.Element("section")
    ET.SubElement(found, "h2").text = "Drift by step"
    legend = ET.SubElement(found, "p", {"class": "legend"})
    for name, color in colors.items():
        ET.SubElement(legend, "span", {"class": f"key c{color}"}).text = legal(name)
    plots = ET.SubElement(found, "div", {"class": "plots"})
    for (op, dtype, state, regime, tensor), group in groups.items():
        figure = ET.SubElement(plots, "figure")
        title = f"{op}: {_NAMES[tensor]} rel L2, {dtype}, {state} state, {regime}"
        ET.SubElement(figure, "figcaption").text = legal(title)
        figure.append(_plot(title, group, tensor, colors))
    return found


def _points(row: Row) -> list[Point]:
    """Step and relative error where both have a logarithm."""
    values = drift_of(row)[1]
    steps = [entry.get("step") for entry in row.get("drift") or []]
    return [(step, value) for step, value in zip(steps, values, strict=True) if _positive(step) and _positive(value)]


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _plot(title: str, rows: Sequence[Row], tensor: str, colors: dict[str, int]) -> ET.Element:
    lines = [_points(row) for row in rows]
    limits = {dig(row, f"absolute.{_ABSOLUTE[tensor]}.limit") for row in rows}
    bounds = sorted(limit for limit in limits if _positive(limit))
    across = _Axis([step for line in lines for step, _ in line], _LEFT, _WIDTH - _RIGHT, whole_decades=False)
    up = _Axis([*(value for line in lines for _, value in line), *bounds], _HEIGHT - _BOTTOM, _TOP)
    svg = ET.Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria-label": legal(title)})
    for value in up.ticks():
        _line(svg, "grid", [(_LEFT, up(value)), (_WIDTH - _RIGHT, up(value))])
        _label(svg, _LEFT - 6, up(value) + 4, f"1e{round(math.log10(value))}", "end")
    for step in across.ticks():
        _line(svg, "grid", [(across(step), _TOP), (across(step), _HEIGHT - _BOTTOM)])
        _label(svg, across(step), _HEIGHT - _BOTTOM + 15, f"{step:g}", "middle")
    _label(svg, _WIDTH - _RIGHT, _HEIGHT - 4, "step", "end")
    for bound in bounds:
        _line(svg, "limit", [(_LEFT, up(bound)), (_WIDTH - _RIGHT, up(bound))])
        _label(svg, _WIDTH - _RIGHT, up(bound) - 4, f"limit {share(bound)}", "end")
    for row, line in zip(rows, lines, strict=True):
        curve = _line(svg, f"curve c{colors[one_line(row['impl'])]}", [(across(step), up(value)) for step, value in _thinned(line)])
        ET.SubElement(curve, "title").text = legal(f"{one_line(row['impl'])} {one_line(row['case'])}: {share(line[-1][1])} at the end")
    return svg


class _Axis:
    """A logarithmic axis from one pixel to another over all values; whole decades unless told otherwise."""

    def __init__(self, values: Sequence[float], start: float, stop: float, whole_decades: bool = True) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        if whole_decades:
            low, high = math.floor(low), math.ceil(high)
        self.low, self.high = low, high if high > low else low + 1
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten; of steps that span less than two decades, of two."""
        base = 10.0 if self.high - self.low >= 2 or self.low < 0 else 2.0
        first, last = math.ceil(self.low / math.log10(base) - 1e-9), math.floor(self.high / math.log10(base) + 1e-9)
        every = max(1, math.ceil((last - first) / 7))
        return [base**power for power in range(first, last + 1, every)]


def _thinned(line: list[Point]) -> list[Point]:
    """At most so many points, the last one among them."""
    every = math.ceil(len(line) / _POINTS)
    return line[:-1:every] + line[-1:]


def _line(svg: ET.Element, kind: str, points: Sequence[Point]) -> ET.Element:
    return ET.SubElement(svg, "polyline", {"class": kind, "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points)})


def _label(svg: ET.Element, x: float, y: float, text: str, anchor: str) -> None:
    ET.SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}).text = text
