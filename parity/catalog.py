"""What can be asked for: operators with signatures, points and implementations; presets; regimes."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from optimized import registry
from parity.problem import DTYPES, STATE_DTYPES
from parity.regimes import REGIMES
from reference import kda, kda_mixer, kda_offsets, kda_verify
from reference.points import BOUNDARY, KDA, KDA_CELL, KDA_MIXER
from reference.presets import PRESETS

REFERENCES: dict[str, Callable[..., Any]] = {
    "kda.decode": kda.decode, "kda.prefill": kda.prefill, "kda.verify": kda_verify.verify, "kda.commit": kda_verify.commit,
    "kda.verify_offsets": kda_offsets.offsets, "kda.mixer": kda_mixer.mixer,
}  # fmt: skip
POINTS: dict[str, tuple[str, ...]] = {
    "kda.decode": KDA_CELL, "kda.prefill": KDA, "kda.verify": KDA_CELL, "kda.commit": KDA_CELL[: KDA_CELL.index("core")],
    "kda.verify_offsets": (), "kda.mixer": KDA_MIXER,
}  # fmt: skip


def signature(op: str) -> inspect.Signature:
    """The public signature of an operator: the reference's, without its points."""
    full = inspect.signature(inspect.unwrap(REFERENCES[op]))
    return full.replace(parameters=[p for name, p in full.parameters.items() if name != "at"])


def listing(signatures: bool) -> str:
    """Operators and implementations, and with `signatures` what an implementation of one's own must look like."""
    lines = []
    for op in registry.operators():
        lines.append(op)
        if signatures:
            lines += _signature_lines(op)
        for entry in registry.implementations(op):
            lines.append(f"  {entry.name:<8} {entry.target}; rounds inside: {_rounds(entry)}")
    lines.append(f"models         {', '.join(PRESETS)}")
    lines.append(f"dtypes         {', '.join(DTYPES)}; state {', '.join(STATE_DTYPES)}")
    lines += [f"regime         {regime.name}: {regime.about}" for regime in REGIMES.values()]
    return "\n".join(lines)


def _annotation(annotation: Any) -> str:
    return re.sub(r"(\w+\.)+", "", inspect.formatannotation(annotation))


def _rounds(entry: registry.Implementation) -> str:
    if entry.contract is None:
        return "nothing declared"
    return ", ".join(f"{point} to {str(dtype).removeprefix('torch.')}" for point, dtype in entry.contract.rounds.items()) or "nothing"


def _signature_lines(op: str) -> list[str]:
    parameters = [f"    {parameter}," for parameter in signature(op).parameters.values()]
    if len(parameters) > 2:
        parameters.insert(2, "    *,")
    doc = inspect.getdoc(REFERENCES[op]) or ""
    points = ", ".join(f"{point}{' (stored)' if point in BOUNDARY else ''}" for point in POINTS[op])
    return [
        "  def your_function(",
        *parameters,
        f"  ) -> {_annotation(signature(op).return_annotation)}",
        *(f"    {line}".rstrip() for line in doc.splitlines()),
        f"  points: {points or 'none, whole numbers'}",
        "  optional attributes: your_function.contract = reference.points.Contract(rounds={...}); your_function.kernels = (names, ...);",
        "                       your_function.capturable = True when it may be captured in a CUDA graph",
        "  use: workbench sweep " + op + " --impl package.module:your_function",
    ]
