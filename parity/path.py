"""Path proof: what really ran, observed while it ran.

Triton kernels by launch hook, or by the interpreter's counter; other device kernels by the profiler; else the torch
operators by a dispatch mode. Entering the reference's own code is seen by a profile hook.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimized import interpreter
from optimized.implementation import Implementation
from parity import oracle

ATEN = "aten::"


@dataclass
class Proof:
    """Launches by kernel name and what they prove."""

    kernels: Counter[str] = field(default_factory=Counter)
    proved: bool = False
    reason: str = ""
    library: bool = False  # torch operators did the work: declared so, or nothing else was seen
    hooked: frozenset[str] = frozenset()  # declared kernels that the launch hook sees, at every step

    def row(self, oracle_dtype: str) -> dict[str, Any]:
        launched = [{"name": name, "launches": count} for name, count in sorted(self.kernels.items())]
        return {"kernels": launched, "proved": self.proved, "oracle_dtype": oracle_dtype}


def observe(impl: Implementation, call: Callable[[], torch.Tensor], inputs: list[torch.Tensor], device: str) -> tuple[torch.Tensor, Proof]:
    """Run `call` once under observation. Not proved: a declared kernel was not seen, nothing was seen, or it ran the reference."""
    kernels: Counter[str] = Counter()
    aten: Counter[str] = Counter()
    with triton_launches(kernels), _aten_operators(aten), _reference_entries() as entered:
        out = call()
    hooked = frozenset(kernels) & set(impl.kernels)
    if not kernels and device.startswith("cuda"):
        kernels.update(profiled(call))
    declared, seen = set(impl.kernels), kernels + aten
    shown = {name: count for name, count in seen.items() if name in declared} or kernels or aten
    library = any(name.startswith(ATEN) for name in declared) or not kernels
    proof = Proof(Counter(shown), library=library, hooked=hooked)
    missing = sorted(declared - set(seen))
    if entered:
        proof.reason = f"same path: the candidate ran the reference ({', '.join(sorted(entered))})"
    elif isinstance(out, torch.Tensor) and any(_shares_memory(out, x) for x in inputs):
        proof.reason = "same path: the output is an input's memory"
    elif missing:
        proof.reason = f"not proved: declared but not seen: {', '.join(missing)}"
    elif not seen:
        proof.reason = "not proved: no kernel and no torch operator was seen"
    proof.proved = not proof.reason
    return out, proof


def _shares_memory(out: torch.Tensor, x: torch.Tensor) -> bool:
    return out.numel() > 0 and x.numel() > 0 and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@contextmanager
def triton_launches(kernels: Counter[str]) -> Iterator[None]:
    """Count Triton launches by name, compiled or interpreted."""
    if "triton" not in sys.modules:
        yield
    elif interpreter.active():
        with interpreter.launches() as seen:
            yield
        kernels.update(seen)
    else:
        from triton import knobs

        def hook(metadata: Any) -> None:
            kernels[metadata.get()["name"]] += 1

        knobs.runtime.launch_enter_hook.add(hook)
        try:
            yield
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)


@contextmanager
def _aten_operators(seen: Counter[str]) -> Iterator[None]:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[str(func._schema.name)] += 1
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


@contextmanager
def _reference_entries() -> Iterator[set[str]]:
    code, entered = oracle.entry_points(), set[str]()
    before = sys.getprofile()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in code:
            entered.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(before)


def profiled(call: Callable[[], Any]) -> Counter[str]:
    """Device kernels of one call, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return Counter(event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
