"""How the mixer's GEMMs run, as data with reasons: launch configurations of `gemm.linear`, or the library."""

from dataclasses import dataclass

import torch

from optimized.arch import CPU, GPUS
from optimized.tiles import NO_PDL, PDL


@dataclass(frozen=True)
class GemmTile:
    """Launch configuration of `gemm.linear`.

    rows: of the weight in a program. tokens: of x. depth: of K in a step. splits: programs that share the K of a tile of y.
    warps, stages. prefetch: steps of the weight that are asked into L2 before the kernel waits for the one before it.
    pdl: may start while the kernel before it ends.
    """

    rows: int
    tokens: int
    depth: int
    splits: int
    warps: int
    stages: int
    prefetch: int = 0
    pdl: bool = False

    def __str__(self) -> str:
        return f"{self.rows}r{self.tokens}t{self.depth}d{self.splits}k{self.warps}w{self.stages}s{self.prefetch}f{'p' if self.pdl else ''}"


@dataclass(frozen=True)
class MixerPlan:
    """How the GEMMs of a mixer run; a tile of None is the library's.

    merged: [q|k|v|f_a|g_a|b] in one launch, wide; otherwise [q|k|v], wide, and [f_a|g_a|b], low. gates: [f_b;g_b].
    out: o_proj. overlap: low and gates on a stream of their own, beside wide; the cell then waits for two streams, and what
    waits for two can't start while a kernel ends.
    """

    merged: bool = False
    wide: GemmTile | None = None
    low: GemmTile | None = None
    gates: GemmTile | None = None
    out: GemmTile | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.merged and (self.overlap or self.low is not None):
            raise ValueError("plan: expected neither overlap nor low beside merged; its rows of low are computed with wide")
        if self.overlap and any(tile is not None and tile.pdl for tile in (self.low, self.gates)):
            raise ValueError("plan: expected pdl=False in low and gates with overlap; they wait for another stream")

    def __str__(self) -> str:
        parts = "all" if self.merged else "qkv", "low", "gates", "out"
        tiles = zip(parts, (self.wide, self.low, self.gates, self.out), strict=True)
        named = [f"{part}={tile or 'library'}" for part, tile in tiles if not (self.merged and part == "low")]
        return " ".join([*named, *(["overlap"] if self.overlap else [])])


@dataclass(frozen=True)
class PlanRule:
    """The plan for dtypes up to a count of tokens, and of elements in [q|k|v|f_a|g_a|b]."""

    archs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    tokens: int | None  # None: no upper end
    elements: int | None
    plan: MixerPlan
    reason: str


HALF, FP32 = (torch.bfloat16, torch.float16), (torch.float32,)
FEW = "one launch reads all weights of the input; K of o_proj split; the layer with other tiles was not measured"
MORE = "as at few tokens, with a tile of 64 tokens; the layer with the library was not measured"
MANY = "enough tokens for the library's tiles; the small GEMMs hide beside the large one; other plans were not measured"
ELSEWHERE = "one launch reads all weights of the input; K of o_proj split; not measured"
UP_TO_24_HEADS = 48_000_000  # of GLM-5.3-Flash
FEW_TILES = GemmTile(128, 16, 128, 1, 4, 1, 1, True), GemmTile(64, 16, 256, 2, 4, 3, 4, True)  # gates, out
MORE_TILES = GemmTile(64, 64, 64, 1, 4, 2, 1, True), GemmTile(64, 64, 128, 2, 4, 4, 4, True)


def _tiled(wide: GemmTile, gates: GemmTile, out: GemmTile) -> MixerPlan:
    """All that the input is multiplied by in one launch."""
    return MixerPlan(True, wide, None, gates, out)


PLANS = (
    PlanRule(
        (CPU,), HALF, 16, None,
        MixerPlan(True, GemmTile(512, 16, 512, 1, 4, 1), None, GemmTile(512, 16, 128, 1, 4, 1), GemmTile(1024, 16, 128, 2, 4, 1)),
        "fewest interpreted operations, with K split once",
    ),
    PlanRule(PDL, HALF, 16, UP_TO_24_HEADS, _tiled(GemmTile(64, 16, 128, 1, 4, 5, 4, True), *FEW_TILES), FEW),
    PlanRule(PDL, HALF, 16, None, _tiled(GemmTile(64, 16, 128, 1, 4, 3, 4, True), *FEW_TILES), FEW),
    PlanRule(PDL, HALF, 64, UP_TO_24_HEADS, _tiled(GemmTile(64, 64, 128, 1, 4, 4, 4, True), *MORE_TILES), MORE),
    PlanRule(PDL, HALF, 64, None, _tiled(GemmTile(64, 64, 64, 1, 4, 4, 4, True), *MORE_TILES), MORE),
    PlanRule(
        NO_PDL, HALF, 16, None,
        MixerPlan(True, GemmTile(64, 16, 128, 1, 4, 3), None, GemmTile(64, 16, 128, 1, 4, 1), GemmTile(32, 16, 128, 2, 4, 3)),
        ELSEWHERE,
    ),
    PlanRule(GPUS, HALF, None, None, MixerPlan(overlap=True), MANY),
    PlanRule((CPU,), HALF, None, None, MixerPlan(), "nothing to overlap with"),
    PlanRule((CPU, *GPUS), FP32, None, None, MixerPlan(), "the kernels are for tensor cores"),
)  # fmt: skip


def plan(arch_name: str, dtype: torch.dtype, tokens: int, elements: int) -> MixerPlan:
    """The first rule that covers the architecture, the dtype, the count of tokens and the elements of [q|k|v|f_a|g_a|b]."""
    for rule in PLANS:
        fits = (rule.tokens is None or tokens <= rule.tokens) and (rule.elements is None or elements <= rule.elements)
        if arch_name in rule.archs and dtype in rule.dtypes and fits:
            return rule.plan
    raise ValueError(f"plan: none for {dtype} on {arch_name}; add a row to PLANS")
