"""What this machine can run, and what is known to be wrong with its versions."""

import importlib.util
import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from optimized import interpreter, registry
from optimized.arch import ARCHS, CPU, of_device
from optimized.implementation import Workload


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok None: neither good nor bad."""

    name: str
    found: str
    ok: bool | None = None


@dataclass(frozen=True)
class CompilerFault:
    """A known fault of Triton versions [first, fixed), on some architectures."""

    first: tuple[int, int, int]
    fixed: tuple[int, int, int]
    archs: tuple[str, ...]
    what: str


COMPILER_FAULTS = (CompilerFault((3, 4, 0), (3, 7, 1), ("sm90",), "a transposed wgmma accumulator fed to another dot is miscompiled"),)
PEERS = ("fla-core", "transformers")


def examine(device: str) -> list[Finding]:
    """Every finding, most important first."""
    here = of_device(device)
    known = here == CPU or here in ARCHS
    findings = [
        Finding("python", platform.python_version(), True),
        Finding("torch", torch.__version__, True),
        Finding("device", torch.cuda.get_device_name(device) if here != CPU else "no GPU: kernels run in Triton's interpreter", None),
        Finding("architecture", here if known else f"{here} is not in the table: dispatch has no rule for it", known),
    ]
    version = _version("triton")
    if version is None or importlib.util.find_spec("triton") is None:
        return [*findings, Finding("triton", "not installed: pip install triton", False)]
    findings.append(Finding("triton", version, True))
    if here == CPU:
        findings.append(_lane(version))
    faults = [Finding("compiler fault", fault.what, None) for fault in known_faults(version, here)]
    findings += faults or [Finding("compiler fault", f"none known of Triton {version} on {here}", None)]
    findings += [Finding(name, _version(name) or "not installed", None) for name in PEERS]
    for op in registry.operators():
        for entry in registry.implementations(op):
            runs, reason = entry.supports(Workload(op, here, torch.bfloat16, torch.float32, 16, 1, 128, 128))
            findings.append(Finding(f"{op} {entry.name}", reason, True if runs else None))
    return findings


def known_faults(version: str, arch: str) -> list[CompilerFault]:
    """The known faults that this Triton has on this architecture."""
    parts = (*(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:3]), 0, 0)[:3]
    return [fault for fault in COMPILER_FAULTS if fault.first <= parts < fault.fixed and arch in fault.archs]


def _lane(version: str) -> Finding:
    reason = interpreter.unsupported(version)
    if reason:
        return Finding("interpreter", reason, False)
    if not interpreter.active():
        return Finding("interpreter", "off: set TRITON_INTERPRET=1 before Triton is imported", False)
    try:
        interpreter.repair()
    except RuntimeError as error:
        return Finding("interpreter", f"can't be repaired: {error}", False)
    return Finding("interpreter", "repaired: BF16 and FP8 round as a GPU does", True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
