"""The eager baseline of `kda.mixer`: a linear for each weight and the eager cells."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.peers import eager, eager_prefill, eager_verify
from reference import validate, validate_mixer
from reference.batch import Batch, Phase
from reference.kda_replay import Replay
from reference.kda_weights import KdaWeights

CELLS: Mapping[Phase, Callable[..., Tensor]] = {"decode": eager.decode, "prefill": eager_prefill.prefill, "verify": eager_verify.verify}


@torch.no_grad()
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
) -> Tensor:
    """`reference.kda_mixer.mixer` in eager torch; arguments, pools, errors and return value as there."""
    sizes = validate_mixer.weights(weights)
    validate_mixer.call(hidden, sizes, state=state, window=window, batch=batch, replay=replay, lower_bound=lower_bound, norm_eps=norm_eps)
    validate.kernel_dtypes(hidden.dtype, state.dtype, "hidden")
    if hidden.device.type == "cpu":
        validate_mixer.values(batch, hidden.shape[0], state.shape[0])
    activations = project(hidden, weights)
    layer: dict[str, Any] = dict(
        conv_weight=torch.cat([weights.q_conv1d, weights.k_conv1d, weights.v_conv1d])[:, 0],
        a_log=weights.A_log, dt_bias=weights.dt_bias, norm_weight=weights.o_norm,
        state=state, window=window, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    caches: dict[str, dict[str, Any]] = {"verify": {"replay": replay}}
    outs = [
        CELLS[part.phase](
            **{name: x[part.rows] for name, x in activations.items()}, **layer, **part.arguments, **caches.get(part.phase, {})
        )
        for part in batch.parts(hidden.shape[0])
    ]
    return F.linear(torch.cat([*outs, activations["v"][:0]]), weights.o_proj)


def project(hidden: Tensor, weights: KdaWeights) -> dict[str, Tensor]:
    """The cell's activations by its names, eight linears."""
    return dict(
        q=F.linear(hidden, weights.q_proj),
        k=F.linear(hidden, weights.k_proj),
        v=F.linear(hidden, weights.v_proj),
        f=F.linear(F.linear(hidden, weights.f_a_proj), weights.f_b_proj),
        beta=F.linear(hidden, weights.b_proj),
        gate=F.linear(F.linear(hidden, weights.g_a_proj), weights.g_b_proj),
    )
