"""One input contract for every implementation of an operator: structure always, values on request.

Structure (shape, dtype, device, stride) costs nothing and is always checked, before any launch and before any state is
touched. Values (repeated slots) cost a device synchronisation: operators check them for CPU tensors, the workbench for
every case.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class KdaSizes:
    """tokens [T], sequences [N], heads [H] on this rank, key_dim K, value_dim V, the slots of the pool, and the drafts S of a verify."""

    tokens: int
    sequences: int
    heads: int
    key_dim: int
    value_dim: int
    slots: int
    drafts: int = 0

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return self.heads * (2 * self.key_dim + self.value_dim)


def _fail(argument: str, expected: str, got: object, hint: str, kind: type[Exception] = ValueError) -> None:
    raise kind(f"{argument}: expected {expected}, got {got}; {hint}")


CELL_SIZES = "heads come from beta [T, H], K and V from q and v"


def _tensor(
    name: str, x: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device, hint: str = CELL_SIZES
) -> None:
    if not isinstance(x, Tensor):
        _fail(name, "a tensor", type(x).__name__, "pass a torch.Tensor", TypeError)
        return
    if tuple(x.shape) != shape:
        _fail(name, f"shape {list(shape)}", list(x.shape), hint)
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        _fail(name, f"dtype {names}", str(x.dtype).removeprefix("torch."), f"convert it with {name}.to(...)", TypeError)
    if x.device != device:
        _fail(name, f"a tensor on {device}", x.device, f"move it with {name}.to({str(device)!r})")


def _last_contiguous(name: str, x: Tensor) -> None:
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        _fail(name, "the last dimension contiguous", f"stride {x.stride()}", f"pass {name}.contiguous() or a view of rows")


def _overlaps(x: Tensor) -> bool:
    """Whether two elements may lie at one address: a stride shorter than what lies inside it."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride < reach:
            return True
        reach = stride * size
    return False


def _head_dim(name: str, x: object, heads: int) -> int:
    if not isinstance(x, Tensor) or x.ndim != 2:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        _fail(name, "a tensor [T, H*D]", got, "flatten the heads into the last dimension", TypeError)
        return 0
    if heads == 0 or x.shape[1] == 0 or x.shape[1] % heads:
        _fail(name, f"a last dimension that is a multiple of {heads} heads", x.shape[1], "beta [T, H] gives the heads")
    return x.shape[1] // heads


def _kda_cell(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    f: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    window: Tensor,
    slots: Tensor,
    lower_bound: float | None,
    norm_eps: float,
) -> KdaSizes:
    """Structure of the arguments that every KDA cell operator shares; the sizes they imply."""
    if not isinstance(beta, Tensor) or beta.ndim != 2:
        got = list(beta.shape) if isinstance(beta, Tensor) else type(beta).__name__
        _fail("beta", "a tensor [T, H]", got, "one logit for each token and head", TypeError)
    (tokens, heads), device = beta.shape, beta.device
    key_dim, value_dim = _head_dim("q", q, heads), _head_dim("v", v, heads)
    _dimensions(state, slots)
    sizes = KdaSizes(tokens, slots.shape[0], heads, key_dim, value_dim, state.shape[0])

    for name, x, width in (
        ("q", q, heads * key_dim),
        ("k", k, heads * key_dim),
        ("v", v, heads * value_dim),
        ("f", f, heads * key_dim),
        ("beta", beta, heads),
        ("gate", gate, heads * value_dim),
    ):
        _tensor(name, x, (tokens, width), FLOATS, device)
        _last_contiguous(name, x)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            _fail(name, f"the dtype of q, {q.dtype}", x.dtype, "q, k and v share the convolution window", TypeError)

    _tensor("norm_weight", norm_weight, (value_dim,), FLOATS, device)
    _contiguous(norm_weight=norm_weight)
    _pools_and_weights(sizes, q.dtype, device, conv_weight, a_log, dt_bias, state, window, slots, lower_bound)
    _norm_eps(norm_eps)
    return sizes


def _norm_eps(norm_eps: object) -> None:
    if not (isinstance(norm_eps, float) and 0 < norm_eps < math.inf):
        _fail("norm_eps", "a positive finite float", norm_eps, "GLM-5.3-Flash has 1e-5")


def _dimensions(state: object, slots: object) -> None:
    if not isinstance(state, Tensor) or state.ndim != 4:
        got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
        _fail("state", "a pool [slots, H, V, K]", got, "K is innermost", TypeError)
    if not isinstance(slots, Tensor) or slots.ndim != 1:
        got = list(slots.shape) if isinstance(slots, Tensor) else type(slots).__name__
        _fail("slots", "an int32 tensor [N]", got, "one slot for each sequence, -1 for padding", TypeError)


def _contiguous(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_contiguous():
            _fail(name, "a contiguous tensor", f"stride {x.stride()}", f"pass {name}.contiguous()")


def _pools_and_weights(
    sizes: KdaSizes,
    activation: torch.dtype,
    device: torch.device,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    window: Tensor,
    slots: Tensor,
    lower_bound: float | None,
) -> None:
    """What the recurrence needs beside its tokens."""
    _tensor("conv_weight", conv_weight, (sizes.channels, 4), FLOATS, device)
    _tensor("a_log", a_log, (sizes.heads,), (torch.float32, torch.float64), device)
    _tensor("dt_bias", dt_bias, (sizes.heads * sizes.key_dim,), (torch.float32, torch.float64), device)
    _contiguous(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias)
    _pools(sizes, activation, device, state, window, slots, lower_bound)


def _pools(
    sizes: KdaSizes, activation: torch.dtype, device: torch.device, state: Tensor, window: Tensor, slots: Tensor, lower_bound: float | None
) -> None:
    """The pools, and where a call's rows of them lie."""
    heads, key_dim, value_dim = sizes.heads, sizes.key_dim, sizes.value_dim
    _tensor("state", state, (sizes.slots, heads, value_dim, key_dim), FLOATS, device)
    row = (value_dim * key_dim, key_dim, 1)
    if state.numel() and (state.stride()[1:] != row or (sizes.slots > 1 and state.stride(0) < heads * value_dim * key_dim)):
        _fail("state", f"rows with strides {row}, slots at least a row apart", f"strides {state.stride()}", "only the slot stride may vary")
    _tensor("window", window, (sizes.slots, 3, sizes.channels), (activation,), device)
    if _overlaps(window):
        _fail("window", "distinct elements", f"strides {window.stride()}", "an expanded or overlapping tensor can't be updated in place")
    for name, pool in (("state", state), ("window", window)):
        if pool.requires_grad:
            _fail(name, "a tensor that needs no gradient", "requires_grad=True", f"pass {name}.detach()")
    _tensor("slots", slots, (sizes.sequences,), (torch.int32,), device)
    _contiguous(slots=slots)

    if lower_bound is not None and not (isinstance(lower_bound, int | float) and -1e30 < lower_bound < 0):
        _fail("lower_bound", "a negative finite number, or None for the softplus gate", lower_bound, "GLM-5.3-Flash has -5.0")


def kda_decode(q: Tensor, k: Tensor, *, fresh: Tensor | None, **arguments: Any) -> KdaSizes:
    """Structure of `kda.decode`: one token for each sequence."""
    sizes = _kda_cell(q, k, **arguments)
    if sizes.tokens != sizes.sequences:
        _fail("slots", f"one slot for each of {sizes.tokens} tokens", sizes.sequences, "decode takes one token for each sequence")
    _fresh(fresh, sizes, q.device)
    return sizes


def kda_prefill(q: Tensor, k: Tensor, *, cu_seqlens: Tensor, fresh: Tensor | None, **arguments: Any) -> KdaSizes:
    """Structure of `kda.prefill`: sequences packed by cu_seqlens int32 [N+1]."""
    sizes = _kda_cell(q, k, **arguments)
    _tensor("cu_seqlens", cu_seqlens, (sizes.sequences + 1,), (torch.int32,), q.device)
    if not cu_seqlens.is_contiguous():
        _fail("cu_seqlens", "a contiguous tensor", f"stride {cu_seqlens.stride()}", "pass cu_seqlens.contiguous()")
    _fresh(fresh, sizes, q.device)
    return sizes


def _fresh(fresh: Tensor | None, sizes: KdaSizes, device: torch.device) -> None:
    if fresh is not None:
        _tensor("fresh", fresh, (sizes.sequences,), (torch.bool,), device)
        _contiguous(fresh=fresh)


def kernel_dtypes(activation: torch.dtype, state: torch.dtype, name: str = "q") -> None:
    """What an optimized kernel takes: BF16, FP16 or FP32 activations over an FP32 or BF16 pool."""
    if activation not in FLOATS[:3]:
        _fail(name, "dtype bfloat16, float16 or float32", activation, "float64 is for the reference", TypeError)
    if state not in (torch.float32, torch.bfloat16):
        _fail("state", "dtype float32 or bfloat16", state, "other pool dtypes are for the reference", TypeError)


def values(slots: Tensor, slot_count: int) -> None:
    """Named slots are distinct. Slots outside the pool are padding and may repeat. Synchronises the device."""
    named = slots[(slots >= 0) & (slots < slot_count)]
    unique, counts = named.unique(return_counts=True)
    if (counts > 1).any():
        repeated = unique[counts > 1].tolist()
        _fail("slots", "distinct slots", f"{repeated} more than once", "two sequences can't share a state; give each its own slot")


def offsets(cu_seqlens: Tensor, tokens: int) -> None:
    """cu_seqlens starts at 0, never goes down and ends at the count of tokens. Synchronises the device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(b < a for a, b in itertools.pairwise(ends)):
        _fail("cu_seqlens", f"offsets that rise from 0 to {tokens}", ends, "one offset for each sequence, then the total")
