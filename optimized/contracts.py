"""Where the implementations round inside, as data. An implementation that rounds nothing inside has an empty contract."""

from reference.points import ACTIVATION, Contract

EXACT = Contract()
# The convolution's output and the core are stored in the activation dtype: eager torch, and FLA's chain of kernels.
STAGED = Contract(rounds={"conv": ACTIVATION, "core": ACTIVATION})
# Operands of the chunk form's matrix products. The state between chunks, the inverse and the Gram matrices are FP32.
PREFILL = Contract(
    rounds=dict.fromkeys(("q_in", "k_in", "k_out", "aqk", "inv", "w", "u", "s_in", "dl", "core"), ACTIVATION), accumulate="mma_bf16"
)
