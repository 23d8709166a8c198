"""The input contract of `kda.mixer`: the weights of a layer once, the rest at every call. Structure always, values on request."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference import kda_offsets, validate, validate_verify
from reference.batch import Batch
from reference.kda_replay import Replay
from reference.kda_weights import NAMES, KdaWeights
from reference.validate import (
    FLOATS,
    KdaSizes,
    _contiguous,
    _dimensions,
    _fail,
    _fresh,
    _last_contiguous,
    _norm_eps,
    _pools,
    _tensor,
)

SIZES = "H comes from A_log [H], K and V from q_proj and v_proj, R from f_a_proj, hidden from q_proj"
ALWAYS_WIDE = ("A_log", "dt_bias")


@dataclass(frozen=True)
class MixerSizes:
    """Of a layer: hidden, heads [H] on this rank, key_dim K, value_dim V, rank R of the gates; dtype and device of its weights."""

    hidden: int
    heads: int
    key_dim: int
    value_dim: int
    rank: int
    dtype: torch.dtype
    device: torch.device

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return self.heads * (2 * self.key_dim + self.value_dim)

    def cell(self, tokens: int, sequences: int, slots: int) -> KdaSizes:
        """The sizes of a call of the layer's cell."""
        return KdaSizes(tokens, sequences, self.heads, self.key_dim, self.value_dim, slots)


def weights(given: KdaWeights) -> MixerSizes:
    """Structure of the weights of a layer; the sizes they imply."""
    if not isinstance(given, KdaWeights):
        _fail("weights", "a kda_weights.KdaWeights", type(given).__name__, "build one from the checkpoint's tensors", TypeError)
    for name, rank in (("A_log", 1), ("q_proj", 2), ("v_proj", 2), ("f_a_proj", 2)):
        x = getattr(given, name)
        if not isinstance(x, Tensor) or x.ndim != rank:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            _fail(name, f"a tensor with {rank} dimensions", got, "A_log is [H], a linear weight is [out, in]", TypeError)
    heads, hidden = given.A_log.shape[0], given.q_proj.shape[1]
    for name, x in (("q_proj", given.q_proj), ("v_proj", given.v_proj)):
        if heads == 0 or x.shape[0] == 0 or x.shape[0] % heads:
            _fail(name, f"rows that are a multiple of {heads} heads", x.shape[0], "A_log [H] gives the heads")
    key, value, rank = given.q_proj.shape[0], given.v_proj.shape[0], given.f_a_proj.shape[0]
    sizes = MixerSizes(hidden, heads, key // heads, value // heads, rank, given.q_proj.dtype, given.q_proj.device)
    if sizes.dtype not in FLOATS:
        _fail("q_proj", "a floating dtype", sizes.dtype, "dequantise FP8 weights first", TypeError)
    shapes = dict(
        q_proj=(key, hidden), k_proj=(key, hidden), v_proj=(value, hidden), b_proj=(heads, hidden),
        f_a_proj=(rank, hidden), f_b_proj=(key, rank), g_a_proj=(rank, hidden), g_b_proj=(value, rank),
        q_conv1d=(key, 1, 4), k_conv1d=(key, 1, 4), v_conv1d=(value, 1, 4), A_log=(heads,), dt_bias=(key,),
        o_norm=(sizes.value_dim,), o_proj=(hidden, value),
    )  # fmt: skip
    for name in NAMES:
        dtypes = (torch.float32, torch.float64) if name in ALWAYS_WIDE else (sizes.dtype,)
        _tensor(name, getattr(given, name), shapes[name], dtypes, sizes.device, SIZES)
    return sizes


def call(
    hidden: Tensor, layer: MixerSizes, *, state: Tensor, window: Tensor, batch: Batch, replay: Replay | None,
    lower_bound: float | None, norm_eps: float,
) -> None:  # fmt: skip
    """Structure of everything but the weights."""
    if not isinstance(hidden, Tensor) or hidden.ndim != 2:
        got = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        _fail("hidden", "a tensor [T, hidden]", got, "flatten sequences into rows", TypeError)
    tokens = hidden.shape[0]
    _tensor("hidden", hidden, (tokens, layer.hidden), (layer.dtype,), layer.device, "it must fit the layer's q_proj [H*K, hidden]")
    _last_contiguous("hidden", hidden)
    if not isinstance(batch, Batch):
        _fail("batch", "a batch.Batch", type(batch).__name__, "describe the rows: Batch(slots, cu_seqlens, fresh)", TypeError)
    _dimensions(state, batch.slots)
    sizes = layer.cell(tokens, batch.slots.shape[0], state.shape[0])
    _pools(sizes, layer.dtype, layer.device, state, window, batch.slots, lower_bound)
    _norm_eps(norm_eps)
    _rows(batch, sizes, layer.device)
    _fresh(batch.fresh, sizes, layer.device)
    if batch.drafts:
        _verify(batch, replay, sizes, layer)


def _verify(batch: Batch, replay: Any, sizes: KdaSizes, layer: MixerSizes) -> None:
    """Caches of the batch's drafts, counts and offsets of its generations."""
    drafts = validate_verify._replay(replay, sizes, layer.dtype, layer.dtype, layer.dtype, layer.device).drafts
    if drafts != batch.drafts:
        _fail("replay", f"caches of {batch.drafts} drafts", drafts, "batch.drafts is the S of the caches")
    count = batch.slots.shape[0] - batch.contexts
    tensors: dict[str, tuple[Any, int]] = {"batch.accepted": (batch.accepted, count)}
    for i, x in enumerate(batch.offsets or ()):
        tensors[f"batch.offsets[{i}]"] = (x, count + i)
    for name, (x, size) in tensors.items():
        _tensor(name, x, (size,), (torch.int32,), layer.device, "a count for each generation")
        _contiguous(**{name: x})


def _rows(batch: Batch, sizes: KdaSizes, device: torch.device) -> None:
    """The counts of contexts, generations and rows agree."""
    if batch.cu_seqlens is not None:
        x = batch.cu_seqlens
        if not isinstance(x, Tensor) or x.ndim != 1 or not 1 <= x.shape[0] <= sizes.sequences + 1:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            hint = f"contexts come first among the {sizes.sequences} slots"
            _fail("batch.cu_seqlens", f"int32 offsets of at most {sizes.sequences} contexts, then the total", got, hint)
        _tensor("batch.cu_seqlens", x, tuple(x.shape), (torch.int32,), device)
        _contiguous(**{"batch.cu_seqlens": x})
    rows = batch.generation_rows
    if sizes.tokens < rows or (batch.cu_seqlens is None and sizes.tokens != rows):
        expected = f"{rows} rows, {1 + batch.drafts} for each generation" + ("" if batch.cu_seqlens is None else ", after the contexts'")
        _fail("hidden", expected, sizes.tokens, "contexts need batch.cu_seqlens, a generation has one row and one for each of batch.drafts")


def values(batch: Batch, tokens: int, slot_count: int) -> None:
    """Named slots are distinct and the contexts fill their rows. Synchronises the device."""
    validate.values(batch.slots, slot_count)
    if batch.cu_seqlens is not None:
        validate.offsets(batch.cu_seqlens, tokens - batch.generation_rows)
    if batch.drafts and batch.accepted is not None:
        slots, fresh = batch.slots[batch.contexts :], None if batch.fresh is None else batch.fresh[batch.contexts :]
        validate_verify.accepted(batch.accepted, slots, slot_count, batch.drafts, fresh)
        if batch.offsets is not None:
            validate_verify.shared_offsets(batch.offsets, kda_offsets.offsets(batch.accepted, batch.drafts), slots, slot_count)
