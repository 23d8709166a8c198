"""Speed beside the peers and the ceiling, in one run.

Each contender is captured in a CUDA graph that calls it once on each of several layers, whose pools together are many times
the L2 cache, so that weights and states come from memory. Contenders take turns, over several passes; what is reported is
the median of all replays, with the fastest and the slowest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from optimized import registry
from optimized.tiles import Tile
from parity import path
from parity.case import Case, Pools
from parity.problem import Problem
from parity.record import Row
from reference import validate

ROTATED_BYTES = 480 << 20  # eight times an L2 of 60 MB
PASSES = 3
REPLAYS = 15
WARMUP = 3
COPY_BYTES = 4 << 30
MATMUL = 8192
TUNED = tuple(
    Tile(rows, warps, stages, chunk, pdl=True)
    for rows, warps, stages in ((8, 1, 4), (8, 1, 6), (16, 1, 4), (16, 2, 5), (32, 4, 4), (128, 4, 1))
    for chunk in (32, 64, 128)
)


@dataclass
class Layer:
    """One layer's pools and inputs."""

    case: Case
    pools: Pools
    inputs: dict[str, Tensor]


@dataclass
class Contender:
    """Something timed: one call for each layer."""

    name: str
    calls: Sequence[Callable[[], Any]]
    graphed: bool = True
    launches: int | None = None
    times: list[float] = field(default_factory=list)
    failed: str = ""
    source: str | None = None


def device_ceilings(device: str) -> list[Row]:
    """What the device does at best: a large copy, a large read-modify-write, a large matrix product."""
    from parity import ceilings

    rows = []
    for name, moved in (("copy", COPY_BYTES), ("read_modify_write", COPY_BYTES)):
        contender = Contender(name, [getattr(ceilings, name)(moved, device)])
        _race([contender], device)
        rows.append(_ceiling_row(contender, moved, 0, "fp32"))
    contender = Contender(f"matmul {MATMUL}", [ceilings.matmul(MATMUL, device)])
    _race([contender], device)
    return [*rows, _ceiling_row(contender, 3 * 2 * MATMUL**2, 2 * MATMUL**3, "bf16")]


def _ceiling_row(contender: Contender, moved: int, flops: int, dtype: str) -> Row:
    us = median(contender.times)
    return {
        "op": "device", "impl": contender.name, "model": "", "heads": None, "batch": None, "tokens": None, "dtype": dtype,
        "state_dtype": None, "us": us, "us_min": min(contender.times), "us_max": max(contender.times), "runs": len(contender.times),
        "bytes": moved, "flops": flops, "ceiling": "matmul" if flops else contender.name, "ceiling_us": us, "ratio": 1.0,
        "launches": contender.launches, "impl_hash": None, "reason": contender.failed,
    }  # fmt: skip


def measure(problem: Problem, tiles: Sequence[Tile] | None = None) -> list[Row]:
    """Bench rows of one problem: ceilings, ours and peers, or ours at each of `tiles`."""
    layers = _layers(problem)
    moved = bytes_moved(problem)
    ceilings = [_ceiling("read_modify_write", moved, len(layers), problem.device), _ceiling("copy", moved, len(layers), problem.device)]
    contenders = [_tiled(layers, tile) for tile in tiles] if tiles is not None else _implementations(problem, layers)
    _race([*ceilings, *contenders], problem.device)
    if not ceilings[0].times:
        raise RuntimeError(f"bench: the floor could not be timed: {ceilings[0].failed}")
    floor = median(ceilings[0].times)
    return [_row(problem, contender, moved, floor, len(layers)) for contender in [*ceilings, *contenders]]


def bytes_moved(problem: Problem) -> int:
    """Each input read once, each output written once: state and window both ways, activations, weights."""
    kda, size, state = problem.shape.kda, problem.activation.itemsize, problem.pool.itemsize
    key, value = problem.heads * kda.key_dim, problem.heads * kda.value_dim
    channels = 2 * key + value
    sequence = 2 * problem.heads * kda.key_dim * kda.value_dim * state + 2 * 3 * channels * size
    sequence += (channels + key + problem.heads + 2 * value) * size
    weights = channels * 4 * size + 4 * (problem.heads + key) + kda.value_dim * size
    return problem.batch * sequence + weights


def flops(problem: Problem) -> int:
    """Decay, two products with the state and the update: 8 operations for each element of the state."""
    kda = problem.shape.kda
    return problem.batch * problem.heads * kda.key_dim * kda.value_dim * 8


def _layers(problem: Problem) -> list[Layer]:
    case = Case(problem)
    count = max(2, -(-ROTATED_BYTES // case.pools().bytes()))
    return [Layer(case, case.pools(), case.inputs(step).tensors) for step in range(1, count + 1)]


def _arguments(layer: Layer) -> dict[str, Any]:
    return {**layer.case.weights, **layer.case.settings, **layer.inputs, **layer.pools.arguments()}


def _implementations(problem: Problem, layers: list[Layer]) -> list[Contender]:
    found: list[Contender] = []
    for entry in registry.implementations(problem.op):
        runs, reason = entry.supports(problem.workload())
        if not runs:
            found.append(Contender(entry.name, [], failed=reason))
            continue
        calls = [partial(entry.load(), **_arguments(layer)) for layer in layers]
        found.append(Contender(entry.name, calls, entry.capturable, source=entry.source_hash()))
        if entry.name == "fla":
            from optimized.peers import fla

            found.append(Contender("fla kernels", [fla.prepared(**_arguments(layer)) for layer in layers]))
    return found


def _tiled(layers: list[Layer], tile: Tile) -> Contender:
    from optimized import kda_decode

    sizes = validate.kda_decode(fresh=None, **_arguments(layers[0]))
    calls = [partial(kda_decode.launch, tile, sizes, **_arguments(layer)) for layer in layers]
    return Contender(f"triton {tile}", calls)


def _ceiling(name: str, moved: int, count: int, device: str) -> Contender:
    from parity import ceilings

    return Contender(name, [getattr(ceilings, name)(moved, device) for _ in range(count)])


def _race(contenders: list[Contender], device: str) -> None:
    """Capture every contender, then time them in turns."""
    replays: dict[str, Callable[[], Any]] = {}
    for contender in contenders:
        if contender.failed:
            continue
        try:
            contender.launches = _count_launches(contender.calls[0])
            replays[contender.name] = _captured(contender.calls, device) if contender.graphed else _eager(contender.calls)
        except Exception as error:  # a peer that can't be captured is a row that says so
            contender.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for _ in range(PASSES):
        for contender in contenders:
            if contender.name in replays:
                contender.times += _timed(replays[contender.name], len(contender.calls))


def _count_launches(call: Callable[[], Any]) -> int:
    call()
    torch.cuda.synchronize()
    return sum(path.profiled(call).values())


def _captured(calls: Sequence[Callable[[], Any]], device: str) -> Callable[[], Any]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _eager(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _timed(replay: Callable[[], Any], calls: int) -> list[float]:
    """Microseconds a call, of each replay."""
    for _ in range(WARMUP):
        replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for start, end in marks:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 / calls for start, end in marks]


def _row(problem: Problem, contender: Contender, moved: int, floor: float, layers: int) -> Row:
    times = contender.times
    us = median(times) if times else None
    return {
        "op": problem.op, "impl": contender.name, "model": problem.model, "heads": problem.heads, "batch": problem.batch,
        "tokens": problem.batch, "dtype": problem.dtype, "state_dtype": problem.state_dtype, "us": us,
        "us_min": min(times, default=None), "us_max": max(times, default=None), "runs": len(times), "layers": layers,
        "bytes": moved, "flops": flops(problem), "ceiling": "read_modify_write", "ceiling_us": floor,
        "ratio": us / floor if us is not None else None, "launches": contender.launches, "impl_hash": contender.source,
        "reason": contender.failed,
    }  # fmt: skip
