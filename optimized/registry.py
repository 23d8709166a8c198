"""Implementations by operator and name: callable, contract, declared kernels, and what they can run.

A table of names: nothing is imported until an implementation is loaded, so it answers without triton or peers.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from optimized import contracts, gemm_tiles, interpreter
from optimized.arch import CPU
from optimized.implementation import Implementation, Workload, resolve, version
from reference.points import Contract

ENTRY_POINTS = "glm_workbench.implementations"


def _triton_runs(work: Workload) -> tuple[bool, str]:
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


def _fla_runs(work: Workload) -> tuple[bool, str]:
    if importlib.util.find_spec("fla") is None:
        return False, "fla-core is not installed: pip install fla-core"
    if work.value_dim > 512:
        return False, "its gated norm launches another kernel above 512 values a head"
    runs, reason = _triton_runs(work)
    return runs, f"fla-core {version('fla-core')}, {reason}" if runs else reason


def _fla_mixes(work: Workload) -> tuple[bool, str]:
    if work.contexts:
        return False, "its baseline decodes only: no contexts"
    return (False, "its baseline decodes only: no drafts") if work.drafts else _fla_runs(work)


def _mixer_kernels(work: Workload) -> tuple[str, ...]:
    """Of our mixer: the cells of its phases, and the GEMM where the plan has a tile for it."""
    plan = gemm_tiles.plan(work.arch, work.dtype, work.rows, work.projected)
    gemm = ("linear_kernel",) if any((plan.wide, plan.low, plan.gates, plan.out)) else ()
    contexts = ("kda_prefill_prepare_kernel", "kda_prefill_scan_kernel", "kda_prefill_norm_kernel") if work.contexts else ()
    generations = ("kda_verify_kernel" if work.drafts else "kda_decode_kernel",) if work.batch > work.contexts else ()
    return (*gemm, *contexts, *generations)


def _fla_prefill_runs(work: Workload) -> tuple[bool, str]:
    if work.key_dim > 256:
        return False, "its chunk kernels take K up to 256"
    return _fla_runs(work)


def _flash_kda_runs(work: Workload) -> tuple[bool, str]:
    if work.arch == CPU or int(work.arch.removeprefix("sm")) < 90:
        return False, f"its kernels run from sm90 on, not on {work.arch}"
    supports = resolve("optimized.peers.flash_kda:supports")  # by name: who imports the registry doesn't depend on a peer's sources
    runs, reason = supports(work.dtype, work.key_dim, work.value_dim, work.lower_bound)
    return (runs, f"tokenspeed-flashkda {version('tokenspeed-flashkda')}, {reason}") if runs else (False, reason)


def _torch_runs(work: Workload) -> tuple[bool, str]:
    return True, "eager torch runs everywhere"


REGISTRY: dict[tuple[str, str], Implementation] = {
    (entry.op, entry.name): entry
    for entry in (
        Implementation(
            "kda.decode", "triton", "optimized.kda_decode:decode", contracts.EXACT, ("kda_decode_kernel",), _triton_runs, ("triton",)
        ),
        Implementation(
            "kda.decode",
            "fla",
            "optimized.peers.fla:decode",
            contracts.STAGED,
            ("causal_conv1d_update_kernel", "fused_recurrent_kda_fwd_kernel", "layer_norm_gated_fwd_kernel"),
            _fla_runs,
            ("fla-core", "triton"),
        ),
        Implementation(
            "kda.decode",
            "torch",
            "optimized.peers.eager:decode",
            contracts.STAGED,
            ("aten::bmm", "aten::baddbmm_", "aten::silu"),
            _torch_runs,
            ("torch",),
            capturable=False,  # the rows of padding are selected on the host
        ),
        Implementation(
            "kda.prefill",
            "triton",
            "optimized.kda_prefill:prefill",
            contracts.PREFILL,
            ("kda_prefill_prepare_kernel", "kda_prefill_scan_kernel", "kda_prefill_norm_kernel"),
            _triton_runs,
            ("triton",),
        ),
        Implementation(
            "kda.prefill",
            "fla",
            "optimized.peers.fla_prefill:prefill",
            contracts.FLA_CHUNKS,
            (
                "causal_conv1d_fwd_kernel",
                "l2norm_fwd_kernel",
                "fused_beta_sigmoid_fwd_kernel",
                "kda_gate_chunk_cumsum_vector_kernel",
                "chunk_kda_fwd_kernel_inter_solve_fused",
                "recompute_w_u_fwd_kda_kernel",
                "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
                "chunk_gla_fwd_kernel_o",
                "layer_norm_gated_fwd_kernel",
            ),
            _fla_prefill_runs,
            ("fla-core", "triton"),
            capturable=False,  # live slots are counted on the host
            patient=True,
        ),
        Implementation(
            "kda.prefill",
            "flash_kda",
            "optimized.peers.flash_kda:prefill",
            contracts.FLASH_KDA,
            ("causal_conv1d_fwd_kernel", "layer_norm_gated_fwd_kernel"),
            _flash_kda_runs,
            ("tokenspeed-flashkda", "fla-core", "triton"),
            capturable=False,
        ),
        Implementation(
            "kda.prefill",
            "torch",
            "optimized.peers.eager_prefill:prefill",
            contracts.STAGED,
            ("aten::bmm", "aten::baddbmm_", "aten::silu"),
            _torch_runs,
            ("torch",),
            capturable=False,
        ),
        Implementation(
            "kda.verify", "triton", "optimized.kda_verify:verify", contracts.EXACT, ("kda_verify_kernel",), _triton_runs, ("triton",)
        ),
        Implementation(
            "kda.verify",
            "torch",
            "optimized.peers.eager_verify:verify",
            contracts.STAGED,
            ("aten::bmm", "aten::baddbmm_", "aten::silu"),
            _torch_runs,
            ("torch",),
            capturable=False,
        ),
        Implementation(
            "kda.commit", "triton", "optimized.kda_verify:commit", contracts.EXACT, ("kda_commit_kernel",), _triton_runs, ("triton",)
        ),
        Implementation(
            "kda.commit",
            "torch",
            "optimized.peers.eager_verify:commit",
            contracts.STAGED,
            ("aten::bmm", "aten::baddbmm_", "aten::silu"),
            _torch_runs,
            ("torch",),
            capturable=False,
        ),
        Implementation(
            "kda.verify_offsets",
            "triton",
            "optimized.kda_offsets:offsets",
            contracts.EXACT,
            ("kda_verify_offsets_kernel",),
            _triton_runs,
            ("triton",),
        ),
        Implementation(
            "kda.verify_offsets",
            "torch",
            "reference.kda_offsets:offsets",
            contracts.EXACT,
            ("aten::clamp", "aten::arange"),
            _torch_runs,
            ("torch",),
        ),
        Implementation(
            "kda.mixer",
            "triton",
            "optimized.kda_mixer:mixer",
            contracts.MIXER,
            (),
            _triton_runs,
            ("triton",),
            prepare="optimized.kda_fused:fuse",
            contexts=contracts.MIXER_PREFILL,
            also=_mixer_kernels,
        ),
        Implementation(
            "kda.mixer",
            "fla",
            "optimized.peers.fla_mixer:mixer",
            contracts.MIXER_STAGED,
            ("causal_conv1d_update_kernel", "fused_recurrent_kda_fwd_kernel", "layer_norm_gated_fwd_kernel"),
            _fla_mixes,
            ("fla-core", "triton"),
        ),
        Implementation(
            "kda.mixer",
            "torch",
            "optimized.peers.eager_mixer:mixer",
            contracts.MIXER_STAGED,
            ("aten::mm", "aten::bmm", "aten::baddbmm_", "aten::silu"),
            _torch_runs,
            ("torch",),
            capturable=False,
        ),
    )
}


def operators() -> tuple[str, ...]:
    """Every operator that has an implementation."""
    return tuple(dict.fromkeys(op for op, _ in REGISTRY))


def implementations(op: str) -> tuple[Implementation, ...]:
    """The registered implementations of `op`, those of installed packages (entry points) included."""
    ours = [entry for (name, _), entry in REGISTRY.items() if name == op]
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    theirs = [_external(op, point.name.partition("/")[2], point.value) for point in points if point.name.partition("/")[0] == op]
    return tuple(ours + theirs)


def find(op: str, name: str) -> Implementation:
    """The implementation of `op` called `name`, or the user's own as `package.module:function`."""
    if op not in operators():
        raise ValueError(f"operator: expected one of {', '.join(operators())}, got {op!r}")
    if ":" in name:
        return _external(op, name, name)
    for entry in implementations(op):
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in implementations(op))
    raise ValueError(f"impl: expected one of {names} or package.module:function, got {name!r}")


def of_function(op: str, function: Callable[..., Any]) -> Implementation:
    """A user's function: `contract`, `kernels` and `capturable` are read from its attributes when it has them."""
    target = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    contract, kernels = getattr(function, "contract", None), getattr(function, "kernels", ())
    if contract is not None and not isinstance(contract, Contract):
        raise ValueError(f"{target}.contract: expected a reference.points.Contract, got {type(contract).__name__}; write Contract(...)")
    if not isinstance(kernels, tuple | list) or not all(isinstance(name, str) for name in kernels):
        raise ValueError(f"{target}.kernels: expected a tuple of names, got {kernels!r}; write ({kernels!r},) for one")
    capturable = bool(getattr(function, "capturable", False))
    return Implementation(op, target, target, contract, tuple(kernels), _anything, capturable=capturable, function=function)


def _anything(work: Workload) -> tuple[bool, str]:
    return True, "named by the user"


def _external(op: str, name: str, target: str) -> Implementation:
    """A user's implementation, by name."""
    module = target.partition(":")[0]
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"impl: can't import {module!r}: {error}; run from its folder or install it") from error
    function = resolve(target)
    return replace(of_function(op, function), name=name, target=target)
