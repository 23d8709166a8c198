"""The eager baseline: the KDA cell as a chain of torch operators over gathered rows.

Rounds where an eager model does: the convolution's output and the core are stored in the activation dtype. The state, of which
such a chain makes several FP32 copies, goes in slices of sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import validate

SLICE_ELEMENTS = 1 << 24  # of the state at a time


def decode(
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
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda.decode` in eager torch; arguments, pools, errors and return value as there."""
    sizes = validate.kda_decode(
        q, k, v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, slots=slots, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        validate.values(slots, sizes.slots)

    if sizes.sequences == 0:
        return torch.empty_like(v)
    n, heads, width = sizes.sequences, sizes.heads, sizes.heads * sizes.key_dim
    live = (slots >= 0) & (slots < sizes.slots)
    reads = live if fresh is None else live & ~fresh
    index = slots.long().clamp(0, max(sizes.slots - 1, 0))
    carried = torch.where(reads[:, None, None], window[index], 0) if sizes.slots else window.new_zeros(n, 3, sizes.channels)

    taps = torch.cat([carried, torch.cat([q, k, v], dim=-1)[:, None]], dim=1)
    conv = F.silu((taps.float() * conv_weight.float().T).sum(1)).to(q.dtype).float()
    q_n, k_n = (_l2norm(x.unflatten(1, (heads, sizes.key_dim))) for x in (conv[:, :width], conv[:, width : 2 * width]))
    values = conv[:, 2 * width :].unflatten(1, (heads, sizes.value_dim))

    rate = a_log.float().clamp(max=88.0).exp().repeat_interleave(sizes.key_dim)
    x = f.float() + dt_bias.float()
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    decay = g.exp().unflatten(1, (heads, sizes.key_dim))

    size = max(1, SLICE_ELEMENTS // max(1, heads * sizes.value_dim * sizes.key_dim))
    parts = zip(*(x.split(size) for x in (index, live, reads, q_n, k_n, values, decay, beta.float().sigmoid())), strict=True)
    core = torch.cat([_recurrence(state, *part) for part in parts]).to(q.dtype).float()

    normed = F.rms_norm(core, (sizes.value_dim,), norm_weight.float(), norm_eps).flatten(1)
    out = (normed * gate.float().sigmoid()).to(q.dtype)
    window[index[live]] = taps[:, 1:][live]
    return torch.where(live[:, None], out, 0)


def _recurrence(
    state: Tensor, index: Tensor, live: Tensor, reads: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The core [n, H, V] of some sequences, whose states advance in place."""
    n, heads, key_dim = k.shape
    rows = torch.where(reads[:, None, None, None], state[index].float(), 0.0) if len(state) else state.new_zeros(n, *state.shape[1:])
    rows = (rows * decay[:, :, None]).flatten(0, 1)
    k, columns = k.flatten(0, 1), (q * key_dim**-0.5).flatten(0, 1)[..., None]
    error = v.flatten(0, 1) - torch.bmm(rows, k[..., None]).squeeze(-1)
    rows.baddbmm_((error * beta.reshape(-1, 1))[..., None], k[:, None, :])
    state[index[live]] = rows.unflatten(0, (n, heads))[live].to(state.dtype)
    return torch.bmm(rows, columns).squeeze(-1).unflatten(0, (n, heads))


def _l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
