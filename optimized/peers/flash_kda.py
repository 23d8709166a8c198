"""The FlashKDA baseline of `kda.prefill`: its fused chunk kernels between FLA's convolution and gated norm.

Needs the package flash_kda (tokenspeed-flashkda, CUDA 13, SM90 and newer) beside fla-core. Rounds the normed q and k, and
the operands of its chunks of 16; inverts chunks by a power series in FP16. Source: MoonshotAI FlashKDA, `flash_kda.fwd`.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from reference import validate

DIM = 128
BOUND = -5.0


def supports(dtype: torch.dtype, key_dim: int, value_dim: int, lower_bound: float | None) -> tuple[bool, str]:
    """Whether FlashKDA runs this problem, and why or why not."""
    if missing := [name for name in ("flash_kda", "fla") if importlib.util.find_spec(name) is None]:
        return False, f"{' and '.join(missing)} not installed: pip install tokenspeed-flashkda fla-core"
    if dtype != torch.bfloat16:
        return False, f"FlashKDA takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if (key_dim, value_dim) != (DIM, DIM):
        return False, f"FlashKDA takes K = V = {DIM}, not {key_dim} and {value_dim}"
    if lower_bound is None or lower_bound < BOUND:
        return False, f"FlashKDA takes a gate bounded in [{BOUND}, 0), not {'softplus' if lower_bound is None else lower_bound}"
    return True, "bfloat16, K = V = 128 and a bounded gate"


def _package() -> Any:
    try:
        return importlib.import_module("flash_kda")
    except ImportError as error:
        raise ImportError("flash_kda: pip install tokenspeed-flashkda (CUDA 13, SM90 on), or choose another implementation") from error


def fused_core(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, states: Tensor, *, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashKDA's own launches: norms, gate and beta are inside."""
    out, final = torch.empty_like(v), torch.empty_like(states)
    _package().fwd(
        q, k, v, f, beta, q.shape[-1] ** -0.5, out, A_log=a_log, dt_bias=dt_bias.view(q.shape[2], -1), lower_bound=lower_bound,
        initial_state=states, final_state=final, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return out, final


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
    """`reference.kda.prefill` with FlashKDA's core; arguments, pools, errors and return value as there.

    Copies as in `fla_prefill.through_rows`. ImportError without the package, ValueError for what `supports` refuses.
    """
    given: dict[str, Any] = dict(
        v=v, f=f, beta=beta, gate=gate, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
        state=state, window=window, cu_seqlens=cu_seqlens, slots=slots, fresh=fresh, lower_bound=lower_bound, norm_eps=norm_eps,
    )  # fmt: skip
    sizes = validate.kda_prefill(q, k, **given)
    _package()
    runs, reason = supports(q.dtype, sizes.key_dim, sizes.value_dim, lower_bound)
    if not runs:
        raise ValueError(f"q: {reason}; choose another implementation")
    from optimized.peers.fla_prefill import through_rows

    return through_rows(fused_core, q, k, **given)
