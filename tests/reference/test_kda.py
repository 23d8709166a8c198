"""The KDA reference: printed anchors in FP64, an independent closed form, and every way of cutting a sequence into calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference import kda
from reference.points import grafted, tapped

ACTIVATIONS = ("q", "k", "v", "f", "beta", "gate")
NAN = float("nan")


def cell(tokens: int, slots: int, dtype: torch.dtype = torch.float64, *, heads: int = 2, key_dim: int = 6, value_dim: int = 4) -> dict:
    """Arguments of `decode` and `prefill` but the slots; K != V and a random state, which has no symmetry to hide behind."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    qk, hv = heads * key_dim, heads * value_dim
    widths = dict(q=qk, k=qk, v=hv, f=qk, beta=heads, gate=hv)
    arguments = {name: normal(tokens, width) for name, width in widths.items()} | dict(
        conv_weight=normal(2 * qk + hv, 4, scale=0.5),
        a_log=normal(heads, scale=0.3),
        dt_bias=normal(qk),
        norm_weight=1 + normal(value_dim, scale=0.1),
        state=normal(slots, heads, value_dim, key_dim),
        window=normal(slots, 3, 2 * qk + hv),
    )
    return {name: x.to(dtype) for name, x in arguments.items()} | {"lower_bound": -5.0}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def copied(arguments: dict, **changed: object) -> dict:
    """The same arguments over pools of their own."""
    return {**arguments, "state": arguments["state"].clone(), "window": arguments["window"].clone(), **changed}


def decoded(arguments: dict, slot: int, tokens: range, fresh: Tensor | None = None) -> Tensor:
    """`decode` once for each token of one sequence; fresh at the first."""
    outs = []
    for i in tokens:
        row = {name: arguments[name][i : i + 1] for name in ACTIVATIONS}
        outs.append(kda.decode(**{**arguments, **row}, slots=int32(slot), fresh=fresh if i == tokens.start else None))
    return torch.cat(outs) if outs else arguments["v"][:0]


def digits(x: Tensor) -> list:
    return torch.round(x.double(), decimals=8).tolist()


@pytest.mark.parametrize(
    ("a_log", "raw", "bias", "bounded", "softplus"),
    [
        (0.0, 0.0, 0.0, -2.5, -0.69314718),
        (0.0, 2.0, 0.0, -4.40398539, -2.12692801),
        (torch.tensor(4.0).double().log().item(), -2.0, 0.0, -0.00167675, -0.50771204),
        (torch.tensor(4.0).double().log().item(), 1.0, -0.5, -4.40398539, -3.89630794),
        (1.0, 0.3, -4.6, -0.00004194, -0.03663518),
    ],
)
def test_gate_anchors(a_log: float, raw: float, bias: float, bounded: float, softplus: float) -> None:
    a, f, b = (torch.tensor(x, dtype=torch.float64) for x in ([a_log], [[[raw]]], [[bias]]))
    assert digits(kda.log_decay(f, a, b, -5.0)) == [[[bounded]]]
    assert digits(kda.log_decay(f, a, b, None)) == [[[softplus]]]


def test_recurrence_anchors() -> None:
    arguments = cell(1, 1, heads=1, key_dim=2, value_dim=2)
    state = torch.tensor([[[[1, 0.5], [-0.25, 2]]]], dtype=torch.float64).mT.contiguous()  # printed [K, V]
    seen = []
    for conv, g, beta in (([3, 4, 1, 2, 0.5, -1], [-0.1, -1.0], 0.5), ([1, -1, 2, -1, 2, 0.25], [-2.0, -0.5], 0.9)):
        given = {"conv": [conv], "g": [[g]], "beta": [[beta]]}  # q and k before the L2 norm
        values: dict[str, Tensor] = {}
        at = tapped(values, grafted({name: torch.tensor(x, dtype=torch.float64) for name, x in given.items()}))
        kda.decode(**{**arguments, "state": state}, slots=int32(0), at=at)
        seen.append([digits(values[name].flatten()) for name in ("read", "delta", "core")] + [digits(values["state"][0, 0].mT)])
    assert seen == [
        [
            [0.32239522, 0.86041046],
            [0.08880239, -0.93020523],
            [0.3936439, -0.03899164],
            [[0.94455105, 0.03641832], [-0.0125426, -0.09624189]],
        ],
        [
            [0.11773775, 0.03051384],
            [1.69403603, 0.19753755],
            [1.20411277, 0.16416333],
            [[1.64302282, 0.18161162], [-0.76520334, -0.14671512]],
        ],
    ]
    assert digits(state[0, 0].mT) == seen[1][3]


def test_convolution_anchors() -> None:
    arguments = cell(1, 1, heads=1, key_dim=1, value_dim=1)
    arguments["conv_weight"] = torch.tensor([[0.1, -0.2, 0.3, 0.4]], dtype=torch.float64).repeat(3, 1)
    arguments["window"].zero_()
    seen = []
    for x in (1.0, 2.0, -1.0, 3.0, 0.5):
        values: dict[str, Tensor] = {}
        token = torch.full((1, 1), x, dtype=torch.float64)
        kda.decode(**{**arguments, "q": token, "k": token, "v": token}, slots=int32(0), at=tapped(values))
        seen.append(digits(values["conv"])[0])
    assert seen == [[y] * 3 for y in (0.23947506, 0.82528612, 0.0, 0.38739378, 1.22636171)]
    assert arguments["window"][0].tolist() == [[-1.0] * 3, [3.0] * 3, [0.5] * 3]


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_state_follows_the_closed_form(lower_bound: float | None) -> None:
    """S_t = (I - beta k k^T) diag(exp g) S + beta k v^T and o = S^T q, as matrix products of one head at a time."""
    arguments = cell(3, 5) | {"lower_bound": lower_bound}
    before, slots, values = arguments["state"].clone(), [4, 0, 2], dict[str, Tensor]()
    kda.decode(**arguments, slots=int32(*slots), at=tapped(values))
    v = values["conv"][:, -8:].view(3, 2, 4)
    for n, slot in enumerate(slots):
        for h in range(2):
            q, k, g, beta = (values[name][n, h] for name in ("q", "k", "g", "beta"))
            transition = (torch.eye(6, dtype=torch.float64) - beta * torch.outer(k, k)) @ torch.diag(g.exp())
            expected = transition @ before[slot, h].mT + beta * torch.outer(k, v[n, h])
            torch.testing.assert_close(arguments["state"][slot, h].mT, expected)
            torch.testing.assert_close(values["core"][n, h], expected.mT @ q)


def test_the_output_is_normed_first_and_gated_by_a_sigmoid_second() -> None:
    arguments, values = cell(2, 2), dict[str, Tensor]()
    out = kda.decode(**arguments, slots=int32(1, 0), at=tapped(values))
    normed = F.rms_norm(values["core"], (4,), arguments["norm_weight"], 1e-5)
    torch.testing.assert_close(out, (normed / (1 + (-arguments["gate"].view(2, 2, 4)).exp())).flatten(1))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("lengths", [[7], [3, 0, 2], [0, 0, 4], [1, 1, 1], [0, 0, 0], [5, 2, 0]], ids=str)
def test_prefill_equals_decoding_every_token(lengths: list[int], lower_bound: float | None) -> None:
    tokens = sum(lengths)
    arguments = cell(tokens, 6) | {"lower_bound": lower_bound}
    expected, slots = copied(arguments), [5, 0, 3][: len(lengths)]
    fresh = torch.tensor([False, True, True][: len(lengths)])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    out = kda.prefill(**arguments, cu_seqlens=ends.int(), slots=int32(*slots), fresh=fresh)
    outs = [
        decoded(expected, slot, range(int(start), int(end)), fresh[i : i + 1])
        for i, (slot, start, end) in enumerate(zip(slots, ends[:-1], ends[1:], strict=True))
    ]
    for slot, length, new in zip(slots, lengths, fresh.tolist(), strict=True):
        if length == 0 and new:  # decode has no empty call: an empty fresh sequence leaves zeros
            expected["state"][slot], expected["window"][slot] = 0, 0
    torch.testing.assert_close(out, torch.cat(outs))
    torch.testing.assert_close(arguments["state"], expected["state"])
    assert torch.equal(arguments["window"], expected["window"])


@pytest.mark.parametrize("split", [0, 1, 2, 3, 6])
def test_prefill_continues_from_what_an_earlier_prefill_left(split: int) -> None:
    arguments = cell(6, 1)
    whole, fresh = copied(arguments), torch.tensor([True])
    expected = kda.prefill(**whole, cu_seqlens=int32(0, 6), slots=int32(0), fresh=fresh)
    outs = []
    for rows, new in ((slice(0, split), fresh), (slice(split, 6), None)):
        part = {name: arguments[name][rows] for name in ACTIVATIONS}
        outs.append(kda.prefill(**{**arguments, **part}, cu_seqlens=int32(0, len(part["q"])), slots=int32(0), fresh=new))
    torch.testing.assert_close(torch.cat(outs), expected)
    torch.testing.assert_close(arguments["state"], whole["state"])


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_short_prompt_leaves_zeros_in_front_of_its_window(tokens: int) -> None:
    arguments = cell(tokens, 1)
    arguments["state"][:], arguments["window"][:] = NAN, NAN
    kda.prefill(**arguments, cu_seqlens=int32(0, tokens), slots=int32(0), fresh=torch.tensor([True]))
    raw = torch.cat([arguments[name] for name in "qkv"], dim=1)
    assert torch.equal(arguments["window"][0], F.pad(raw, (0, 0, 3 - tokens, 0)))


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_fresh_sequence_starts_from_zero_whatever_its_slot_holds(value: float) -> None:
    arguments = cell(2, 3)
    zeroed = copied(arguments)
    for pools, fill in ((arguments, value), (zeroed, 0.0)):
        pools["state"][2], pools["window"][2] = fill, fill
    out = kda.decode(**arguments, slots=int32(2, 0), fresh=torch.tensor([True, False]))
    assert torch.equal(out, kda.decode(**zeroed, slots=int32(2, 0)))
    assert out.isfinite().all() and torch.equal(arguments["state"], zeroed["state"])


@pytest.mark.parametrize("outside", [-1, 3, -(2**31), 2**31 - 1])
def test_padding_reads_nothing_writes_nothing_and_returns_zeros(outside: int) -> None:
    arguments = cell(2, 3)
    for name in ACTIVATIONS:
        arguments[name][1] = NAN
    before = copied(arguments)
    out = kda.decode(**arguments, slots=int32(1, outside), fresh=torch.tensor([False, True]))
    assert (out[1] == 0).all() and out[0].isfinite().all()
    assert torch.equal(arguments["state"][[0, 2]], before["state"][[0, 2]])
    assert torch.equal(arguments["window"][[0, 2]], before["window"][[0, 2]])
    assert not torch.equal(arguments["state"][1], before["state"][1])


def test_fp64_is_not_rounded_and_fp32_is_one_fp32_noise_away() -> None:
    double, single = cell(5, 1), cell(5, 1, torch.float32)
    double |= {name: x.double() for name, x in single.items() if isinstance(x, Tensor)}
    outs = [kda.prefill(**x, cu_seqlens=int32(0, 5), slots=int32(0)) for x in (single, double)]
    for got, gold in (outs, (single["state"], double["state"])):
        assert (got.dtype, gold.dtype) == (torch.float32, torch.float64)
        assert not torch.equal(gold.float().double(), gold)
        torch.testing.assert_close(got, gold.float())


@pytest.mark.parametrize(
    ("amplitude", "form", "printed"),
    [(1.0, ".0e", "6e-07"), (0.1, ".0e", "6e-05"), (0.01, ".1e", "5.9e-03"), (1e-3, ".2f", "0.32"), (1e-4, ".2f", "0.87")],
)
def test_l2_norm_adds_its_epsilon_to_the_sum(amplitude: float, form: str, printed: str) -> None:
    """The distance to a norm that adds it to the mean, as printed in known failure 05 (a draw with 0.84 of the mean energy)."""
    x = torch.randn(128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x *= amplitude * (0.84 * 128) ** 0.5 / x.norm()
    normed = kda.l2norm(x)
    assert digits(normed) == digits(x / (x.square().sum() + 1e-6).sqrt())
    by_mean = F.rms_norm(x, (128,), eps=1e-6) / 128**0.5
    assert f"{float((by_mean - normed).norm() / normed.norm()):{form}}" == printed


def test_a_zero_row_stays_exactly_zero() -> None:
    assert torch.equal(kda.l2norm(torch.zeros(2, 8)), torch.zeros(2, 8))
    arguments = cell(1, 1)
    arguments["q"].zero_()
    arguments["window"].zero_()
    out = kda.decode(**arguments, slots=int32(0))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    ("activation", "pool", "computed"),
    [("bfloat16", "bfloat16", "float32"), ("float32", "float32", "float32"), ("float32", "float64", "float64")],
)
def test_computes_in_the_dtype_of_its_inputs_and_at_least_fp32(activation: str, pool: str, computed: str) -> None:
    arguments, values = cell(1, 1, getattr(torch, activation)), dict[str, Tensor]()
    wide = {name: arguments[name].float() for name in ("a_log", "dt_bias")} | {"state": arguments["state"].to(getattr(torch, pool))}
    out = kda.decode(**{**arguments, **wide}, slots=int32(0), at=tapped(values))
    assert {value.dtype for value in values.values()} == {getattr(torch, computed)}
    assert (out.dtype, wide["state"].dtype) == (getattr(torch, activation), getattr(torch, pool))


def test_runs_in_full_precision_and_puts_the_setting_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = torch.get_float32_matmul_precision(), []

    def at(name: str, x: Tensor) -> Tensor:
        during.append(torch.get_float32_matmul_precision())
        return x

    torch.set_float32_matmul_precision("medium")
    try:
        kda.decode(**cell(1, 1), slots=int32(0), at=at)
        after = torch.get_float32_matmul_precision()
        with pytest.raises(ValueError, match="slots"):
            kda.decode(**cell(1, 1), slots=int32(0, 0))
        assert (set(during), after, torch.get_float32_matmul_precision()) == ({"highest"}, "medium", "medium")
    finally:
        torch.set_float32_matmul_precision(before)
