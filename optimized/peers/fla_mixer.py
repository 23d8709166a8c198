"""The FLA baseline of `kda.mixer`: a linear for each weight, as in FLA's own layer, and its decode chain."""

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized import interpreter
from optimized.peers import eager_mixer
from reference import validate, validate_mixer
from reference.batch import Batch
from reference.kda_replay import Replay
from reference.kda_weights import KdaWeights


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
    """`reference.kda_mixer.mixer` of generation batches with FLA's kernels; arguments, pools, errors and return value as there.

    Contexts are refused. Copies and tuning as in `peers.fla.decode`, and the taps of q, k and v are joined at each call.
    """
    sizes = validate_mixer.weights(weights)
    validate_mixer.call(hidden, sizes, state=state, window=window, batch=batch, replay=replay, lower_bound=lower_bound, norm_eps=norm_eps)
    validate.kernel_dtypes(hidden.dtype, state.dtype, "hidden")
    if batch.cu_seqlens is not None:
        raise ValueError(f"batch: expected generations only, got {batch.contexts} contexts; FLA's prefill is another peer")
    if batch.drafts:
        raise ValueError(f"batch: expected one row for each generation, got {batch.drafts} drafts; FLA's verify is another peer")
    if hidden.device.type == "cpu":
        interpreter.require("hidden")
        validate_mixer.values(batch, hidden.shape[0], state.shape[0])
    from optimized.peers import fla

    mixed = fla.decode(
        **eager_mixer.project(hidden, weights), slots=batch.slots, fresh=batch.fresh,
        conv_weight=torch.cat([weights.q_conv1d, weights.k_conv1d, weights.v_conv1d])[:, 0],
        a_log=weights.A_log, dt_bias=weights.dt_bias, norm_weight=weights.o_norm,
        state=state, window=window, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    return F.linear(mixed, weights.o_proj)
