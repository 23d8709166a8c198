"""What differs between the operators that bench times: bytes, operations, arguments of a layer, contenders, tiles, defaults.

An operator is timed once it has a row in OPERATORS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optimized import registry
from optimized.prefill_tiles import PrefillTile
from optimized.tiles import Tile
from parity.case import Case
from parity.problem import Problem
from parity.race import Contender
from reference import kda_offsets, validate, validate_verify

ROTATED_BYTES = 480 << 20  # eight times an L2 of 60 MB
MOST_LAYERS = 128
PATIENCE = 1024  # tokens that a loop over tokens is waited for

Arguments = dict[str, Any]  # of one layer: weights, pools, activations
AnyTile = Tile | PrefillTile


@dataclass(frozen=True)
class Timed:
    """How an operator is timed.

    moved, flops: the least that a call must move (each input read once, each output written once) and multiply. layers: the
    arguments of each. floor: ceilings, the slowest of which is the one. tiles, tiled: what the tile sweep tries, overlapping
    launches where the device can, and the call of a layer at one. lists: options of the command that were not given. beside:
    contenders beside the registered implementations. unfit: why one of these isn't timed, or "".
    """

    moved: Callable[[Problem], int]
    flops: Callable[[Problem], int]
    layers: Callable[[Problem], list[Arguments]]
    floor: tuple[str, ...]
    tiles: tuple[AnyTile, ...]
    tiled: Callable[[Any, Arguments], Callable[[], Any]]
    lists: Mapping[str, tuple[Any, ...]]
    beside: Callable[[Problem, Sequence[Arguments]], list[Contender]] = lambda problem, layers: []
    unfit: Callable[[Problem, str], str] = lambda problem, name: ""


def cell_bytes(problem: Problem, *, read: float, written: float, cached: int = 0) -> int:
    """State and window both ways, weights once, activations read and outputs written: of so many tokens a sequence.

    cached: drafts whose raw inputs are read from the replay caches, and as many written.
    """
    kda, size, state = problem.shape.kda, problem.activation.itemsize, problem.pool.itemsize
    key, value = problem.heads * kda.key_dim, problem.heads * kda.value_dim
    channels = 2 * key + value
    pools = 2 * key * kda.value_dim * state + 2 * 3 * channels * size
    inputs = channels + key + problem.heads
    tokens = read * (inputs + value) + written * value + 2 * cached * inputs
    weights = channels * 4 * size + 4 * (problem.heads + key) + kda.value_dim * size
    return round(problem.batch * (pools + tokens * size)) + weights


def _state(problem: Problem) -> int:
    """Elements of the states of a call."""
    kda = problem.shape.kda
    return problem.batch * problem.heads * kda.key_dim * kda.value_dim


def _decode_bytes(problem: Problem) -> int:
    return cell_bytes(problem, read=1, written=1)


def _decode_flops(problem: Problem) -> int:
    """Decay, two products with the state and the update: 8 operations for each element of the state."""
    return 8 * _state(problem)


def _prefill_bytes(problem: Problem) -> int:
    tokens = problem.rows / max(problem.batch, 1)
    return cell_bytes(problem, read=tokens, written=tokens)


def _prefill_flops(problem: Problem) -> int:
    """Matrix products of the chunk form at chunks of 16: three with the state, and five within the chunk."""
    kda = problem.shape.kda
    within = 16 * (3 * kda.key_dim + 2 * kda.value_dim)
    return 2 * problem.rows * problem.heads * (3 * kda.key_dim * kda.value_dim + within)


def _verify_bytes(problem: Problem) -> int:
    width = 1 + problem.drafts
    return cell_bytes(problem, read=width, written=width, cached=problem.drafts)


def _verify_flops(problem: Problem) -> int:
    """8 for each new token, and 6 for each replayed one, which is not read out."""
    return (8 * (1 + problem.drafts) + 6 * problem.drafts) * _state(problem)


def layer_count(problem: Problem) -> int:
    """Layers that are called in turn, so that what a call reads is no longer in the L2 cache; a state is moved twice."""
    moved = OPERATORS[problem.op].moved(problem)
    return min(max(2, -(-2 * ROTATED_BYTES // moved)), MOST_LAYERS)


def cell_layers(problem: Problem) -> list[Arguments]:
    """Weights, pools and activations of each layer, all its own but for the offsets of sequences."""
    case = Case(problem)
    ends: dict[str, Tensor] = {}
    layers = []
    for step in range(1, 1 + layer_count(problem)):
        inputs = case.inputs(step)
        ends = ends or {name: value for name, value in inputs.others.items() if name == "cu_seqlens"}
        weights = {name: weight.clone() for name, weight in case.weights.items()}
        layers.append({**weights, **case.settings, **inputs.tensors, **ends, **case.pools().arguments()})
    return layers


def _verify_layers(problem: Problem) -> list[Arguments]:
    """Every draft of the last verify was accepted, the most that can be replayed; offsets shared by all layers."""
    layers = cell_layers(problem)
    counts = accepted(problem, 1 + problem.drafts)
    for layer in layers:
        for cache in (layer["replay"].qkv, layer["replay"].f, layer["replay"].beta):
            cache.normal_()
    return [layer | counts for layer in layers]


def accepted(problem: Problem, count: int) -> Arguments:
    """The same count of accepted tokens for every sequence, with the offsets of it."""
    counts = torch.full((problem.batch,), count, dtype=torch.int32, device=problem.device)
    return {"accepted": counts, "offsets": kda_offsets.offsets(counts, problem.drafts)}


def _decode_beside(problem: Problem, layers: Sequence[Arguments]) -> list[Contender]:
    if not registry.find("kda.decode", "fla").supports(problem.workload())[0]:
        return []
    from optimized.peers import fla

    return [Contender("fla kernels", [fla.prepared(**layer) for layer in layers])]


def _prefill_beside(problem: Problem, layers: Sequence[Arguments]) -> list[Contender]:
    """Of each peer that runs here: its launches alone, and those between convolution and norm."""
    runs = [name for name in ("fla", "flash_kda") if registry.find("kda.prefill", name).supports(problem.workload())[0]]
    if not runs:
        return []
    from optimized.peers import fla_prefill, flash_kda

    cores, ends = {"fla": fla_prefill.chunk_core, "flash_kda": flash_kda.fused_core}, layers[0]["cu_seqlens"].long()
    return [
        Contender(f"{name} {part}", [prepared(cores[name], ends, **layer) for layer in layers])
        for name in runs
        for part, prepared in (("kernels", fla_prefill.prepared), ("core", fla_prefill.prepared_core))
    ]


def _prefill_unfit(problem: Problem, name: str) -> str:
    return f"a loop over tokens: not waited for beyond {PATIENCE}" if name == "torch" and problem.rows > PATIENCE else ""


def _verify_beside(problem: Problem, layers: Sequence[Arguments]) -> list[Contender]:
    """Ours with nothing to replay, our decode of the golden tokens, and FLA's kernels with a state for each token."""
    from optimized import kda_decode, kda_verify

    width = 1 + problem.drafts
    none = accepted(problem, 1)
    found = [
        Contender("triton, no replay", [partial(kda_verify.verify, **layer | none) for layer in layers]),
        Contender(
            "decode cell", [partial(kda_decode.decode, **_golden(layer, width)) for layer in layers],
            moved=_decode_bytes(problem), flops=_decode_flops(problem),
        ),
    ]  # fmt: skip
    if registry.find("kda.decode", "fla").supports(problem.workload())[0]:
        from optimized.peers import fla_verify

        snapshots = [_snapshots(layer, width) for layer in layers]
        found.append(Contender("fla", [partial(fla_verify.verify_snapshots, **layer) for layer in snapshots], graphed=False))
        found.append(Contender("fla kernels", [fla_verify.prepared(**layer) for layer in snapshots]))
    return found


def _golden(layer: Arguments, width: int) -> Arguments:
    """A decode of the first token of each sequence, on the same pools."""
    given = {name: x for name, x in layer.items() if name not in ("replay", "accepted", "offsets")}
    return given | {name: given[name][::width] for name in ("q", "k", "v", "f", "beta", "gate")}


def _snapshots(layer: Arguments, width: int) -> Arguments:
    """The same call under contract A: a slot for each token, and windows with room for the drafts."""
    given = {name: x for name, x in layer.items() if name not in ("replay", "offsets")}
    index = layer["slots"].long()
    slots = torch.arange(len(index) * width, dtype=torch.int32, device=index.device).view(-1, width)
    window = torch.nn.functional.pad(layer["window"][index], (0, 0, 0, width - 1)).repeat_interleave(width, 0)
    return given | {"slots": slots, "state": layer["state"][index].repeat_interleave(width, 0), "window": window}


def _decode_tiled(tile: Tile, layer: Arguments) -> Callable[[], Any]:
    from optimized import kda_decode

    return partial(kda_decode.launch, tile, validate.kda_decode(fresh=None, **layer), **layer)


def _prefill_tiled(tile: PrefillTile, layer: Arguments) -> Callable[[], Any]:
    from optimized import kda_prefill

    return partial(kda_prefill.launch, tile, validate.kda_prefill(fresh=None, **layer), **layer)


def _verify_tiled(tile: Tile, layer: Arguments) -> Callable[[], Any]:
    from optimized import kda_verify

    return partial(kda_verify.launch, tile, validate_verify.kda_verify(fresh=None, **layer), **layer)


_SHAPES = {"heads": (64, 16), "batch": (1, 16, 64, 256), "regime": ("random",)}
OPERATORS = {
    "kda.decode": Timed(
        _decode_bytes, _decode_flops, cell_layers, ("read_modify_write",),
        tuple(
            Tile(rows, warps, stages, chunk)
            for rows, warps, stages in ((8, 1, 4), (8, 1, 6), (16, 1, 4), (16, 2, 5), (32, 4, 4), (128, 4, 1))
            for chunk in (32, 64, 128)
        ),
        _decode_tiled, _SHAPES, _decode_beside,
    ),
    "kda.prefill": Timed(
        _prefill_bytes, _prefill_flops, cell_layers, ("copy", "matmul"),
        tuple(
            PrefillTile(rows, warps, stages, parts=parts, registers=registers)
            for rows, warps, parts in ((16, 4, 4), (16, 2, 2), (16, 1, 1), (32, 4, 4), (32, 2, 1), (64, 4, 1), (128, 8, 1))
            for stages in (2, 4)
            for registers in (168, None)
        ),
        _prefill_tiled, {"heads": (64, 16), "batch": (1,), "tokens": (1024, 8192, 32768), "state_dtype": ("fp32",), "regime": ("random",)},
        _prefill_beside, _prefill_unfit,
    ),
    "kda.verify": Timed(
        _verify_bytes, _verify_flops, _verify_layers, ("read_modify_write",),
        tuple(Tile(128, warps, 1, chunk) for warps in (2, 4, 8) for chunk in (32, 64, 128)),
        _verify_tiled, _SHAPES | {"drafts": (3,)}, _verify_beside,
    ),
}  # fmt: skip
