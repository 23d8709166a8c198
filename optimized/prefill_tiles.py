"""Launch configurations of the prefill kernels, as data with reasons."""

from dataclasses import dataclass

import torch

from optimized.arch import CPU, GPUS


@dataclass(frozen=True)
class PrefillTile:
    """Launch configuration of the three prefill kernels.

    chunk: tokens that are solved at a time. rows: of V in a program of the scan; 16 for each warp keep every product inside
    its warp. warps and stages: of the scan. prepare_warps, norm_warps: of the two kernels that run over all chunks at once;
    the first takes twice as many where a chunk doesn't split at its middle.
    parts: of K in the scan, one for each warp, so that few rows still keep several warps busy; 1 leaves K whole.
    registers: the most that a thread of the first may have where a chunk splits at its middle, so that more programs share
    an SM: 168 makes it six of two warps, for 136 bytes on the stack (Triton 3.6). None for no limit; the other form needs them all.
    """

    rows: int
    warps: int
    stages: int
    prepare_warps: int = 2
    norm_warps: int = 4
    chunk: int = 16
    parts: int = 1
    registers: int | None = None

    def __str__(self) -> str:
        return f"{self.rows}r{self.warps}w{self.stages}s{self.prepare_warps}p{self.norm_warps}n{self.parts}k{self.registers or ''}"


@dataclass(frozen=True)
class PrefillRule:
    """The tile for a dtype of the activations up to a count of scans (sequences x heads)."""

    archs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    scans: int | None  # None: no upper end
    tile: PrefillTile
    reason: str


HALF, FP32 = (torch.bfloat16, torch.float16), (torch.float32,)
NARROW = "a scan is a chain of dependent products: the narrowest slices of V give the most chains to run side by side"
WIDE = "enough chains to fill the device: wider slices read the chunks' matrices less often"

PREFILL_TILES = (
    PrefillRule((CPU,), (*HALF, *FP32), None, PrefillTile(128, 4, 1), "fewest interpreted operations"),
    PrefillRule(GPUS, HALF, 16, PrefillTile(16, 4, 4, parts=4, registers=168), NARROW),
    PrefillRule(GPUS, HALF, 32, PrefillTile(32, 2, 4, registers=168), WIDE),
    PrefillRule(GPUS, HALF, None, PrefillTile(64, 4, 4, registers=168), WIDE),
    PrefillRule(GPUS, FP32, None, PrefillTile(16, 8, 2, prepare_warps=4), "products without tensor cores spill with fewer warps"),
)


def prefill_tile(arch_name: str, dtype: torch.dtype, scans: int) -> PrefillTile:
    """The first rule that covers the architecture, the dtype of the activations and the count of scans."""
    for rule in PREFILL_TILES:
        if arch_name in rule.archs and dtype in rule.dtypes and (rule.scans is None or scans <= rule.scans):
            return rule.tile
    raise ValueError(f"prefill_tile: none for {arch_name} with {dtype} activations; add a row to PREFILL_TILES")
