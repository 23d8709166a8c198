"""The README's measured tables, rendered from committed records between markers; a test holds them to it.

<!-- speed: results/h200/kda_decode_bench.json -->
<!-- end -->
<!-- parity: results/h200/kda_decode_sweep.json -->
<!-- end -->
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from parity import record as records
from parity.record import Record, Row
from parity.render import cells, facts

_BLOCK = re.compile(r"(<!-- (speed|parity): (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_OURS, _BASELINE = "triton", "fla kernels"
_CONTENDERS = {
    _OURS: "ours", "triton, no replay": "ours, nothing to replay", "decode cell": "our decode cell", _BASELINE: "FLA kernels",
    "fla": "FLA with our pools", "flash_kda kernels": "FlashKDA kernels", "flash_kda": "FlashKDA with our pools", "torch": "torch eager",
}  # fmt: skip
_RATIOS = {_BASELINE: "FLA kernels / ours", "flash_kda kernels": "FlashKDA kernels / ours"}
_FLOORS = {
    "read_modify_write": "an in-place read-modify-write of the same bytes",
    "copy": "a copy of the same bytes",
    "matmul": "a matrix product of as many operations",
}


Case = tuple[object, ...]
Rows = dict[str, Row]
Cell = Callable[[Case, Rows], str]


def render(text: str, root: Path) -> str:
    """The text with every block made anew from its record."""
    blocks = {"speed": speed, "parity": parity}
    return _BLOCK.sub(lambda match: match[1] + blocks[match[2]](records.load(root / match[3])) + match[5], text)


def parity(record: Record) -> str:
    """One line an implementation and state: its verdicts, and how near the worst of its rows came to a limit."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record["rows"]:
        groups.setdefault((row["impl"], row["state_dtype"]), []).append(row)
    lines = []
    for (impl, state), rows in groups.items():
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in records.summary(rows).items() if count)
        lines.append([impl, state, verdicts, *(_nearest(rows, tensor) for tensor in ("output", "state"))])
    sizes = (f"{name} {_values(record['rows'], key)}" for name, key in (("heads", "heads"), ("batch", "batch"), ("activations", "dtype"),
             ("regimes", "regime"), ("steps", "steps")))  # fmt: skip
    operators = ", ".join(dict.fromkeys(row["op"] for row in record["rows"]))
    note = f"`{operators}`: {'; '.join(sizes)}. {facts.environment(record)}."
    head = ["impl", "state", "verdicts", "output: worst of its limit", "state: worst of its limit"]
    return "\n".join([*_table(head, lines, 3), "", note, ""])


def _nearest(rows: Sequence[Row], tensor: str) -> str:
    """The worst step of all rows as a share of its limit, of the tensor's or of a head's."""
    found = [row[tensor]["worst_step_over"] for row in rows if row[tensor]]
    return cells.share(max(found)) if found else ""


def _values(rows: Sequence[Row], key: str) -> str:
    found = {row[key] for row in rows}
    return ", ".join(str(value) for value in sorted(found))


def speed(record: Record) -> str:
    """One line a shape: ours, the peers and the floor in microseconds, and what they are to each other."""
    cases: dict[Case, Rows] = {}
    for row in record["bench"]:
        if row["op"] != "device" and row["us"] is not None:
            key = (row["op"], row["heads"], row["batch"], row.get("tokens"), row["dtype"], row["state_dtype"])
            cases.setdefault(key, {})[row["impl"]] = row
    found = [(case, rows) for case, rows in cases.items() if _OURS in rows]
    columns = _columns(found)
    head = [title for title, _ in columns]
    lines = [[cell(case, rows) for _, cell in columns] for case, rows in found]
    table = _table(head, lines, 1)
    floors = dict.fromkeys(rows[_OURS]["ceiling"] for _, rows in found)
    note = f"{facts.environment(record)}. Floor: {' or '.join(_FLOORS[name] for name in floors)}. {_device(record, {*floors, 'matmul'})}"
    return "\n".join([*table, "", note, ""])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """A Markdown table whose first columns are aligned left."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * left + ["---:"] * (len(head) - left), *lines)]


def _columns(found: Sequence[tuple[Case, Rows]]) -> list[tuple[str, Cell]]:
    """Title and cell of each column that some shape fills."""
    columns: list[tuple[str, Cell]] = [("operator", _shape(0)), ("heads", _shape(1)), ("batch", _shape(2))]
    if any(case[3] not in (None, case[2]) for case, _ in found):
        columns.append(("tokens", _shape(3)))
    columns.append(("state", _shape(5)))
    present = {name for _, rows in found for name in rows}
    columns += [(f"{title}, us", _time(name)) for name, title in _CONTENDERS.items() if name in present]
    columns += [
        ("floor, us", lambda case, rows: cells.number(rows[_OURS]["ceiling_us"])),
        ("ours / floor", lambda case, rows: f"{rows[_OURS]['ratio']:.2f}"),
    ]
    columns += [(title, _times(name, _OURS)) for name, title in _RATIOS.items() if name in present]
    if _BASELINE not in present and "fla" in present:
        columns.append(("FLA / ours", _times("fla", _OURS)))
    return columns + ([("ours / our decode cell", _times(_OURS, "decode cell"))] if "decode cell" in present else [])


def _shape(place: int) -> Cell:
    return lambda case, rows: str(case[place])


def _time(name: str) -> Cell:
    return lambda case, rows: cells.number(rows[name]["us"]) if name in rows else ""


def _times(name: str, other: str) -> Cell:
    return lambda case, rows: f"{rows[name]['us'] / rows[other]['us']:.2f}" if name in rows and other in rows else ""


def _device(record: Record, shown: set[str]) -> str:
    """The ceilings of the device in the same run."""
    told = []
    for row in record["bench"]:
        if row["op"] == "device" and row["us"] and row["impl"].partition(" ")[0] in shown:
            rate = f"{row['flops'] / row['us'] / 1e6:.0f} TFLOP/s" if row["flops"] else f"{row['bytes'] / row['us'] / 1e6:.2f} TB/s"
            told.append(f"{row['impl'].replace('_', '-')} {rate}")
    return f"In the same run: {', '.join(told)}." if told else ""


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    (root / "README.md").write_text(render((root / "README.md").read_text(encoding="utf-8"), root), encoding="utf-8")
