"""Launch configurations of the decode kernel, as data with reasons; the sweep that chose them is in `results/`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optimized.arch import CPU, GPUS


@dataclass(frozen=True)
class Tile:
    """Launch configuration of a kernel.

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


# Programs may overlap the end of the kernel before them from SM90 on.
NO_PDL = ("sm80", "sm86", "sm89")
PDL = tuple(name for name in GPUS if name not in NO_PDL)

FEW = "fewer programs than SMs: one pass over the whole head, nothing to pipeline"
FITS = "all programs are resident at once with four stages, and not with six"
MANY = "one warp a head and a deep pipeline keep 20 KB or more in flight on each SM"

TILES = (
    TileRule((CPU,), torch.float32, None, Tile(128, 4, 1), "fewest interpreted operations"),
    TileRule((CPU,), torch.bfloat16, None, Tile(128, 4, 1), "fewest interpreted operations"),
    TileRule(PDL, torch.float32, 132, Tile(128, 4, 1, 32, True), FEW),
    TileRule(PDL, torch.float32, 512, Tile(8, 1, 6, 64, True), MANY),
    TileRule(PDL, torch.float32, 1024, Tile(8, 1, 4, 64, True), FITS),
    TileRule(PDL, torch.float32, 2048, Tile(8, 1, 6, 64, True), MANY),
    TileRule(PDL, torch.float32, None, Tile(8, 1, 6, 128, True), MANY),
    TileRule(PDL, torch.bfloat16, 132, Tile(128, 4, 1, 32, True), FEW),
    TileRule(PDL, torch.bfloat16, None, Tile(8, 1, 6, 128, True), MANY),
    TileRule(NO_PDL, torch.float32, 132, Tile(128, 4, 1, 32), FEW),
    TileRule(NO_PDL, torch.float32, None, Tile(8, 1, 4, 128), f"{MANY}; not measured here"),
    TileRule(NO_PDL, torch.bfloat16, 132, Tile(128, 4, 1, 32), FEW),
    TileRule(NO_PDL, torch.bfloat16, None, Tile(8, 1, 4, 128), f"{MANY}; not measured here"),
)


def tile(arch_name: str, state_dtype: torch.dtype, programs: int, rules: Sequence[TileRule] = TILES) -> Tile:
    """The first rule that covers the architecture, the state's dtype and the count of programs."""
    for rule in rules:
        if arch_name in rule.archs and rule.state_dtype == state_dtype and (rule.programs is None or programs <= rule.programs):
            return rule.tile
    raise ValueError(f"tile: none for {arch_name} with a {state_dtype} state; add a row to TILES")
