"""The chunk (WY) form of `kda.prefill`: the same function, with the recurrence solved for a chunk of tokens at a time.

No exponential here is of a positive number: decays between two tokens are formed pair by pair and masked before `exp`, so
both gates are safe at any chunk. Source: spec of the model, section 4.6 (Kimi Linear; `fla.ops.kda`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import kda, validate
from reference.points import At, ChunkForm, exact
from reference.precision import full_precision

OURS = ChunkForm()  # of the kernel; 16 tokens at the bound -5 are 80 nats, inside the range of FP32


def least_log_decay(dtype: torch.dtype) -> float:
    """Below it exp is 0 in `dtype` by far; a finite floor keeps differences of cumulative decays finite, and their digits."""
    return 2 * math.log(torch.finfo(dtype).tiny)


def chunk_step(
    taps: Tensor,
    f: Tensor,
    beta: Tensor,
    gate: Tensor,
    state: Tensor,
    *,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    lower_bound: float | None,
    norm_eps: float,
    form: ChunkForm = OURS,
    at: At = exact,
) -> tuple[Tensor, Tensor]:
    """C tokens of one sequence: `(out [C, H*V], state)`, nothing modified; C is at most the form's.

    taps [3 + C, 2*H*K + H*V]: three carried inputs, then the raw ones; f [C, H*K]; beta [C, H]; gate [C, H*V]; state
    [H, V, K]. All in the dtype of the computation. Matrices of a chunk are [H, C, C], row the later token.
    """
    tokens, (heads, value_dim, key_dim) = len(f), state.shape
    width = heads * key_dim

    conv = at("conv", F.silu((taps.unfold(0, 4, 1) * conv_weight).sum(-1)))
    q, k, v = conv.split([width, width, heads * value_dim], dim=-1)
    early, late = (key_dim**-0.5, 1.0) if form.scale == "q" else (1.0, key_dim**-0.5)
    q = at("q", kda.l2norm(q.view(tokens, heads, key_dim)) * early)
    k = at("k", kda.l2norm(k.view(tokens, heads, key_dim)))
    v = v.view(tokens, heads, value_dim)
    g = at("g", kda.log_decay(f.view(tokens, heads, key_dim), a_log, dt_bias.view(heads, key_dim), lower_bound))
    beta = at("beta", beta.sigmoid())
    columns, operands = (beta, torch.ones_like(beta)) if form.beta == "inverse" else (torch.ones_like(beta), beta)

    gcum = at("gcum", g.clamp(min=least_log_decay(g.dtype)).cumsum(0))
    q_in = at("q_in", q * gcum.exp())  # as they meet the state before the chunk
    k_in = at("k_in", k * operands[:, :, None] * gcum.exp())
    v_in = at("v_in", v * operands[:, :, None])
    k_out = at("k_out", k * (gcum[-1] - gcum).exp())  # as they enter the state after it

    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril()
    decay = (gcum[:, None] - gcum).masked_fill(~causal[:, :, None, None], -math.inf).exp()  # [C, C, H, K]
    akk = at("akk", torch.einsum("ihk,jhk,ijhk->hij", k, k, decay).tril(-1) * beta.T[:, :, None])
    aqk = at("aqk", torch.einsum("ihk,jhk,ijhk->hij", q, k, decay) * late)
    eye = torch.eye(tokens, dtype=g.dtype, device=g.device).expand_as(akk)
    inv = at("inv", torch.linalg.solve_triangular(eye + akk, eye, upper=False, unitriangular=True) * columns.T[:, None, :])
    w = at("w", torch.einsum("hij,jhk->ihk", inv, k_in))
    u = at("u", torch.einsum("hij,jhv->ihv", inv, v_in))

    s_in = at("s_in", state)
    dl = at("dl", u - torch.einsum("ihk,hvk->ihv", w, s_in))  # `delta` of every token
    core = at("core", torch.einsum("ihk,hvk->ihv", q_in, s_in) * late + torch.einsum("hij,jhv->ihv", aqk, dl))
    state = at("state", state * gcum[-1].exp()[:, None, :] + torch.einsum("ihv,ihk->hvk", dl, k_out))

    norm = at("norm", kda.rms_norm(core, norm_weight, norm_eps))
    gate = at("gate", gate.view(tokens, heads, value_dim).sigmoid())
    out = at("out", norm * gate)
    return out.reshape(tokens, heads * value_dim), state


@full_precision
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
    form: ChunkForm = OURS,
    at: At = exact,
) -> Tensor:
    """`reference.kda.prefill`, a chunk of tokens at a time; arguments, pools, errors and return value as there."""
    weights = dict(conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight)
    sizes = validate.kda_prefill(
        q, k, v=v, f=f, beta=beta, gate=gate, **weights, state=state, window=window, cu_seqlens=cu_seqlens, slots=slots, fresh=fresh,
        lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    validate.values(slots, sizes.slots)
    validate.offsets(cu_seqlens, sizes.tokens)

    live, row_state, row_window = kda.load_rows(state, window, slots, fresh, kda.compute_dtype(q, state))
    out = q.new_zeros(sizes.tokens, sizes.heads * sizes.value_dim)
    qkv, f, beta, gate = (x.to(row_state.dtype) for x in (torch.cat([q, k, v], dim=-1), f, beta, gate))
    weights = {name: weight.to(row_state.dtype) for name, weight in weights.items()}
    for n, (start, end) in enumerate(zip(cu_seqlens[:-1][live].tolist(), cu_seqlens[1:][live].tolist(), strict=True)):
        taps = torch.cat([row_window[n], qkv[start:end]])  # [3 + length, channels]
        for first in range(start, end, form.chunk):
            rows = slice(first, min(first + form.chunk, end))
            y, row_state[n] = chunk_step(
                taps[first - start : rows.stop - start + 3], f[rows], beta[rows], gate[rows], row_state[n], **weights,
                lower_bound=lower_bound, norm_eps=norm_eps, form=form, at=at,
            )  # fmt: skip
            out[rows] = y.to(out.dtype)
        row_window[n] = taps[-3:]
    kda.store_rows(state, window, slots[live], row_state, row_window)
    return out
