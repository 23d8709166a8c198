"""Which implementation and which tile run where, as data with reasons. Answers for any SM version without a GPU."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from optimized import registry
from optimized.arch import ARCHS, CPU, arch
from optimized.registry import Workload


@dataclass(frozen=True)
class Tile:
    """Launch configuration of the decode kernel.

    rows: of V in a pass. warps. stages: of the pipeline over passes, where there are several.
    chunk: of K; the fewer keys in one, the fewer lanes share a row. pdl: may start while the kernel before it ends.
    """

    rows: int
    warps: int
    stages: int
    chunk: int = 32
    pdl: bool = False

    def __str__(self) -> str:
        return f"{self.rows}r{self.warps}w{self.stages}s{self.chunk}c{'p' if self.pdl else ''}"


@dataclass(frozen=True)
class TileRule:
    """The tile for a state dtype up to a count of programs (sequences x heads)."""

    archs: tuple[str, ...]
    state_dtype: torch.dtype
    programs: int | None  # None: no upper end
    tile: Tile
    reason: str


@dataclass(frozen=True)
class Rule:
    """An implementation preferred on some architectures, and why."""

    op: str
    archs: tuple[str, ...]
    impl: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What dispatch answers: the implementation, why, its tile, and what was passed over."""

    impl: str
    reason: str
    tile: Tile | None
    rejected: tuple[tuple[str, str], ...]


GPUS = tuple(ARCHS)

RULES = (
    Rule("kda.decode", GPUS, "triton", "the whole cell in one launch, state updated in place by slot"),
    Rule("kda.decode", GPUS, "fla", "conv update, fused recurrence by slot and gated norm in three or more launches"),
    Rule("kda.decode", (*GPUS, CPU), "torch", "a chain of torch operators, gathers and scatters the rows"),
)

# Programs may overlap the end of the kernel before them from SM90 on.
NO_PDL = ("sm80", "sm86", "sm89")
PDL = tuple(name for name in GPUS if name not in NO_PDL)

FEW = "fewer programs than SMs: one pass over the whole head, nothing to pipeline"
MANY = "one warp a head and a deep pipeline keep 20 KB or more in flight on each SM"

TILES = (
    TileRule((CPU,), torch.float32, None, Tile(128, 4, 1), "fewest interpreted operations"),
    TileRule((CPU,), torch.bfloat16, None, Tile(128, 4, 1), "fewest interpreted operations"),
    TileRule(PDL, torch.float32, 132, Tile(128, 4, 1, 32, True), FEW),
    TileRule(PDL, torch.float32, 2048, Tile(8, 1, 6, 64, True), MANY),
    TileRule(PDL, torch.float32, None, Tile(8, 1, 6, 128, True), MANY),
    TileRule(PDL, torch.bfloat16, 132, Tile(128, 4, 1, 32, True), FEW),
    TileRule(PDL, torch.bfloat16, None, Tile(8, 1, 6, 128, True), MANY),
    TileRule(NO_PDL, torch.float32, 132, Tile(128, 4, 1, 32), FEW),
    TileRule(NO_PDL, torch.float32, None, Tile(8, 1, 4, 128), f"{MANY}; not measured here"),
    TileRule(NO_PDL, torch.bfloat16, 132, Tile(128, 4, 1, 32), FEW),
    TileRule(NO_PDL, torch.bfloat16, None, Tile(8, 1, 4, 128), f"{MANY}; not measured here"),
)


def tile(arch_name: str, state_dtype: torch.dtype, programs: int) -> Tile:
    """The first rule that covers the architecture, the state's dtype and the count of programs."""
    for rule in TILES:
        if arch_name in rule.archs and rule.state_dtype == state_dtype and (rule.programs is None or programs <= rule.programs):
            return rule.tile
    raise ValueError(f"dispatch: no tile for {arch_name} with a {state_dtype} state; add a row to TILES")


def choose(work: Workload, without: Collection[str] = ()) -> Choice:
    """The first rule whose implementation is not switched off (`without`) and can run `work`. ValueError when none can."""
    if work.arch != CPU:
        arch(work.arch)
    known = {entry.name: entry for entry in registry.implementations(work.op)}
    if not known:
        raise ValueError(f"operator: expected one of {', '.join(registry.operators())}, got {work.op!r}")
    for name in without:
        if name not in known:
            raise ValueError(f"without: expected some of {', '.join(known)}, got {name!r}")
    rejected: list[tuple[str, str]] = []
    for rule in RULES:
        if rule.op != work.op or work.arch not in rule.archs:
            continue
        if rule.impl in without:
            rejected.append((rule.impl, "switched off"))
            continue
        runs, reason = known[rule.impl].supports(work) if rule.impl in known else (False, "not registered")
        if runs:
            chosen = tile(work.arch, work.state_dtype, work.batch * work.heads) if rule.impl == "triton" else None
            return Choice(rule.impl, rule.reason, chosen, tuple(rejected))
        rejected.append((rule.impl, reason))
    told = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise ValueError(f"dispatch: nothing runs {work.op} on {work.arch}: {told}")


def matrix(work: Workload, without: Collection[str] = ()) -> dict[str, Choice]:
    """`choose` for every architecture."""
    return {name: choose(replace(work, arch=name), without) for name in (*GPUS, CPU)}
