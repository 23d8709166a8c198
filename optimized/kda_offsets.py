"""`kda.verify_offsets` in one launch: what a forward computes once for all its layers, from the accepted counts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import interpreter
from reference import validate_verify
from reference.kda_offsets import Offsets

interpreter.repair()

BLOCK = 256


@triton.jit(do_not_specialize=["requests", "drafts"])
def kda_verify_offsets_kernel(accepted, pending, cu_seqlens, requests, drafts, BLOCK: tl.constexpr):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(accepted + request, mask=request < requests, other=0)  # nothing is pending behind the last one
    waiting = tl.minimum(tl.maximum(counts - 1, 0), drafts)
    tl.store(pending + request, waiting, mask=request < requests)
    tl.store(cu_seqlens + request, request * (1 + drafts) - waiting, mask=request <= requests)


def offsets(accepted: Tensor, drafts: int) -> Offsets:
    """`reference.kda_offsets.offsets` as one Triton launch; arguments, errors and return value as there.

    Reads no value on the host. CPU tensors only in Triton's interpreter.
    """
    requests = validate_verify.verify_offsets(accepted, drafts)
    if accepted.device.type == "cpu":
        interpreter.require("accepted")
    pending, cu_seqlens = torch.empty_like(accepted), accepted.new_empty(requests + 1)
    kda_verify_offsets_kernel[(triton.cdiv(requests + 1, BLOCK),)](
        accepted, pending, cu_seqlens, requests, drafts, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return pending, cu_seqlens
