"""Input regimes: the distributions that a kernel is judged on, as data.

Each hides faults that another shows: spread gates hide a decay rounded to BF16 in the output, slow gates hide a wrong order
of decay and update. The gate is set by its argument: the logit of sigmoid (bounded) or the log of -g (softplus) is drawn
from N(center, spread), 80 % of the spread from dt_bias and the rest from the token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.presets import KdaShape


@dataclass(frozen=True)
class Regime:
    """One distribution. bounded, softplus: (center, spread) of the gate's argument. state, value: scales."""

    name: str
    about: str
    bounded: tuple[float, float]
    softplus: tuple[float, float]
    state: float = 0.3
    value: float = 1.0


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("random", "gates spread; 28 % of decays above .998", (-4.3256, 6.0), (-3.8824, 4.0)),
        Regime("slow", "median decay .99992", (-11.0429, 1.0), (-9.4334, 1.0)),
        Regime("sharp", "gates near the bound", (6.0, 2.0), (1.5, 0.7)),
        Regime("spiky", "large carried state, asymmetric values", (-4.3256, 6.0), (-3.8824, 4.0), state=30.0, value=8.0),
        Regime("adversarial", "zero rows, collinear keys, beta in {0, 1e-8, 1-2^-9, 1}", (-4.3256, 6.0), (-3.8824, 4.0)),
    )
}
DEFAULT_REGIMES = ("random", "slow")

BETA_SPREAD = 1.5  # of its logit
# sigmoid of these is 0 in FP32, 1e-8, 1 - 2^-9 and 1.
ADVERSARIAL_BETA = (-200.0, -18.420681, 6.2363696, 40.0)


def gate_bias(regime: Regime, kda: KdaShape, a_log: Tensor, generator: torch.Generator) -> Tensor:
    """dt_bias [H*K]: the part of the gate's argument that belongs to the channel."""
    center, spread = regime.bounded if kda.lower_bound is not None else regime.softplus
    argument = _normal((a_log.shape[0], kda.key_dim), generator) * (0.8 * spread) + center
    # bounded: rate * x is the logit; softplus: for small x, -g = rate * e^x.
    bias = argument / a_log.exp()[:, None] if kda.lower_bound is not None else argument - a_log[:, None]
    return bias.flatten()


def gate_spread(regime: Regime, kda: KdaShape, a_log: Tensor) -> Tensor:
    """[H]: the spread of the raw gate f over tokens."""
    return _token_spread(regime, kda) / a_log.exp() if kda.lower_bound is not None else torch.full_like(a_log, _token_spread(regime, kda))


def gate_input(regime: Regime, kda: KdaShape, a_log: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """f [T, H*K]: the part of the gate's argument that belongs to the token."""
    argument = _normal((tokens, a_log.shape[0], kda.key_dim), generator) * _token_spread(regime, kda)
    return (argument / a_log.exp()[:, None] if kda.lower_bound is not None else argument).flatten(1)


def _token_spread(regime: Regime, kda: KdaShape) -> float:
    _, spread = regime.bounded if kda.lower_bound is not None else regime.softplus
    return 0.6 * spread


def token_inputs(regime: Regime, kda: KdaShape, a_log: Tensor, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """q, k, v, f, gate, beta of `tokens` tokens in FP32, in the order in which they lie in the projection."""
    heads = a_log.shape[0]
    x = {
        "q": _normal((tokens, heads * kda.key_dim), generator),
        "k": _normal((tokens, heads * kda.key_dim), generator),
        "v": _normal((tokens, heads * kda.value_dim), generator) * regime.value,
        "f": gate_input(regime, kda, a_log, tokens, generator),
        "gate": _normal((tokens, heads * kda.value_dim), generator),
        "beta": _normal((tokens, heads), generator) * BETA_SPREAD,
    }
    if regime.name == "spiky":  # mostly small, positive outliers: v from about -0.3 to 25 was seen in a real model
        x["v"] = x["v"].abs() - 0.3
    if regime.name == "adversarial":
        if tokens > 1:
            x["q"][0], x["k"][1] = 0, 0
        x["k"] = torch.where(torch.arange(heads * kda.key_dim, device=a_log.device) < kda.key_dim, 1.0, x["k"])  # head 0: one key, always
        choices = torch.tensor(ADVERSARIAL_BETA, device=a_log.device)
        x["beta"] = choices[torch.randint(4, (tokens, heads), generator=generator, device=a_log.device)]
    return x


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
