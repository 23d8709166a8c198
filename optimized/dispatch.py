"""Which implementation runs where, as data with reasons. Answers for any SM version without a GPU."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from optimized import gemm_tiles, registry, tiles, verify_tiles
from optimized.arch import CPU, GPUS, arch
from optimized.gemm_tiles import MixerPlan
from optimized.implementation import Workload
from optimized.prefill_tiles import PrefillTile, prefill_tile
from optimized.tiles import Tile


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
    tile: Tile | PrefillTile | MixerPlan | None
    rejected: tuple[tuple[str, str], ...]


TABLES = {"kda.decode": tiles.TILES, "kda.verify": verify_tiles.VERIFY, "kda.commit": verify_tiles.VERIFY}
RULES = (
    Rule("kda.decode", GPUS, "triton", "the whole cell in one launch, state updated in place by slot"),
    Rule("kda.decode", GPUS, "fla", "conv update, fused recurrence by slot and gated norm in three or more launches"),
    Rule("kda.decode", (*GPUS, CPU), "torch", "a chain of torch operators, gathers and scatters the rows"),
    Rule("kda.prefill", GPUS, "triton", "chunks prepared all at once, a scan over them, the gated norm: three launches"),
    Rule(
        "kda.prefill",
        tiles.PDL,
        "flash_kda",
        "its fused chunks of 16 between FLA's convolution and norm, rows copied from and to the pools",
    ),
    Rule("kda.prefill", GPUS, "fla", "convolution, chunks of 64 and gated norm, rows copied from and to the pools"),
    Rule("kda.prefill", (*GPUS, CPU), "torch", "the eager decode token by token on copies of the rows"),
    Rule("kda.verify", GPUS, "triton", "replay, golden token and drafts in one launch, the state read once and stored once"),
    Rule("kda.verify", (*GPUS, CPU), "torch", "the eager decode token by token on copies of the rows"),
    Rule("kda.commit", GPUS, "triton", "replay in one launch, the state read once and stored once; nothing where nothing is pending"),
    Rule("kda.commit", (*GPUS, CPU), "torch", "the eager decode of the pending drafts, token by token on copies of the rows"),
    Rule("kda.verify_offsets", GPUS, "triton", "counts to offsets in one launch, once a forward"),
    Rule("kda.verify_offsets", (*GPUS, CPU), "torch", "four torch operators, once a forward"),
    Rule("kda.mixer", GPUS, "triton", "weights fused at load, the cell reads columns of the projections: four launches at few tokens"),
    Rule("kda.mixer", GPUS, "fla", "a linear for each weight and the chain of decode kernels"),
    Rule("kda.mixer", (*GPUS, CPU), "torch", "a linear for each weight and the eager cells"),
)


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
            chosen = _tile(work) if rule.impl == "triton" else None
            return Choice(rule.impl, rule.reason, chosen, tuple(rejected))
        rejected.append((rule.impl, reason))
    told = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise ValueError(f"dispatch: nothing runs {work.op} on {work.arch}: {told}")


def _tile(work: Workload) -> Tile | PrefillTile | MixerPlan | None:
    programs = work.batch * work.heads
    if work.op == "kda.prefill":
        return prefill_tile(work.arch, work.dtype, programs)
    if work.op == "kda.mixer":
        return gemm_tiles.plan(work.arch, work.dtype, work.rows, work.projected)
    if work.op not in TABLES:
        return None
    return tiles.tile(work.arch, work.state_dtype, programs, TABLES[work.op])


def matrix(work: Workload, without: Collection[str] = ()) -> dict[str, Choice]:
    """`choose` for every architecture."""
    return {name: choose(replace(work, arch=name), without) for name in (*GPUS, CPU)}
