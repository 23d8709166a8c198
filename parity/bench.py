"""Speed beside the peers and the ceiling, in one run.

Each contender is called once on each of several layers, whose pools together are many times the L2 cache, so that weights
and states come from memory. What is reported is the median of all replays, with the fastest and the slowest.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from optimized import registry
from optimized.tiles import PDL, Tile
from parity import sweep
from parity.bench_operators import OPERATORS, Arguments
from parity.problem import Problem
from parity.race import Contender, race
from parity.record import Row

COPY_BYTES = 4 << 30
MATMUL = 8192
MATMUL_STEP = 64  # sides of products


def problems(device: str, given: dict[str, Any]) -> list[Problem]:
    """The problems that options name; lists that were not given are the operator's own. ValueError for what isn't timed."""
    asked = {name: value for name, value in given.items() if value is not None}
    options = sweep.layered(device, None, asked)
    found = []
    for op in options.op or OPERATORS:
        name = op.partition(":")[0]
        if name not in OPERATORS:
            raise ValueError(f"operator: expected one of {', '.join(OPERATORS)}, which are timed, got {name!r}")
        lists = OPERATORS[name].lists if name == op else {}
        found += sweep.problems(sweep.layered(device, None, {**lists, **asked, "op": [op], "device": options.device}))
    return found


def device_ceilings(device: str) -> list[Row]:
    """What the device does at best: a large copy, a large read-modify-write, a large matrix product."""
    from parity import ceilings

    rows = []
    for name, moved in (("copy", COPY_BYTES), ("read_modify_write", COPY_BYTES)):
        contender = Contender(name, [getattr(ceilings, name)(moved, device)])
        race([contender], device)
        rows.append(_ceiling_row(contender, moved, 0, "fp32"))
    contender = Contender(f"matmul {MATMUL}", [ceilings.matmul(MATMUL, device)])
    race([contender], device)
    return [*rows, _ceiling_row(contender, 3 * 2 * MATMUL**2, 2 * MATMUL**3, "bf16")]


def _ceiling_row(contender: Contender, moved: int, flops: int, dtype: str) -> Row:
    us = median(contender.times)
    return {
        "op": "device", "impl": contender.name, "model": "", "heads": None, "batch": None, "tokens": None, "dtype": dtype,
        "state_dtype": None, "us": us, "us_min": min(contender.times), "us_max": max(contender.times), "runs": len(contender.times),
        "bytes": moved, "flops": flops, "ceiling": "matmul" if flops else contender.name, "ceiling_us": us, "ratio": 1.0,
        "launches": contender.launches, "impl_hash": None, "reason": contender.note,
    }  # fmt: skip


def measure(problem: Problem, tiles: bool = False) -> list[Row]:
    """Bench rows of one problem: ceilings, ours and peers, or ours at each tile that was considered."""
    operator = OPERATORS[problem.op]
    layers = operator.layers(problem)
    ceilings = [_ceiling(name, problem, len(layers)) for name in dict.fromkeys((*operator.floor, "copy"))]
    contenders = tiled(problem, layers) if tiles else implementations(problem, layers)
    race([*ceilings, *contenders], problem.device)
    name, us = floor(problem, ceilings)
    return [_row(problem, contender, name, us, len(layers)) for contender in [*ceilings, *contenders]]


def implementations(problem: Problem, layers: Sequence[Arguments]) -> list[Contender]:
    """The registered implementations, then what the operator's bench sets beside them; a name with a note for what can't run."""
    operator = OPERATORS[problem.op]
    found: list[Contender] = []
    for entry in registry.implementations(problem.op):
        runs, reason = entry.supports(problem.workload())
        if not runs or (reason := operator.unfit(problem, entry.name)):
            found.append(Contender(entry.name, [], note=reason))
            continue
        calls = [partial(entry.load(), **layer) for layer in layers]
        found.append(Contender(entry.name, calls, entry.capturable, source=entry.source_hash()))
    return found + operator.beside(problem, layers)


def tiled(problem: Problem, layers: Sequence[Arguments]) -> list[Contender]:
    """Ours at every tile that was considered."""
    operator, overlaps = OPERATORS[problem.op], problem.workload().arch in PDL
    tiles = [replace(tile, pdl=overlaps) if isinstance(tile, Tile) else tile for tile in operator.tiles]
    return [Contender(f"triton {tile}", [operator.tiled(tile, layer) for layer in layers]) for tile in tiles]


def _ceiling(name: str, problem: Problem, count: int) -> Contender:
    from parity import ceilings

    operator = OPERATORS[problem.op]
    if name == "matmul":
        side = matmul_side(operator.flops(problem))
        return Contender(name, [ceilings.matmul(side, problem.device)], moved=3 * 2 * side**2, flops=2 * side**3)
    return Contender(name, [getattr(ceilings, name)(operator.moved(problem), problem.device) for _ in range(count)])


def matmul_side(flops: int) -> int:
    """The side of square matrices whose product takes at least so many operations."""
    steps = 1
    while 2 * (steps * MATMUL_STEP) ** 3 < flops:
        steps += 1
    return steps * MATMUL_STEP


def floor(problem: Problem, ceilings: Sequence[Contender]) -> tuple[str, float]:
    """The slowest ceiling of the operator and its microseconds for the problem's own bytes or operations."""
    operator, flops = OPERATORS[problem.op], OPERATORS[problem.op].flops(problem)
    times = {}
    for ceiling in ceilings:
        if ceiling.name in operator.floor:
            if not ceiling.times:
                raise RuntimeError(f"bench: the ceiling {ceiling.name} could not be timed: {ceiling.note}")
            times[ceiling.name] = median(ceiling.times) * (flops / ceiling.flops if ceiling.flops else 1.0)
    slowest = max(times, key=lambda name: times[name])
    return slowest, times[slowest]


def _row(problem: Problem, contender: Contender, ceiling: str, floor: float, layers: int) -> Row:
    operator, times = OPERATORS[problem.op], contender.times
    us = median(times) if times else None
    return {
        "op": problem.op, "impl": contender.name, "model": problem.model, "heads": problem.heads, "batch": problem.batch,
        "tokens": problem.rows, "dtype": problem.dtype, "state_dtype": problem.state_dtype, "us": us,
        "us_min": min(times, default=None), "us_max": max(times, default=None), "runs": len(times), "layers": layers,
        "bytes": operator.moved(problem) if contender.moved is None else contender.moved,
        "flops": operator.flops(problem) if contender.flops is None else contender.flops,
        "ceiling": ceiling, "ceiling_us": floor, "ratio": us / floor if us is not None else None, "launches": contender.launches,
        "impl_hash": contender.source, "reason": contender.note,
    }  # fmt: skip
