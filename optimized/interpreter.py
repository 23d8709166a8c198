"""Triton's interpreter, repaired, so that a parity verdict on a machine without a GPU is right.

Triton 3.9 truncates FP32 to BF16, loses carries in FP8 and multiplies the raw bits of BF16; `repair` puts there what a GPU does.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

# mantissa bits, exponent bias, code of the largest finite value (conversions saturate, as `cvt.rn.satfinite` does)
_FP8 = {"fp8e4nv": (3, 7, 0x7E), "fp8e5": (2, 15, 0x7B)}
_NARROW = ("bf16", *_FP8)
_NATIVE = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


@dataclass
class _Lane:
    """What the installed repairs look up at each launch."""

    repaired: bool = False
    reverse: bool = False
    counters: list[Counter[str]] = field(default_factory=list)
    patched: set[int] = field(default_factory=set)  # ids of the namespaces that this launch has pointed at the interpreter


_lane = _Lane()


def active() -> bool:
    """True when kernels of this process are interpreted; once Triton is imported, its own belief counts."""
    if (triton := sys.modules.get("triton")) is not None:
        return bool(triton.knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y") and find_spec("triton") is not None


def require(argument: str) -> None:
    """ValueError for a CPU tensor that only the interpreter could run, outside it."""
    if not active():
        raise ValueError(f"{argument}: expected a CUDA tensor, got one on cpu; set TRITON_INTERPRET=1 before importing triton")


def unsupported(triton_version: str) -> str | None:
    """Why the interpreter of this Triton can't give verdicts, or None: a wrong lane is worse than none."""
    found = re.match(r"(\d+)\.(\d+)", triton_version)
    if found and (int(found[1]), int(found[2])) >= (3, 9):
        return None
    return f"Triton {triton_version!r}: install triton >= 3.9; before, for-loops with run-time bounds fail with numpy >= 2.4"


def _fp8_values(name: str, mantissa_bits: int, bias: int, largest: int) -> np.ndarray:
    """FP32 value of all 256 codes."""
    exponent, mantissa = np.divmod(np.arange(128), 1 << mantissa_bits)
    value = np.ldexp(np.float32(1 << mantissa_bits) * (exponent > 0) + mantissa, np.maximum(exponent, 1) - bias - mantissa_bits)
    value[largest + 1 :] = np.nan
    value[0x7C] = np.inf if name == "fp8e5" else value[0x7C]
    return np.concatenate([value, -value]).astype(np.float32)


_FP8_VALUES = {name: _fp8_values(name, *layout) for name, layout in _FP8.items()}


def _widen(data: np.ndarray, name: str) -> np.ndarray:
    """FP32 values of a tensor of the Triton type `name`, from the integers that the interpreter keeps BF16 and FP8 in."""
    if name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return _FP8_VALUES[name][data] if name in _FP8 else data.astype(np.float32)


def _round_to_bf16(values: np.ndarray, toward_zero: bool) -> np.ndarray:
    """FP32 to the bits of BF16, to nearest even unless `toward_zero`; NaN gives 0x7FFF, as `cvt.rn.bf16.f32` does."""
    bits = values.view(np.uint32)
    rounded = bits if toward_zero else bits + (0x7FFF + ((bits >> 16) & 1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> 16).astype(np.uint16)


def _round_to_fp8(values: np.ndarray, name: str) -> np.ndarray:
    """FP32 to the codes of FP8, to nearest even and saturating; NaN gives 0x7F."""
    mantissa_bits, bias, largest = _FP8[name]
    rebias, dropped = (127 - bias) << mantissa_bits, 23 - mantissa_bits
    bits = (magnitude := np.abs(values)).view(np.uint32)
    normal = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
    normal = np.minimum(normal, largest + rebias) - rebias
    # FP32 spacing above `anchor` is the smallest FP8 subnormal, so that the addition itself rounds to nearest even.
    anchor = np.float32(2.0 ** (24 - bias - mantissa_bits))
    subnormal = (magnitude + anchor).view(np.uint32) - anchor.view(np.uint32)
    code = np.where(magnitude < np.float32(2.0 ** (1 - bias)), subnormal, normal) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def _refuse_narrow(*operands: Any) -> None:
    """TypeError for BF16 and FP8 operands, since the interpreter would compute on their bits; looks into tuples."""
    for operand in operands:
        if isinstance(operand, tuple):
            _refuse_narrow(*operand)
        elif getattr(operand, "dtype", None) is not None and operand.dtype.scalar.name.startswith(("bf16", "fp8")):
            raise TypeError(f"arithmetic on {operand.dtype.scalar}: widen bf16 and fp8 before arithmetic, with .to(tl.float32) at the load")


_REPAIRS: dict[str, tuple[list[str], Callable[..., Any]]] = {}


def _repairs(path: str, parameters: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register body(interpreter module, original, ...) for the attribute `path`, which must take `parameters` (default: the body's)."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        _REPAIRS[path] = (parameters.split() or list(inspect.signature(body).parameters)[2:], body)
        return body

    return register


@_repairs("_convert_float")
def _convert_float(module: Any, original: Any, input: np.ndarray, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> np.ndarray:
    source, name, toward_zero = input_dtype.name, output_dtype.name, rounding_mode == module._ir.ROUNDING_MODE.RTZ
    if not {source, name} <= {*_NATIVE, *_NARROW} or (toward_zero and name != "bf16"):
        raise TypeError(f"the repaired interpreter doesn't convert {source} to {name} with {rounding_mode}: use {_NARROW} and rtne")
    values = _widen(input, source)
    if name == "bf16":
        return _round_to_bf16(values, toward_zero)
    return _round_to_fp8(values, name) if name in _FP8 else values.astype(_NATIVE[name])


@_repairs("InterpreterBuilder.cast_impl")
def _cast(module: Any, original: Any, self: Any, src: Any, dst_type: Any) -> Any:
    if dst_type.scalar.name == "bf16" and src.dtype.scalar.name not in ("bf16", "fp32"):
        src = module.TensorHandle(src.data.astype(np.float32), module.tl.float32)
    return original(self, src, dst_type)


@_repairs("InterpreterBuilder.binary_op")
def _binary_op(module: Any, original: Any, self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    _refuse_narrow(lhs, rhs)
    result = original(self, lhs, rhs, op)
    if result.data.dtype == np.bool_:
        result.dtype = module.tl.int1  # a comparison kept its operands' type, which made a scalar mask an integer one
    return result


@_repairs("InterpreterBuilder.unary_op", "self arg op")
@_repairs("InterpreterBuilder.ternary_op", "self lhs rhs other op")
@_repairs("InterpreterBuilder.create_rsqrt", "self arg")
@_repairs("InterpreterBuilder.create_erf", "self arg")
@_repairs("InterpreterBuilder.create_fma", "self x y z")
@_repairs("InterpreterBuilder.create_atomic_rmw", "self rmwOp ptr val mask sem scope")
@_repairs("ReduceScanOpInterface.apply", "self input")
def _refusing(module: Any, original: Any, self: Any, *args: Any) -> Any:
    if args[-1] is not np.where:  # selecting moves bits, and is right on any type
        _refuse_narrow(*args)
    return original(self, *args)


@_repairs("ReduceOps.min_max")
def _min_max(module: Any, original: Any, self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}  # the same values, with no warning for a row of NaN
    return original(self, input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)


@_repairs("InterpreterBuilder.create_dot", "self a b d input_precision max_num_imprecise_acc")
def _dot(module: Any, original: Any, self: Any, a: Any, b: Any, *args: Any) -> Any:
    wide = [module.TensorHandle(_widen(x.data, x.dtype.name), module.tl.float32) if x.dtype.name in _NARROW else x for x in (a, b)]
    return original(self, *wide, *args)


@_repairs("InterpreterBuilder.create_masked_load")
def _masked_load(module: Any, original: Any, self: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
    if other is None and ptrs.data.size > 1:  # of a scalar, an `other` of 0 never arrives here; of a block, it is undefined on a GPU
        # All bits set is NaN or -1, which a kernel that uses it doesn't survive.
        dtype = module._get_np_dtype(ptrs.get_element_ty())
        other = module.TensorHandle(np.full(ptrs.data.shape, np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]), ptrs.get_element_ty())
    return original(self, ptrs, mask, other, cache_policy, is_volatile)


@_repairs("InterpreterBuilder.set_grid_idx")
def _set_grid_idx(module: Any, original: Any, self: Any, x: int, y: int, z: int) -> None:
    original(self, *(size - 1 - i if _lane.reverse else i for size, i in zip(self.grid_dim, (x, y, z), strict=True)))


@_repairs("_patch_lang")
def _patch_lang(module: Any, original: Any, fn: Any) -> Any:
    """Once a launch and namespace: Triton does it at each call of a device function, which is nearly half of a program's time."""
    if id(fn.__globals__) in _lane.patched:
        return module._LangPatchScope()
    _lane.patched.add(id(fn.__globals__))
    return original(fn)


@_repairs("GridExecutor.__call__")
def _launch(module: Any, original: Any, self: Any, *args_dev: Any, **kwargs: Any) -> None:
    _lane.patched.clear()
    with np.errstate(all="ignore"):
        original(self, *args_dev, **kwargs)
    for counter in _lane.counters if all(module.interpreter_builder.grid_dim) else []:  # an empty grid runs nothing
        counter[self.fn.__name__] += 1


def _find(module: Any, path: str, parameters: list[str]) -> tuple[Any, str, Any]:
    """Owner, name and value of a patch point; RuntimeError when it is gone or takes other parameters."""
    owner_name, _, name = path.rpartition(".")
    owner = getattr(module, owner_name, None) if owner_name else module
    original = getattr(owner, name, None)
    found = None if original is None else list(inspect.signature(original).parameters)
    if found != parameters:
        triton, seen = sys.modules["triton"], "is missing" if found is None else f"takes {found}, expected {parameters}"
        raise RuntimeError(f"Triton {triton.__version__}: {module.__name__}.{path} {seen}; adapt {__name__} to this version")
    return owner, name, original


def _bound(body: Callable[..., Any], module: Any, original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: body(module, original, *args, **kwargs)


def repair() -> None:
    """Patch Triton's interpreter, once; nothing when it isn't active; RuntimeError, and no patch, when this Triton has other parts."""
    if _lane.repaired or not active():
        return
    from triton.runtime import interpreter as module

    points = [(*_find(module, path, parameters), body) for path, (parameters, body) in _REPAIRS.items()]
    for owner, name, original, body in points:
        setattr(owner, name, _bound(body, module, original))
    _lane.repaired = True


@contextmanager
def program_order(reverse: bool) -> Iterator[None]:
    """Run grid programs last to first inside, with their own ids: a kernel whose result changes has a race."""
    if reverse and not active():
        raise RuntimeError("program_order(reverse=True): expected Triton's interpreter; set TRITON_INTERPRET=1 before importing triton")
    repair()
    before, _lane.reverse = _lane.reverse, reverse
    try:
        yield
    finally:
        _lane.reverse = before


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count the launches inside by kernel name, as the interpreter saw them: what ran is observed, not declared."""
    repair()
    counter: Counter[str] = Counter()
    _lane.counters.append(counter)
    try:
        yield counter
    finally:
        _lane.counters.pop()
