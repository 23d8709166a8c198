"""Launch configurations of the prefill kernels, as data with reasons."""

from dataclasses import dataclass

from optimized.arch import CPU, GPUS


@dataclass(frozen=True)
class PrefillTile:
    """Launch configuration of the three prefill kernels.

    chunk: tokens that are solved at a time. rows: of V in a program of the scan; 16 for each warp keep every product inside
    its warp. warps and stages: of the scan. prepare_warps, norm_warps: of the two kernels that run over all chunks at once.
    """

    rows: int
    warps: int
    stages: int
    prepare_warps: int = 4
    norm_warps: int = 4
    chunk: int = 16

    def __str__(self) -> str:
        return f"{self.rows}r{self.warps}w{self.stages}s{self.prepare_warps}p{self.norm_warps}n"


@dataclass(frozen=True)
class PrefillRule:
    """The tile up to a count of scans (sequences x heads)."""

    archs: tuple[str, ...]
    scans: int | None  # None: no upper end
    tile: PrefillTile
    reason: str


NARROW = "a scan is a chain of dependent products: the narrowest slices of V give the most chains to run side by side"
WIDE = "enough chains to fill the device: wider slices read the chunks' matrices less often"

PREFILL_TILES = (
    PrefillRule((CPU,), None, PrefillTile(128, 4, 1), "fewest interpreted operations"),
    PrefillRule(GPUS, 16, PrefillTile(16, 1, 4), NARROW),
    PrefillRule(GPUS, 32, PrefillTile(32, 2, 4), WIDE),
    PrefillRule(GPUS, None, PrefillTile(64, 4, 4), WIDE),
)


def prefill_tile(arch_name: str, scans: int) -> PrefillTile:
    """The first rule that covers the architecture and the count of scans."""
    for rule in PREFILL_TILES:
        if arch_name in rule.archs and (rule.scans is None or scans <= rule.scans):
            return rule.tile
    raise ValueError(f"prefill_tile: none for {arch_name}; add a row to PREFILL_TILES")
