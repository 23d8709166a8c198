"""The contract of `kda.verify_offsets`: two arguments, whole numbers."""

import torch
from torch import Tensor

from reference.validate import _contiguous, _fail, _tensor


def call(accepted: Tensor, drafts: int) -> int:
    """Structure of a call; the count of requests. ValueError or TypeError with the argument's name."""
    requests = accepted.numel() if isinstance(accepted, Tensor) else 0
    _tensor("accepted", accepted, (requests,), (torch.int32,), accepted.device if isinstance(accepted, Tensor) else torch.device("cpu"))
    _contiguous(accepted=accepted)
    if not isinstance(drafts, int) or drafts < 0:
        _fail("drafts", "a count of drafts", drafts, "pass the S of the replay caches")
    return requests
