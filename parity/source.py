"""The cases of the source PRs, as problems: `workbench sweep --preset source`."""

from collections.abc import Iterator
from dataclasses import replace

from parity.problem import Problem

REPORTED = (1, 8, 32, 64, 128)  # steps of the decode from zero


def problems(device: str) -> list[Problem]:
    """Every case, at the PRs' sizes on a GPU; on a CPU the same list at one small size."""
    return list(_on_gpu(device) if device.startswith("cuda") else _on_cpu(device))


def _on_gpu(device: str) -> Iterator[Problem]:
    for heads in (8, 16, 32, 64):
        for batch in (1, 16, 64, 256):
            yield Problem("kda.mixer", heads=heads, batch=batch, steps=64, device=device)
    yield from _others("glm-5.3-flash", 16, 16, device)


def _on_cpu(device: str) -> Iterator[Problem]:
    yield Problem("kda.mixer", "tiny", heads=8, batch=1, steps=64, device=device)
    yield from _others("tiny", 2, 1, device)


def _others(model: str, heads: int, batch: int, device: str) -> Iterator[Problem]:
    """Six steps on each kind of state; two rounds of verify; a BF16 pool; 128 tokens from zero."""

    def sized(op: str, steps: int) -> Problem:
        return Problem(op, model, heads, batch, steps=steps, device=device)

    for state in ("fp32", "bf16"):
        yield replace(sized("kda.mixer", 6), state_dtype=state, seed=-1)
    for offsets in ("layer", "model"):
        yield replace(sized("kda.verify", 2), drafts=3, offsets=offsets, seed=-1)
    yield replace(sized("kda.decode", 64), state_dtype="bf16", seed=-1)
    yield replace(sized("kda.mixer", REPORTED[-1]), fresh=1, seed=-1)
