"""The eager baseline of `kda.prefill`: `eager.decode` token by token over FP32 copies of the rows.

Rounds where `eager.decode` does: the convolution's output and the core.
"""

import torch
from torch import Tensor

from optimized.peers import eager
from reference import validate


def prefill(
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
    cu_seqlens: Tensor,
    slots: Tensor,
    fresh: Tensor | None = None,
    lower_bound: float | None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """`reference.kda.prefill` in eager torch; arguments, pools, errors and return value as there. Reads cu_seqlens on the host."""
    weights = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate.kda_prefill(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, cu_seqlens=cu_seqlens, slots=slots, fresh=fresh,
        lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.kernel_dtypes(q.dtype, state.dtype)
    if q.device.type == "cpu":
        validate.values(slots, sizes.slots)
        validate.offsets(cu_seqlens, sizes.tokens)
    out = q.new_zeros(sizes.tokens, sizes.heads * sizes.value_dim)
    live = ((slots >= 0) & (slots < sizes.slots)).nonzero().flatten()
    rows, starts, ends = slots[live].long(), cu_seqlens[:-1][live].long(), cu_seqlens[1:][live].long()
    copies = dict(state=state[rows].float(), window=window[rows])
    if fresh is not None:
        for copy in copies.values():
            copy[fresh[live]] = 0

    own = torch.arange(len(live), dtype=torch.int32, device=q.device)
    for offset in range(int((ends - starts).max()) if len(live) else 0):
        active = starts + offset < ends
        token = (starts + offset)[active]
        new_q, new_k, new_v, new_f, new_beta, new_gate = (x[token] for x in (q, k, v, f, beta, gate))
        out[token] = eager.decode(
            new_q, new_k, v=new_v, f=new_f, beta=new_beta, gate=new_gate, **weights, **copies, slots=own[active],
            lower_bound=lower_bound, norm_eps=norm_eps,
        )  # fmt: skip
    state[rows], window[rows] = copies["state"].to(state.dtype), copies["window"]
    return out
