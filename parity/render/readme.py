"""The README's measured tables, rendered from committed records between markers; a test holds them to it.

<!-- speed: results/h200/kda_decode_bench.json -->
<!-- end -->
"""

import re
from pathlib import Path

from parity import record as records
from parity.record import Record, Row
from parity.render import cells, facts

_BLOCK = re.compile(r"(<!-- speed: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_OURS, _BASELINE = "triton", "fla kernels"
_CONTENDERS = {_OURS: "ours", _BASELINE: "FLA kernels", "fla": "FLA with our pools", "torch": "torch eager"}


def render(text: str, root: Path) -> str:
    """The text with every block made anew from its record."""
    return _BLOCK.sub(lambda match: match[1] + speed(records.load(root / match[2])) + match[4], text)


def speed(record: Record) -> str:
    """One line a shape: ours, the peers and the floor in microseconds, and what they are to each other."""
    cases: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in record["bench"]:
        if row["op"] != "device" and row["us"] is not None:
            key = (row["op"], row["heads"], row["batch"], row["dtype"], row["state_dtype"])
            cases.setdefault(key, {})[row["impl"]] = row
    present = [name for name in _CONTENDERS if any(name in rows for rows in cases.values())]
    head = [
        "operator",
        "heads",
        "batch",
        "state",
        *(f"{_CONTENDERS[name]}, us" for name in present),
        "floor, us",
        "ours / floor",
        "FLA kernels / ours",
    ]
    lines = [_line(case, rows, present) for case, rows in cases.items() if _OURS in rows]
    table = ["| " + " | ".join(line) + " |" for line in (head, ["---", *["---:"] * (len(head) - 1)], *lines)]
    note = f"{facts.environment(record)}. Floor: an in-place read-modify-write of the same bytes. {_device(record)}"
    return "\n".join([*table, "", note, ""])


def _line(case: tuple[object, ...], rows: dict[str, Row], present: list[str]) -> list[str]:
    op, heads, batch, _, state = case
    ours = rows[_OURS]
    times = [cells.number(rows[name]["us"]) if name in rows else "" for name in present]
    against = f"{rows[_BASELINE]['us'] / ours['us']:.2f}" if _BASELINE in rows else ""
    return [str(op), str(heads), str(batch), str(state), *times, cells.number(ours["ceiling_us"]), f"{ours['ratio']:.2f}", against]


def _device(record: Record) -> str:
    """The ceilings of the device in the same run."""
    told = []
    for row in record["bench"]:
        if row["op"] == "device" and row["us"] and row["impl"] != "copy":  # the floor is the ceiling that counts here
            rate = f"{row['flops'] / row['us'] / 1e6:.0f} TFLOP/s" if row["flops"] else f"{row['bytes'] / row['us'] / 1e6:.2f} TB/s"
            told.append(f"{row['impl'].replace('_', '-')} {rate}")
    return f"In the same run: {', '.join(told)}." if told else ""


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    (root / "README.md").write_text(render((root / "README.md").read_text(encoding="utf-8"), root), encoding="utf-8")
