"""Launch configurations of the verify and commit kernels, as data with reasons."""

import torch

from optimized.arch import CPU
from optimized.tiles import NO_PDL, PDL, Tile, TileRule

RESIDENT = "the whole state of a head stays in registers; two programs of four warps share an SM, one computes while one loads"

VERIFY = (
    TileRule((CPU,), torch.float32, None, Tile(128, 4, 1), "fewest interpreted operations"),
    TileRule((CPU,), torch.bfloat16, None, Tile(128, 4, 1), "fewest interpreted operations"),
    TileRule(PDL, torch.float32, None, Tile(128, 4, 1, 16, True), f"{RESIDENT}; few lanes share a row; no record of other tiles"),
    TileRule(PDL, torch.bfloat16, None, Tile(128, 4, 1, 32, True), f"{RESIDENT}; not measured"),
    TileRule(NO_PDL, torch.float32, None, Tile(128, 4, 1, 32), f"{RESIDENT}; not measured"),
    TileRule(NO_PDL, torch.bfloat16, None, Tile(128, 4, 1, 32), f"{RESIDENT}; not measured"),
)
