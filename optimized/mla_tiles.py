"""Launch configurations of the sparse MLA kernels, as data with reasons."""

from dataclasses import dataclass

import torch

from optimized.arch import CPU, GPUS
from optimized.tiles import NO_PDL, PDL


@dataclass(frozen=True)
class MlaTile:
    """Launch configuration of the attention core.

    heads: of a program, to 64, from where products fill the tensor core's rows; rows: gathered at a time; splits: of the rows of
    one query over programs, joined by a second kernel; warps and stages of the loop over rows. merge: channels of a program of
    the second kernel. pdl: may start while the kernel before it ends.
    """

    heads: int
    rows: int
    splits: int
    warps: int
    stages: int
    merge: int = 256
    pdl: bool = False

    def __str__(self) -> str:
        return f"{self.heads}h{self.rows}r{self.splits}x{self.warps}w{self.stages}s{self.merge}m{'p' if self.pdl else ''}"


@dataclass(frozen=True)
class MlaRule:
    """The tile for a kind of rows, up to a count of heads and of queries."""

    archs: tuple[str, ...]
    rows: tuple[str, ...]  # of kinds: half, fp8, fp32
    heads: int | None  # None: no upper end
    tokens: int | None
    tile: MlaTile
    reason: str


HOPPER = tuple(name for name in PDL if name not in ("sm107", "sm110", "sm120", "sm121"))  # 227 KB of shared memory and more
SMALL = tuple(name for name in GPUS if name not in HOPPER)  # 99 KB may be all there is
SPLIT = "queries x head blocks x splits is one or two programs for each SM; not measured"
WHOLE = "queries alone fill the device: no second kernel; not measured"

MLA_TILES = (
    MlaRule((CPU,), ("half", "fp8", "fp32"), None, 4, MlaTile(16, 16, 3, 4, 1), "fewest interpreted operations that still split"),
    MlaRule((CPU,), ("half", "fp8", "fp32"), None, None, MlaTile(64, 64, 1, 4, 1), "fewest interpreted operations"),
    MlaRule(HOPPER, ("half", "fp8"), 32, 1, MlaTile(16, 64, 33, 4, 2, 256, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), 32, 8, MlaTile(16, 64, 16, 4, 2, 256, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), 32, 16, MlaTile(16, 64, 16, 4, 2, 512, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), 32, 64, MlaTile(16, 64, 4, 4, 2, 512, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), 32, None, MlaTile(16, 64, 1, 4, 2, 512, True), WHOLE),
    MlaRule(HOPPER, ("half", "fp8"), None, 1, MlaTile(16, 64, 33, 4, 2, 256, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), None, 8, MlaTile(64, 64, 16, 8, 2, 512, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), None, 16, MlaTile(64, 64, 8, 8, 2, 512, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), None, 64, MlaTile(64, 64, 2, 8, 2, 512, True), SPLIT),
    MlaRule(HOPPER, ("half", "fp8"), None, None, MlaTile(64, 64, 1, 8, 2, 512, True), WHOLE),
    MlaRule(SMALL, ("half", "fp8"), None, 16, MlaTile(16, 32, 16, 4, 2, 512, False), "99 KB of shared memory; not measured"),
    MlaRule(SMALL, ("half", "fp8"), None, None, MlaTile(16, 32, 1, 4, 2, 512, False), "99 KB of shared memory; not measured"),
    MlaRule(GPUS, ("fp32",), None, 16, MlaTile(16, 16, 16, 4, 1, 512, False), "no tensor cores for FP32: for checks, not for speed"),
    MlaRule(GPUS, ("fp32",), None, None, MlaTile(16, 16, 1, 4, 1, 512, False), "no tensor cores for FP32: for checks, not for speed"),
)
assert set(NO_PDL) <= set(SMALL)


def kind(q: torch.dtype, latent: torch.dtype) -> str:
    """half, fp8 or fp32: what the rows are and what they are multiplied with."""
    if q == torch.float32:
        return "fp32"
    return "fp8" if latent in (torch.uint8, torch.float8_e4m3fn) else "half"


def mla_tile(arch_name: str, rows: str, heads: int, tokens: int) -> MlaTile:
    """The first rule that covers the architecture, the kind of rows, the heads and the count of queries."""
    for rule in MLA_TILES:
        if (
            arch_name in rule.archs and rows in rule.rows and (rule.heads is None or heads <= rule.heads)
            and (rule.tokens is None or tokens <= rule.tokens)
        ):  # fmt: skip
            return rule.tile
    raise ValueError(f"mla_tile: none for {arch_name} with {rows} rows, {heads} heads and {tokens} queries; add a row to MLA_TILES")


@dataclass(frozen=True)
class KpoolTile:
    """Launch configuration of the indexer: pools of a program of the scores, and its warps; columns that a query's selection reads at
    a time, and its warps. pdl: may start while the kernel before it ends."""

    pools: int
    warps: int
    columns: int
    select_warps: int
    pdl: bool = False


def kpool_tile(arch_name: str) -> KpoolTile:
    """The tile of the indexer's kernels on an architecture; not measured."""
    return KpoolTile(64, 4, 256, 4) if arch_name == CPU else KpoolTile(128, 4, 4096, 16, arch_name in PDL)
