"""Model shapes as frozen data. Source: spec sections 1 and 11 of the model (GLM-5.3-Flash, Kimi-Linear)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KdaShape:
    """Kimi Delta Attention: `heads` of the whole model (before tensor parallelism), widths in channels."""

    heads: int
    key_dim: int
    value_dim: int
    lower_bound: float | None  # bounded gate: g = lower_bound * sigmoid(...); None selects the softplus gate
    conv_width: int = 4


@dataclass(frozen=True)
class Preset:
    """One model: what the operators need to know of it."""

    name: str
    hidden: int
    layers: int
    norm_eps: float
    kda: KdaShape
    full_attention_layers: tuple[int, ...]  # zero-based


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("glm-5.3-flash", 4096, 45, 1e-5, KdaShape(64, 128, 128, -5.0), tuple(range(3, 45, 4))),
        Preset("kimi-linear-48b", 2304, 27, 1e-5, KdaShape(32, 128, 128, None), (3, 7, 11, 15, 19, 23, 26)),
        # K != V, so that a transposed state cannot pass unseen.
        Preset("tiny", 64, 5, 1e-5, KdaShape(4, 32, 16, -5.0), (3,)),
    )
}


def preset(name: str) -> Preset:
    """The preset called `name`. ValueError when there is none."""
    if name not in PRESETS:
        raise ValueError(f"model: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
