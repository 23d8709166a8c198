"""Invariants: what must hold to the bit, whatever the numbers are.

Each compares two runs of the same launch configuration, or memory before and after. A check that a case can't make (one
sequence has no neighbours) is left out of the result, never counted as true.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from optimized import interpreter
from parity import limits
from parity.buffers import same_bits
from parity.case import Case, Pools
from parity.oracle import Operator
from parity.phases import PHASES, anew, no_sequences, reverse
from parity.trajectory import run


class Bench:
    """Runs of one step of a case on fresh pools, to compare with a base run."""

    def __init__(self, case: Case, call: Operator, capturable: bool, library: bool) -> None:
        self.case, self.call, self.capturable, self.library = case, call, capturable, library
        replays = case.problem.drafts > 0 and not PHASES[case.problem.op].flushes
        self.step = 2 if replays else 1  # with drafts to replay
        self.inputs = case.inputs(self.step)
        self.before: Pools | None = None
        for step in range(1, self.step):
            self.before = self.before or case.pools()
            run(call, case, self.before, case.inputs(step).tensors)
        self.base, self.base_pools = self.run()

    def pools(self) -> Pools:
        """New pools, as they are before the step."""
        pools = self.case.pools()
        if self.before is not None:
            pools.take(self.before)
        return pools

    def run(
        self, prepare: Callable[[Pools], None] | None = None, x: dict[str, Tensor] | None = None, **changed: Tensor
    ) -> tuple[Tensor, Pools]:
        """One step on new pools, after `prepare` changed them."""
        pools = self.pools()
        if prepare is not None:
            prepare(pools)
        return run(self.call, self.case, pools, x or self.inputs.tensors, **changed), pools

    def equals_base(self, out: Tensor, pools: Pools, sequences: slice = slice(None)) -> bool:
        """Output and named rows equal the base run's, for these sequences."""
        return all(same_bits(a, b) for a, b in self._beside_base(out, pools, sequences))

    def close_to_base(self, out: Tensor, pools: Pools, sequences: slice) -> bool:
        """Output and named rows are the base run's up to the noise of another launch configuration."""
        pairs = self._beside_base(out, pools, sequences)
        return all(float((a.double() - b.double()).norm()) <= limits.OTHER_CONFIGURATION * float(b.double().norm()) for a, b in pairs)

    def _beside_base(self, out: Tensor, pools: Pools, sequences: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """A row at a time, so that large pools need no copies."""
        rows = self.inputs.tokens.rows(sequences)
        yield out[rows], self.base[rows]
        for slot in self.base_pools.slots[sequences].tolist():
            yield pools.state[slot], self.base_pools.state[slot]
            yield pools.window[slot], self.base_pools.window[slot]


def untouched(pools: Pools) -> dict[str, bool]:
    """After a run: slots that nobody named, and everything between and around the rows, still hold 0xFF."""
    spare = pools.spare()
    poison = [part.rows[spare].contiguous().view(torch.uint8) for part in pools.guarded()]
    return {"untouched_slots": all(bool((part == 0xFF).all()) for part in poison), "gaps": all(part.intact() for part in pools.guarded())}


def check(case: Case, call: Operator, *, capturable: bool, library: bool) -> dict[str, bool]:
    """Every invariant that this case can show. capturable: runs in a CUDA graph. library: made of torch's operators."""
    bench = Bench(case, call, capturable, library)
    return {name: result for name, test in CHECKS.items() if (result := test(bench)) is not None}


def _repeated(bench: Bench) -> bool:
    return bench.equals_base(*bench.run())


def _slot_permutation(bench: Bench) -> bool | None:
    """The sequences in reverse order give the same rows in reverse order; to the bit, but for torch's own operators.

    Those treat what doesn't fill a vector at the end of a tensor with other instructions.
    """
    problem = bench.case.problem
    if problem.batch < 2 or 0 < problem.prefilled < problem.batch:  # contexts come first
        return None
    rows = bench.inputs.tokens.reversed_rows()
    x = {name: value[rows] for name, value in bench.inputs.activations.items()}
    out, pools = bench.run(x=x | reverse(bench.inputs.others), slots=bench.base_pools.slots.flip(0))
    return (bench.close_to_base if bench.library else bench.equals_base)(out[rows.argsort()], pools, slice(None))


def _padding(bench: Bench) -> bool:
    """Padded sequences (below or past the pool, first, last or all) return zeros, touch nothing and change nobody."""
    batch, count = bench.case.problem.batch, bench.base_pools.state.shape[0]
    last, first, everyone = slice(batch - 1, batch), slice(0, 1), slice(0, batch)
    return all(_padded(bench, *case) for case in ((last, -1), (last, count), (first, -(2**31)), (everyone, 2**31 - 1)))


def _padded(bench: Bench, rows: slice, outside: int) -> bool:
    slots = bench.base_pools.slots.clone()
    slots[rows] = outside
    out, pools = bench.run(slots=slots)
    if bool((out[bench.inputs.tokens.rows(rows)] != 0).any()) or not all(untouched(pools).values()):
        return False
    live = slice(rows.stop, bench.case.problem.batch) if rows.start == 0 else slice(0, rows.start)
    initial = bench.pools()
    named = pools.slots[rows].tolist()
    kept = all(
        same_bits(own[slot], was[slot]) for own, was in ((pools.state, initial.state), (pools.window, initial.window)) for slot in named
    )
    return kept and bench.close_to_base(out, pools, live)


def _empty_batch(bench: Bench) -> bool:
    """No sequences: an empty output, nothing touched."""
    pools = bench.pools()
    x = {name: value[:0] for name, value in bench.inputs.activations.items()}
    run(bench.call, bench.case, pools, x | no_sequences(bench.inputs.others), slots=pools.slots[:0])
    initial = bench.pools()
    return same_bits(pools.state, initial.state) and same_bits(pools.window, initial.window)


def _neighbours(bench: Bench) -> bool | None:
    """NaN in the last sequence's inputs and state changes nobody else."""
    if bench.case.problem.batch < 2:
        return None
    batch = bench.case.problem.batch
    x = {name: value.clone() for name, value in bench.inputs.activations.items()}
    for value in x.values():
        value[bench.inputs.tokens.rows(slice(batch - 1, batch))] = torch.nan

    def poison(pools: Pools) -> None:
        pools.state[pools.index[-1]] = torch.nan

    out, pools = bench.run(poison, x | bench.inputs.others)
    return bench.equals_base(out, pools, slice(0, batch - 1))


def _fresh(bench: Bench) -> bool | None:
    """A fresh sequence starts from zero whatever its slot holds: NaN, inf, or zeros give the same bits."""
    if PHASES[bench.case.problem.op].flushes:
        return None
    place = torch.arange(bench.case.problem.batch, device=bench.base.device)
    cases = ((place % 2 == 0, torch.nan), (place % 2 == 1, torch.nan), (place >= 0, torch.inf))
    return all(_starts_over(bench, fresh, value) for fresh, value in cases if bool(fresh.any()))


def _starts_over(bench: Bench, fresh: Tensor, value: float) -> bool:
    """With `value` in the slots of fresh sequences all is as with zeros there."""

    def filled(value: float) -> Callable[[Pools], None]:
        def prepare(pools: Pools) -> None:
            pools.state[pools.index[fresh]] = value
            pools.window[pools.index[fresh]] = value

        return prepare

    zeroed, zeroed_pools = bench.run(filled(0.0), bench.inputs.activations | anew(bench.inputs.others, fresh))
    out, pools = bench.run(filled(value), fresh=fresh)
    return same_bits(out, zeroed) and same_bits(pools.state, zeroed_pools.state) and same_bits(pools.window, zeroed_pools.window)


def _poisoned_allocations(bench: Bench) -> bool:
    """Memory that the implementation allocates starts as NaN instead of what happened to lie there."""
    with _poisoned(bench.base.device):
        return bench.equals_base(*bench.run())


def _reversed_programs(bench: Bench) -> bool | None:
    """The interpreter runs programs in order; in reverse order nothing may change."""
    if not interpreter.active() or bench.base.device.type != "cpu":
        return None
    with interpreter.program_order(reverse=True):
        return bench.equals_base(*bench.run())


def _graph_replay(bench: Bench) -> bool | None:
    """A graph captured on other inputs and slots gives, on the current ones, what a direct call gives; twice, with a call between."""
    if bench.base.device.type != "cuda" or not bench.capturable or PHASES[bench.case.problem.op].flushes:
        return None
    pools, x = bench.pools(), bench.case.inputs(bench.step + 1).tensors
    pools.slots.copy_(bench.base_pools.slots.flip(0))
    run(bench.call, bench.case, pools, x)  # what tunes or compiles itself does so here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(bench.call, bench.case, pools, x)
    held = True
    for _ in range(2):
        initial = bench.pools()
        pools.take(initial)
        for name, value in bench.inputs.tensors.items():
            x[name].copy_(value)
        del initial
        bench.run()
        graph.replay()
        held &= bench.equals_base(out, pools)
    return held


CHECKS: dict[str, Callable[[Bench], bool | None]] = {
    "repeated": _repeated,
    "slot_permutation": _slot_permutation,
    "padding": _padding,
    "empty_batch": _empty_batch,
    "neighbours": _neighbours,
    "fresh": _fresh,
    "poisoned_allocations": _poisoned_allocations,
    "reversed_programs": _reversed_programs,
    "graph_replay": _graph_replay,
}


def _poisoned(device: torch.device) -> AbstractContextManager[None]:
    return _filled_blocks(device) if device.type == "cuda" else _filled_empty()


@contextmanager
def _filled_empty() -> Iterator[None]:
    """torch fills what `torch.empty` returns with NaN."""
    deterministic: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = fill


@contextmanager
def _filled_blocks(device: torch.device) -> Iterator[None]:
    """Blocks of the caching allocator are filled with 0xFF and freed, so that the next allocations find NaN there."""
    sizes = [1 << bits for bits in (9, 16, 20, 22, 24, 26)] * 4
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    torch.cuda.synchronize(device)
    del blocks
    yield
