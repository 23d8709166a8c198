"""The sparse MLA layer: dense attention while rows are few, every way of cutting a sequence into calls, heads over ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference import fp8, kpool, mla
from reference.mla_cache import MlaCache, Sequences, ring_rows
from reference.mla_weights import MlaWeights, shard
from reference.points import MLA_LAYER, rounding, tapped
from tests.reference.test_kda import int32
from tests.reference.test_kda_verify import NAN
from tests.reference.test_kpool import normal, table

HIDDEN, RANK, HEADS, KEY, VALUE, CHANNELS, INDEX_HEADS, DIM = 12, 10, 4, 6, 5, 8, 16, 4
PAGE, BLOCKS = 8, 5


def weights(channels: int = CHANNELS, index_heads: int = INDEX_HEADS) -> MlaWeights:
    shapes = dict(
        q_a_proj=(RANK, HIDDEN), q_a_layernorm=(RANK,), q_b_proj=(HEADS * KEY, RANK), kv_a_proj_with_mqa=(channels, HIDDEN),
        kv_a_layernorm=(channels,), kv_b_proj=(HEADS * (KEY + VALUE), channels), o_proj=(HIDDEN, HEADS * VALUE),
        wq_b=(index_heads * DIM, RANK), wk=(DIM, HIDDEN), k_norm=(DIM,), k_norm_bias=(DIM,), weights_proj=(index_heads, HIDDEN),
        index_kpool_compress_gate=(DIM, HIDDEN), index_kpool_compress_ape=(4, DIM),
    )  # fmt: skip
    return MlaWeights(**{name: normal(*shape, seed=i) * 0.5 for i, (name, shape) in enumerate(shapes.items())}, heads=HEADS)


def cache(count: int = 3, drafts: int = 0, channels: int = CHANNELS) -> MlaCache:
    """Of NaN: whatever is read before it was written shows."""
    pages = count * BLOCKS
    sizes = dict(latent=(pages, PAGE, channels), pool_keys=(pages, PAGE // 4, DIM), ring=(count, ring_rows(drafts), 2 * DIM))
    return MlaCache(**{name: torch.full(size, NAN, dtype=torch.float64) for name, size in sizes.items()})


def run(hidden: Tensor, given: MlaCache, start: int, blocks: Tensor, slot: int = 0, top: int = 4, **more: object) -> Tensor:
    """The layer on new tokens of one sequence."""
    rows = Sequences(int32(slot), int32(start), int32(0, len(hidden)), blocks)
    return mla.layer(hidden, more.pop("weights", weights()), cache=given, sequences=rows, top=top, **more)


def test_short_sequences_are_dense_attention_written_out() -> None:
    """Spec 6.1 and 6.6, as matrix products; the indexer has no say."""
    w, hidden = weights(), normal(19, HIDDEN, seed=30)
    got = run(hidden, cache(), 0, table(BLOCKS))
    q = F.rms_norm(hidden @ w.q_a_proj.T, (RANK,), w.q_a_layernorm, 1e-5) @ w.q_b_proj.T
    c = F.rms_norm(hidden @ w.kv_a_proj_with_mqa.T, (CHANNELS,), w.kv_a_layernorm, 1e-5)
    outs = []
    for h in range(HEADS):
        up = w.kv_b_proj[h * (KEY + VALUE) : (h + 1) * (KEY + VALUE)]
        k, v = c @ up[:KEY].T, c @ up[KEY:].T
        logit = q[:, h * KEY : (h + 1) * KEY] @ k.T / KEY**0.5
        outs.append(logit.masked_fill(~torch.ones(19, 19).bool().tril(), -torch.inf).softmax(-1) @ v)
    torch.testing.assert_close(got, torch.cat(outs, dim=1) @ w.o_proj.T)


def test_long_sequences_attend_to_what_the_indexer_selects() -> None:
    """The indexer written out for the last token: 9 complete pools of which 4 are kept, and a tail of two."""
    w, hidden, values = weights(), normal(38, HIDDEN, seed=31), dict[str, Tensor]()
    got = run(hidden, cache(), 0, table(BLOCKS), at=tapped(values))
    key = F.layer_norm(hidden @ w.wk.T, (DIM,), w.k_norm, w.k_norm_bias, 1e-6)
    gate = hidden @ w.index_kpool_compress_gate.T
    query = (F.rms_norm(hidden @ w.q_a_proj.T, (RANK,), w.q_a_layernorm, 1e-5) @ w.wq_b.T)[37].view(INDEX_HEADS, DIM)
    pools = []
    for j in range(9):
        prob = (gate[4 * j : 4 * j + 4] + w.index_kpool_compress_ape).softmax(0)
        pools.append((prob * key[4 * j : 4 * j + 4]).sum(0))
    score = (query @ torch.stack(pools).T).relu().T @ (w.weights_proj @ hidden[37]) / 8  # 16^-0.5 4^-0.5
    torch.testing.assert_close(values["pool_key"], torch.stack(pools))
    torch.testing.assert_close(values["score"][37, :9], score)
    kept = sorted(score.topk(4).indices.tolist())
    visible = torch.zeros(38, 38, dtype=torch.bool)
    visible[37, [4 * j + i for j in kept for i in range(4)] + [36, 37]] = True
    c = F.rms_norm(hidden @ w.kv_a_proj_with_mqa.T, (CHANNELS,), w.kv_a_layernorm, 1e-5)
    q = F.rms_norm(hidden @ w.q_a_proj.T, (RANK,), w.q_a_layernorm, 1e-5) @ w.q_b_proj.T
    out, _ = mla.dense(q.view(38, HEADS, KEY), c, kv_b=w.kv_b_proj, visible=visible)
    torch.testing.assert_close(got[37], out[37].flatten() @ w.o_proj.T)
    assert kept != list(range(4)) and tuple(values) == tuple(sorted(values, key=list(MLA_LAYER).index))
    assert set(values) == set(MLA_LAYER)


@pytest.mark.parametrize("cuts", [[1] * 38, [30, 1, 7], [3, 2, 33], [37, 1]], ids=str)
def test_any_pieces_give_the_outputs_of_one_piece(cuts: list[int]) -> None:
    hidden, blocks, given, start, outs = normal(38, HIDDEN, seed=32), table(BLOCKS), cache(), 0, []
    whole = run(hidden, cache(), 0, blocks)
    for count in cuts:
        outs.append(run(hidden[start : start + count], given, start, blocks))
        start += count
    torch.testing.assert_close(torch.cat(outs), whole)


def test_sequences_of_a_batch_do_not_meet() -> None:
    """A prefill, a decode, padding and a verify in one call, each as alone."""
    blocks, given, alone = table(BLOCKS, count=4), cache(4, drafts=2), cache(4, drafts=2)
    past = normal(20, HIDDEN, seed=33)
    for n, slot in ((1, 3), (3, 0)):
        for target in (given, alone):
            run(past[: 10 + n], target, 0, blocks[n : n + 1], slot)
    hidden, ends, slots, starts = normal(16, HIDDEN, seed=34), [0, 9, 10, 13, 16], [1, 3, -1, 0], [0, 11, 5, 13]
    hidden[10:13] = NAN
    rows = Sequences(int32(*slots), int32(*starts), int32(*ends), blocks)
    out = mla.layer(hidden, weights(), cache=given, sequences=rows, top=4)
    assert not out[10:13].any()
    for n in (0, 1, 3):
        part = slice(ends[n], ends[n + 1])
        torch.testing.assert_close(out[part], run(hidden[part], alone, starts[n], blocks[n : n + 1], slots[n]))
    for name in ("latent", "pool_keys", "ring"):
        torch.testing.assert_close(getattr(given, name), getattr(alone, name), equal_nan=True)


def test_a_verify_sees_rows_of_its_own_lengths_and_rejected_drafts_leave_no_trace() -> None:
    hidden, blocks, given = normal(36, HIDDEN, seed=35), table(BLOCKS), cache(drafts=3)
    whole = run(hidden, cache(), 0, blocks)
    run(hidden[:5], given, 0, blocks)
    start, step = 5, 0
    while start + 4 <= 36:
        accepted = step % 4 + 1
        tokens = hidden[start : start + 4].clone()
        tokens[accepted:] = normal(4 - accepted, HIDDEN, seed=step) * 100
        out = run(tokens, given, start, blocks)
        torch.testing.assert_close(out[:accepted], whole[start : start + accepted])
        start, step = start + accepted, step + 1


def test_ranks_sum_to_the_whole_and_select_the_same_rows() -> None:
    hidden, blocks = normal(30, HIDDEN, seed=36), table(BLOCKS)
    whole, seen = run(hidden, cache(), 0, blocks), []
    total = torch.zeros_like(whole)
    for rank in range(2):
        values: dict[str, Tensor] = {}
        total += run(hidden, cache(), 0, blocks, weights=shard(weights(), rank, 2), at=tapped(values))
        seen.append(values["score"])
    torch.testing.assert_close(total, whole)
    assert torch.equal(*seen)


@pytest.mark.parametrize("reserved", [False, True])
def test_an_fp8_cache_is_attended_to_as_it_is_stored(reserved: bool) -> None:
    hidden, blocks, w = normal(30, HIDDEN, seed=37), table(BLOCKS), weights(channels=128)
    wide, rows = cache(channels=128), cache(channels=128)
    bytes_ = torch.full((*rows.latent.shape[:2], fp8.row_bytes(128, reserved)), 0xFF, dtype=torch.uint8)
    got = run(hidden, MlaCache(bytes_, rows.pool_keys, rows.ring), 0, blocks, weights=w)

    def quantized(name: str, x: Tensor) -> Tensor:
        return fp8.dequantize_rows(fp8.quantize_rows(x), 128).to(x.dtype) if name == "kv_latent" else x

    assert torch.equal(got, run(hidden, wide, 0, blocks, weights=w, at=quantized))
    written = wide.latent[:, :, 0].isnan().logical_not()
    assert torch.equal(fp8.dequantize_rows(bytes_[written], 128).double(), wide.latent[written])
    assert (bytes_[~written] == 0xFF).all()


def test_a_cache_with_one_scale_is_attended_to_as_it_is_stored() -> None:
    hidden, blocks, scale = normal(30, HIDDEN, seed=38), table(BLOCKS), torch.tensor([0.02])
    rows = cache()
    codes = MlaCache(rows.latent.to(torch.float8_e4m3fn), rows.pool_keys, rows.ring, scale)
    got = run(hidden, codes, 0, blocks)

    def quantized(name: str, x: Tensor) -> Tensor:
        return fp8.dequantize_tensor(fp8.quantize_tensor(x, scale), scale).to(x.dtype) if name == "kv_latent" else x

    assert torch.equal(got, run(hidden, cache(), 0, blocks, at=quantized))


def test_what_is_stored_rounds_and_the_call_itself_goes_on_unrounded() -> None:
    hidden, blocks = normal(9, HIDDEN, seed=39), table(BLOCKS)
    rows = cache()
    narrow = MlaCache(rows.latent.bfloat16(), rows.pool_keys.bfloat16(), rows.ring.bfloat16())
    wide = cache()
    assert torch.equal(run(hidden, narrow, 0, blocks), run(hidden, wide, 0, blocks))
    for name in ("latent", "pool_keys", "ring"):
        torch.testing.assert_close(getattr(narrow, name), getattr(wide, name).bfloat16(), equal_nan=True)


@pytest.mark.parametrize("name", [name for name in MLA_LAYER if name not in ("score", "head_weight", "index_q")])
def test_every_point_can_round(name: str) -> None:
    hidden, blocks = normal(33, HIDDEN, seed=40), table(BLOCKS)
    exact = [run(hidden, given := cache(), 0, blocks), given.pool_keys]
    rounded = [run(hidden, given := cache(), 0, blocks, at=rounding({name: torch.bfloat16})), given.pool_keys]
    assert any(not torch.equal(x, y) for x, y in zip(exact, rounded, strict=True))


def test_selection_at_the_real_width_goes_on_past_2051_rows() -> None:
    """512 pools of one head: rows 2050 and 2051 are the last dense one and the first sparse one."""
    w, hidden = weights(), normal(2054, HIDDEN, seed=41)
    blocks = table(257)
    given = MlaCache(
        torch.full((257, 8, CHANNELS), NAN).double(), torch.full((257, 2, DIM), NAN).double(), torch.full((1, 4, 2 * DIM), NAN).double()
    )
    run(hidden[:2040], given, 0, blocks, top=kpool.TOP_POOLS)
    got = run(hidden[2040:], given, 2040, blocks, top=kpool.TOP_POOLS)
    q = F.rms_norm(hidden @ w.q_a_proj.T, (RANK,), w.q_a_layernorm, 1e-5) @ w.q_b_proj.T
    c = F.rms_norm(hidden @ w.kv_a_proj_with_mqa.T, (CHANNELS,), w.kv_a_layernorm, 1e-5)
    visible = torch.arange(2054) <= torch.arange(2040, 2054)[:, None]
    out, _ = mla.dense(q[2040:].view(14, HEADS, KEY), c, kv_b=w.kv_b_proj, visible=visible)
    full = out.flatten(1) @ w.o_proj.T
    torch.testing.assert_close(got[:11], full[:11])
    assert ((got[11:] - full[11:]).abs().amax(1) > (got[:11] - full[:11]).abs().max()).all()
