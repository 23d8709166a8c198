"""The fused mixer where its generations verify drafts."""

import pytest
import torch

from optimized import interpreter
from optimized.gemm_tiles import MixerPlan
from parity.buffers import same_bits
from reference import kda_offsets
from reference.batch import Batch
from reference.kda_replay import Replay

pytest.importorskip("triton")

from optimized import kda_mixer, kda_verify
from tests.optimized.test_kda_mixer import BF16, PLANS, SLOTS, case, fused, ratio

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="needs TRITON_INTERPRET=1 before the first import of triton")


@PLANS
@pytest.mark.parametrize("lengths", [(), (3, 0)], ids=str)
def test_drafts_are_the_verify_cell_on_their_own_rows(lengths: tuple[int, ...], plan: MixerPlan) -> None:
    """The cell, which has tests of its own, called by hand; to the bit, caches included."""
    given = case(*lengths, generations=4)
    slots, tokens = given["batch"].slots[: len(lengths) + 2], sum(lengths)
    accepted = torch.tensor([1, 2], dtype=torch.int32)
    given["batch"] = Batch(slots, given["batch"].cu_seqlens, None, 1, accepted, kda_offsets.offsets(accepted, 1))
    candidate, byhand = fused(given), fused(given)
    for side in (candidate, byhand):
        side["replay"] = Replay(*(torch.full((SLOTS, 1, width), 0.5, dtype=BF16) for width in (40, 16, 2)))
    x, weights = kda_mixer.project(plan, byhand["hidden"], byhand["weights"]), byhand["weights"]
    layer = dict(
        conv_weight=weights.conv, a_log=weights.A_log, dt_bias=weights.dt_bias, norm_weight=weights.o_norm,
        **{name: byhand[name] for name in ("state", "window", "lower_bound", "norm_eps", "replay")},
    )  # fmt: skip
    own = {name: value[tokens:] for name, value in x.items()}
    core = kda_verify.verify(**own, **layer, slots=slots[len(lengths) :], accepted=accepted)
    out = kda_mixer.run(plan, **candidate)[tokens:]
    assert ratio(out, *(core.to(d) @ weights.o_proj.to(d).T for d in (torch.float64, torch.float32))) <= 1
    verified = slots[len(lengths) :].long()
    assert all(same_bits(candidate[name][verified], byhand[name][verified]) for name in ("state", "window"))
    assert all(same_bits(a, b) for a, b in zip(vars(candidate["replay"]).values(), vars(byhand["replay"]).values(), strict=True))
