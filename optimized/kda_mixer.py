"""`kda.mixer` in four launches at few tokens: every projection of the input, the gates' second one, the cell, the output.

The cell reads its activations as columns of the projections, nothing is copied. How each GEMM runs is a `MixerPlan`.
Source: spec of the model, section 4.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized import arch, contracts, gemm_tiles, interpreter, tiles, verify_tiles
from optimized.gemm_tiles import GemmTile, MixerPlan
from optimized.kda_fused import FusedWeights
from reference import validate, validate_mixer
from reference.batch import Batch, Phase
from reference.kda_replay import Replay

CONTRACT, PREFILL_CONTRACT = contracts.MIXER, contracts.MIXER_PREFILL  # of generations, of contexts


def mixer(
    hidden: Tensor,
    weights: FusedWeights,
    *,
    state: Tensor,
    window: Tensor,
    batch: Batch,
    replay: Replay | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda_mixer.mixer` with fused weights; arguments, pools, errors and return value as there.

    BF16, FP16 or FP32 activations, FP32 or BF16 state; rounds as CONTRACT says for generations, PREFILL_CONTRACT for contexts.
    Reads no value on the host, so that a CUDA graph may capture it. CPU tensors only in Triton's interpreter.
    """
    if not isinstance(weights, FusedWeights):
        raise TypeError(f"weights: expected a kda_fused.FusedWeights, got {type(weights).__name__}; call kda_fused.fuse once, at load")
    validate_mixer.call(
        hidden, weights.sizes, state=state, window=window, batch=batch, replay=replay, lower_bound=lower_bound, norm_eps=norm_eps
    )  # fmt: skip
    validate.kernel_dtypes(hidden.dtype, state.dtype, "hidden")
    if hidden.device.type == "cpu":
        interpreter.require("hidden")
        validate_mixer.values(batch, hidden.shape[0], state.shape[0])
    plan = gemm_tiles.plan(arch.of_device(str(hidden.device)), hidden.dtype, hidden.shape[0], weights.wide.numel())
    return run(plan, hidden, weights, state=state, window=window, batch=batch, replay=replay, lower_bound=lower_bound, norm_eps=norm_eps)


@torch.no_grad()
def run(
    plan: MixerPlan,
    hidden: Tensor,
    weights: FusedWeights,
    *,
    state: Tensor,
    window: Tensor,
    batch: Batch,
    replay: Replay | None = None,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """The launches of validated arguments with a given plan."""
    with _fp32_sums():
        activations = project(plan, hidden, weights)
        layer: dict[str, Any] = dict(
            conv_weight=weights.conv, a_log=weights.A_log, dt_bias=weights.dt_bias, norm_weight=weights.o_norm,
            state=state, window=window, lower_bound=lower_bound, norm_eps=norm_eps,
        )  # fmt: skip
        caches: dict[str, dict[str, Any]] = {"verify": {"replay": replay}}
        outs = [
            CELLS[part.phase](
                plan, **{name: x[part.rows] for name, x in activations.items()}, **layer, **part.arguments, **caches.get(part.phase, {})
            )
            for part in batch.parts(hidden.shape[0])
        ]
        # A copy, where phases meet: their cells return tensors of their own.
        mixed = outs[0] if len(outs) == 1 else torch.cat([*outs, activations["v"][:0]])
        return _linear(mixed, weights.o_proj, plan.out, weights.arrivals[0])


def project(plan: MixerPlan, hidden: Tensor, weights: FusedWeights) -> dict[str, Tensor]:
    """The cell's activations by its names, as views of what the GEMMs wrote."""
    size, (arrivals, beside) = weights.sizes, weights.arrivals
    key, value, channels = size.heads * size.key_dim, size.heads * size.value_dim, size.channels
    if plan.merged:
        wide = _linear(hidden, weights.wide, plan.wide, arrivals)
        raw, low = wide[:, :channels], wide[:, channels:]
        f, gate = _gates(low, weights, plan.gates, arrivals)
    else:
        with _beside(plan.overlap, hidden.device) as join:
            low = _linear(hidden, weights.wide[channels:], plan.low, beside)
            f, gate = _gates(low, weights, plan.gates, beside)
        raw = _linear(hidden, weights.wide[:channels], plan.wide, arrivals)
        join()
    q, k, v = raw.split([key, key, value], dim=1)
    return dict(q=q, k=k, v=v, f=f, beta=low[:, 2 * size.rank :], gate=gate)


def _gates(low: Tensor, weights: FusedWeights, tile: GemmTile | None, arrivals: Tensor) -> tuple[Tensor, Tensor]:
    """f and gate of low [T, 2*R + H], whose first columns are f_a's and g_a's."""
    size = weights.sizes
    key, value = size.heads * size.key_dim, size.heads * size.value_dim
    pair = low[:, : 2 * size.rank]
    if tile is not None:
        from optimized import gemm

        f, gate = gemm.linear(pair, weights.gates, tile, arrivals=arrivals, first=key).split([key, value], dim=1)
    elif key == value:
        f, gate = torch.bmm(pair.unflatten(1, (2, -1)).transpose(0, 1), weights.gates.unflatten(0, (2, -1)).mT)
    else:
        f, gate = (F.linear(x, w) for x, w in zip(pair.chunk(2, dim=1), weights.gates.split([key, value]), strict=True))
    return f, gate


def _linear(x: Tensor, w: Tensor, tile: GemmTile | None, arrivals: Tensor) -> Tensor:
    if tile is None:
        return F.linear(x, w)
    from optimized import gemm

    return gemm.linear(x, w, tile, arrivals=arrivals)


def _decode(plan: MixerPlan, q: Tensor, k: Tensor, *, state: Tensor, slots: Tensor, beta: Tensor, v: Tensor, **given: Any) -> Tensor:
    """`kda_decode.decode` of what is validated."""
    from optimized import kda_decode

    sequences, (slot_count, heads, value_dim, key_dim) = slots.shape[0], state.shape
    sizes = validate.KdaSizes(sequences, sequences, heads, key_dim, value_dim, slot_count)
    tile = tiles.tile(arch.of_device(str(q.device)), state.dtype, sequences * heads)
    if plan.overlap:  # it waits for two streams
        tile = replace(tile, pdl=False)
    return kda_decode.launch(tile, sizes, q, k, state=state, slots=slots, beta=beta, v=v, **given)


def _prefill(plan: MixerPlan, **given: Any) -> Tensor:
    from optimized import kda_prefill

    return kda_prefill.prefill(**given)


def _verify(plan: MixerPlan, q: Tensor, k: Tensor, *, state: Tensor, slots: Tensor, replay: Replay, **given: Any) -> Tensor:
    """`kda_verify.verify` of what is validated."""
    from optimized import kda_verify

    sequences, (slot_count, heads, value_dim, key_dim) = slots.shape[0], state.shape
    sizes = validate.KdaSizes(q.shape[0], sequences, heads, key_dim, value_dim, slot_count, replay.drafts)
    tile = tiles.tile(arch.of_device(str(q.device)), state.dtype, sequences * heads, verify_tiles.VERIFY)
    if plan.overlap:
        tile = replace(tile, pdl=False)
    return kda_verify.launch(tile, sizes, q, k, state=state, slots=slots, replay=replay, **given)


CELLS: Mapping[Phase, Callable[..., Tensor]] = {"decode": _decode, "prefill": _prefill, "verify": _verify}


@contextmanager
def _beside(overlap: bool, device: torch.device) -> Iterator[Callable[[], None]]:
    """What is inside runs on a second stream; the current one waits for it when the yielded function is called.

    Its tensors need no record_stream: each stream has a second one of its own, which allocates only in here, when it has
    waited for all that used the last ones.
    """
    if not overlap or device.type != "cuda":
        yield lambda: None
        return
    current = torch.cuda.current_stream(device)
    side = _second_stream(device, current.cuda_stream)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield lambda: current.wait_stream(side)


@functools.cache
def _second_stream(device: torch.device, first: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _fp32_sums() -> Iterator[None]:
    """The library adds shares of K in FP32 too, whatever the process has set."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
