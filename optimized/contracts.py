"""Where the implementations round inside, as data. An implementation that rounds nothing inside has an empty contract."""

from reference.points import ACTIVATION, KDA_MIXER, Contract
from reference.points import MLA_ATTEND as _ATTEND

EXACT = Contract()
# The convolution's output and the core are stored in the activation dtype: eager torch, and FLA's chain of kernels.
STAGED = Contract(rounds={"conv": ACTIVATION, "core": ACTIVATION})
# Operands of the chunk form's matrix products. The state between chunks, the inverse and the Gram matrices are FP32.
PREFILL = Contract(
    rounds=dict.fromkeys(("q_in", "k_in", "k_out", "aqk", "inv", "w", "u", "s_in", "dl", "core"), ACTIVATION), accumulate="mma_bf16"
)
# What the mixer's GEMMs store and what its cell hands to the last of them; the cell rounds as its own contract says.
_PROJECTED = dict.fromkeys(("proj_qkv", "proj_f_a", "proj_f", "proj_g_a", "proj_g", "proj_b", "out"), ACTIVATION)
MIXER = Contract(rounds=_PROJECTED, points=KDA_MIXER)
MIXER_PREFILL = Contract(rounds={**_PROJECTED, **PREFILL.rounds}, accumulate=PREFILL.accumulate, points=KDA_MIXER)
# Operands of the absorbed core's matrix products: rows as dequantised, weights over a power of two. Logits and sums are FP32.
MLA_ATTEND = Contract(rounds={"latent": ACTIVATION, "prob": ACTIVATION}, accumulate="mma_bf16", points=_ATTEND)
