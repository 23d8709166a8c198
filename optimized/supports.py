"""What an implementation is asked to run, and whether it can, with the reason; answered without triton or peers."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

from optimized import gemm_tiles, interpreter
from optimized.arch import CPU


@dataclass(frozen=True)
class Workload:
    """What an implementation is asked to run, and where: `arch` is `sm90`, ... or `cpu`."""

    op: str
    arch: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    heads: int
    batch: int
    key_dim: int
    value_dim: int
    lower_bound: float | None = None  # of the gate; None: softplus
    hidden: int = 0  # of a mixer
    contexts: int = 0  # sequences of a mixer that are prefilled, before the others
    rows: int = 0  # of the activations
    drafts: int = 0  # of a verify

    @property
    def projected(self) -> int:
        """Elements of a mixer's [q|k|v|f_a|g_a|b], whose gates have a rank of K."""
        return self.hidden * (self.heads * (2 * self.key_dim + self.value_dim + 1) + 2 * self.key_dim)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_runs(work: Workload) -> tuple[bool, str]:
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if work.dtype not in (torch.bfloat16, torch.float16, torch.float32) or work.state_dtype not in (torch.float32, torch.bfloat16):
        return False, "takes bf16, fp16 or fp32 activations over an fp32 or bf16 state"
    if work.arch == CPU:
        if not interpreter.active():
            return False, "on a CPU it runs in Triton's interpreter only: set TRITON_INTERPRET=1 before Triton is imported"
        reason = interpreter.unsupported(version("triton") or "0")
        return (False, reason) if reason else (True, "Triton's interpreter")
    return True, f"compiled for {work.arch}"


def fla_runs(work: Workload) -> tuple[bool, str]:
    if importlib.util.find_spec("fla") is None:
        return False, "fla-core is not installed: pip install fla-core"
    if work.value_dim > 512:
        return False, "its gated norm launches another kernel above 512 values a head"
    runs, reason = triton_runs(work)
    return runs, f"fla-core {version('fla-core')}, {reason}" if runs else reason


def fla_mixes(work: Workload) -> tuple[bool, str]:
    if work.contexts or work.drafts:
        return False, "its baseline decodes only: no contexts, no drafts"
    return fla_runs(work)


def mixer_kernels(work: Workload) -> tuple[str, ...]:
    """Of our mixer: the cells of its phases, and the GEMM where the plan has a tile for it."""
    plan = gemm_tiles.plan(work.arch, work.dtype, work.rows, work.projected)
    gemm = ("linear_kernel",) if any((plan.wide, plan.low, plan.gates, plan.out)) else ()
    contexts = ("kda_prefill_prepare_kernel", "kda_prefill_scan_kernel", "kda_prefill_norm_kernel") if work.contexts else ()
    generations = ("kda_verify_kernel" if work.drafts else "kda_decode_kernel",) if work.batch > work.contexts else ()
    return (*gemm, *contexts, *generations)


def fla_prefill_runs(work: Workload) -> tuple[bool, str]:
    if work.arch == CPU:
        return False, "its chunk kernels tune themselves on a device"
    if work.key_dim > 256:
        return False, "its chunk kernels take K up to 256"
    return fla_runs(work)


def flash_kda_runs(work: Workload) -> tuple[bool, str]:
    if work.arch == CPU or int(work.arch.removeprefix("sm")) < 90:
        return False, f"its kernels run from sm90 on, not on {work.arch}"
    from optimized.peers import flash_kda

    runs, reason = flash_kda.supports(work.dtype, work.key_dim, work.value_dim, work.lower_bound)
    return (runs, f"tokenspeed-flashkda {version('tokenspeed-flashkda')}, {reason}") if runs else (False, reason)


def torch_runs(work: Workload) -> tuple[bool, str]:
    return True, "eager torch runs everywhere"
