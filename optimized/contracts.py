"""Where the implementations round inside, as data. An implementation that rounds nothing inside has an empty contract."""

from reference.points import ACTIVATION, KDA_CELL, KDA_CHUNK, KDA_MIXER, ChunkForm, Contract
from reference.points import MLA_ATTEND as _ATTEND

EXACT = Contract()
# The convolution's output and the core are stored in the activation dtype: eager torch, and FLA's chain of kernels.
STAGED = Contract(rounds={"conv": ACTIVATION, "core": ACTIVATION})
# Operands of the chunk form's matrix products. The state between chunks, the inverse and the Gram matrices are FP32.
PREFILL = Contract(
    rounds=dict.fromkeys(("q_in", "k_in", "k_out", "aqk", "inv", "w", "u", "s_in", "dl", "core"), ACTIVATION), accumulate="mma_bf16"
)
# FLA's chunks: normed q and k are stored before q is scaled, beta meets the operands and not the inverse. Its Gram matrices
# and its inverse are FP32 until they are stored, from TF32 products on a device.
FLA_CHUNKS = Contract(
    rounds=dict.fromkeys(
        ("conv", "q", "k", "q_in", "k_in", "k_out", "v_in", "aqk", "inv", "w", "u", "s_in", "dl", "core"), ACTIVATION
    ),
    accumulate="mma_tf32",
    form=ChunkForm(chunk=64, scale="products", beta="operands"),
)  # fmt: skip
# FlashKDA's: normed q and k, and every operand of its chunks of 16.
FLASH_KDA = Contract(
    rounds=dict.fromkeys(
        ("conv", "q", "k", "q_in", "k_in", "k_out", "akk", "aqk", "inv", "w", "u", "s_in", "dl", "core"), ACTIVATION
    ),
    accumulate="mma_bf16",
)  # fmt: skip
# What the mixer's GEMMs store and what its cell hands to the last of them; the cell rounds as its own contract says.
_PROJECTED = dict.fromkeys(("proj_qkv", "proj_f_a", "proj_f", "proj_g_a", "proj_g", "proj_b", "out"), ACTIVATION)
MIXER = Contract(rounds=_PROJECTED, points=KDA_MIXER)
MIXER_PREFILL = Contract(rounds={**_PROJECTED, **PREFILL.rounds}, accumulate=PREFILL.accumulate, points=KDA_MIXER)
MIXER_STAGED = Contract(rounds={**_PROJECTED, **STAGED.rounds}, points=KDA_MIXER)
# Operands of the absorbed core's matrix products: rows as dequantised, weights over a power of two. Logits and sums are FP32.
MLA_ATTEND = Contract(rounds={"latent": ACTIVATION, "prob": ACTIVATION}, accumulate="mma_bf16", points=_ATTEND)

HAVE_CHUNKS = ("kda.prefill", "kda.mixer")  # operators whose reference has the chunk form too


def check(op: str, contract: Contract) -> None:
    """ValueError for a contract that no form of the operator's reference has: a rounding that is passed over would look like a fault."""
    chunked = contract.accumulate != "fp32"
    if chunked and op not in HAVE_CHUNKS:
        raise ValueError(f"contract: accumulate of {op}, a recurrence, is fp32, got {contract.accumulate!r}")
    own, other = (KDA_CHUNK, KDA_CELL) if chunked else (KDA_CELL, KDA_CHUNK)
    strange = [point for point in contract.rounds if point in other and point not in own]
    if strange:
        form = "chunk form" if chunked else "recurrence"
        raise ValueError(
            f"contract: {', '.join(strange)} of {op} can't round, the {form} has no such point; it has {', '.join(own)}"
            + ("" if chunked or op not in HAVE_CHUNKS else "; for the chunk form name its accumulate")
        )
