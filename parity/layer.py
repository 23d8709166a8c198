"""A KDA layer whose projections of random hidden states give its cell the inputs of a regime.

Every row of a projection has its length given, so that a token's value there has the spread that `regimes.token_inputs` draws
with. What a regime sets by channel (dt_bias, A_log) stays where the cell has it. Of `adversarial` two columns of the hidden
state carry what a random projection can't: the logit of beta, and a one for the key that never changes.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity import regimes
from parity.regimes import ADVERSARIAL_BETA
from reference.kda_weights import KdaWeights

if TYPE_CHECKING:
    from parity.case import Case

STREAM = 1 << 20  # of random numbers: after those of any step
RESERVED = 2  # columns of the hidden state, for `adversarial`


def weights(case: "Case") -> KdaWeights:
    """The cell's weights of a case and projections [out, in] in its dtype; the gates' rank is K."""
    problem, kda, regime, own = case.problem, case.kda, case.regime, case.weights
    generator, hidden, rank = case.generator(STREAM), problem.shape.hidden, kda.key_dim
    heads, key, value = problem.heads, problem.heads * kda.key_dim, problem.heads * kda.value_dim

    def linear(rows: int, columns: int, length: Tensor | float = 1.0) -> Tensor:
        x = torch.randn(rows, columns, generator=generator, device=problem.device)
        if regime.name == "adversarial" and columns == hidden:
            x[:, :RESERVED] = 0
        return (x / x.norm(dim=1, keepdim=True) * length).to(problem.activation)

    spread = regimes.gate_spread(regime, kda, own["a_log"]).repeat_interleave(kda.key_dim)[:, None]
    conv = own["conv_weight"][:, None].split([key, key, value])
    layer = KdaWeights(
        q_proj=linear(key, hidden), k_proj=linear(key, hidden), v_proj=linear(value, hidden, regime.value),
        b_proj=linear(heads, hidden, regimes.BETA_SPREAD), f_a_proj=linear(rank, hidden), f_b_proj=linear(key, rank, spread),
        g_a_proj=linear(rank, hidden), g_b_proj=linear(value, rank), **dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), conv, strict=True)),
        A_log=own["a_log"], dt_bias=own["dt_bias"], o_norm=own["norm_weight"], o_proj=linear(hidden, value),
    )  # fmt: skip
    if regime.name == "adversarial":
        layer.b_proj.zero_()[:, 0] = 1
        layer.k_proj[: kda.key_dim].zero_()[:, 1] = 1
    return layer


def hidden(case: "Case", generator: torch.Generator) -> Tensor:
    """[T, hidden] of one step, normal, in the dtype of the case."""
    problem = case.problem
    x = torch.randn(problem.rows, problem.shape.hidden, generator=generator, device=problem.device)
    if case.regime.name == "adversarial":
        choices = torch.tensor(ADVERSARIAL_BETA, device=x.device)
        x[:, 0] = choices[torch.randint(4, (problem.rows,), generator=generator, device=x.device)]
        x[:, 1] = 1
        if problem.rows > 1:
            x[0, RESERVED:] = 0
    return x.to(problem.activation)
