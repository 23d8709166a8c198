"""`kda.mixer`, hidden to hidden: the projections, the cell of each phase, the output projection.

Computes in the dtype of its inputs, at least FP32: inputs, weights and pools in FP64 give the gold. Source: spec of the model,
section 4 (transformers `glm5_next`, TensorRT-LLM).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference import kda, kda_verify, validate_mixer
from reference.batch import Batch, Phase
from reference.kda_replay import Replay
from reference.kda_weights import NAMES, KdaWeights
from reference.points import At, exact
from reference.precision import full_precision

CELLS: Mapping[Phase, Callable[..., Tensor]] = {"decode": kda.decode, "prefill": kda.prefill, "verify": kda_verify.verify}


def project(hidden: Tensor, weights: KdaWeights, at: At = exact) -> dict[str, Tensor]:
    """The cell's activations [T, ...] by its names; f and gate through two linears of low rank R."""
    raw = at("proj_qkv", torch.cat([hidden @ w.T for w in (weights.q_proj, weights.k_proj, weights.v_proj)], dim=-1))
    q, k, v = raw.split([w.shape[0] for w in (weights.q_proj, weights.k_proj, weights.v_proj)], dim=-1)
    f = at("proj_f", at("proj_f_a", hidden @ weights.f_a_proj.T) @ weights.f_b_proj.T)
    gate = at("proj_g", at("proj_g_a", hidden @ weights.g_a_proj.T) @ weights.g_b_proj.T)
    beta = at("proj_b", hidden @ weights.b_proj.T)
    return dict(q=q, k=k, v=v, f=f, beta=beta, gate=gate)


@full_precision
def mixer(
    hidden: Tensor,
    weights: KdaWeights,
    *,
    state: Tensor,
    window: Tensor,
    batch: Batch,
    replay: Replay | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
    at: At = exact,
) -> Tensor:
    """out = cell(hidden Wq^T, hidden Wk^T, hidden Wv^T, (hidden Wfa^T) Wfb^T, hidden Wb^T, (hidden Wga^T) Wgb^T) Wo^T.

    hidden [T, hidden]: the rows of batch's contexts, then of its generations; the cell is `kda.prefill` for the first,
    `kda.decode` for the others, `kda.verify` where batch has drafts, with replay, the layer's own caches. Weights as in
    `KdaWeights`, in the dtype of hidden but A_log and dt_bias.
    state [slots, H, V, K] and window [slots, 3, 2*H*K + H*V] are updated in place at batch.slots; rules for slots, fresh and
    padding, lower_bound and norm_eps as in `kda.decode`. Rows of padding are zero.
    Returns [T, hidden] in the dtype of hidden: of this rank's heads, to be summed over ranks. ValueError or TypeError before
    anything is touched.
    """
    sizes = validate_mixer.weights(weights)
    validate_mixer.call(hidden, sizes, state=state, window=window, batch=batch, replay=replay, lower_bound=lower_bound, norm_eps=norm_eps)
    validate_mixer.values(batch, hidden.shape[0], state.shape[0])

    dtype = kda.compute_dtype(hidden, state)
    weights = KdaWeights(**{name: getattr(weights, name).to(dtype) for name in NAMES})
    activations = project(hidden.to(dtype), weights, at)
    cell_weights: dict[str, Any] = dict(
        conv_weight=torch.cat([weights.q_conv1d, weights.k_conv1d, weights.v_conv1d])[:, 0],
        a_log=weights.A_log, dt_bias=weights.dt_bias, norm_weight=weights.o_norm,
    )  # fmt: skip
    wide = window.to(dtype)  # raw inputs go on unrounded; what is stored rounds
    caches = None if replay is None else Replay(replay.qkv.to(dtype), replay.f.to(dtype), replay.beta.to(dtype))
    mixed = hidden.new_zeros(hidden.shape[0], sizes.heads * sizes.value_dim, dtype=dtype)
    for part in batch.parts(hidden.shape[0]):
        rows = {name: x[part.rows] for name, x in activations.items()}
        mixed[part.rows] = CELLS[part.phase](
            **rows, **cell_weights, state=state, window=wide, lower_bound=lower_bound, norm_eps=norm_eps, at=at, **part.arguments,
            **({"replay": caches} if part.phase == "verify" else {}),
        )  # fmt: skip
    if wide is not window:
        named = batch.slots[(batch.slots >= 0) & (batch.slots < len(window))].long()
        window[named] = wide[named].to(window.dtype)
        if replay is not None and caches is not None and batch.drafts:
            for own, made in zip(vars(replay).values(), vars(caches).values(), strict=True):
                own[named] = made[named].to(own.dtype)
    return at("o_proj", mixed @ weights.o_proj.T).to(hidden.dtype)
