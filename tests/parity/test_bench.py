"""Speed: what is counted, what is timed, and what is said where nothing can be timed."""

import re
from typing import Any

import pytest
import torch

import workbench
from optimized import registry
from parity import bench, bench_operators, race
from parity.bench_operators import OPERATORS
from parity.problem import Problem
from parity.race import Contender
from parity.render import readme


def test_bytes_are_each_input_once_and_each_output_once() -> None:
    problem = Problem("kda.decode", heads=64, batch=256)
    state = 2 * 256 * 64 * 128 * 128 * 4
    window = 2 * 256 * 3 * 24576 * 2
    activations = 256 * (24576 + 8192 + 64 + 2 * 8192) * 2
    weights = 24576 * 4 * 2 + (64 + 8192) * 4 + 128 * 2
    moved = OPERATORS["kda.decode"].moved
    assert moved(problem) == state + window + activations + weights
    assert moved(problem) - moved(Problem("kda.decode", heads=64, batch=256, state_dtype="bf16")) == state // 2


def test_a_prefill_moves_one_state_and_every_token() -> None:
    token = (24576 + 8192 + 64 + 2 * 8192) * 2
    short, long = (Problem("kda.prefill", heads=64, batch=1, tokens=tokens) for tokens in (1024, 8192))
    moved = OPERATORS["kda.prefill"].moved
    assert moved(long) - moved(short) == (8192 - 1024) * token
    assert moved(short) - 1024 * token == OPERATORS["kda.decode"].moved(Problem("kda.decode", heads=64, batch=1)) - token


def test_a_verify_moves_the_state_once_and_its_drafts_through_the_caches() -> None:
    kept = 3 * (24576 + 8192 + 64) * 2  # raw inputs of three drafts
    token = (24576 + 8192 + 64 + 2 * 8192) * 2
    decode, verify = Problem("kda.decode", heads=64, batch=16), Problem("kda.verify", heads=64, batch=16, drafts=3)
    extra = OPERATORS["kda.verify"].moved(verify) - OPERATORS["kda.decode"].moved(decode)
    assert extra == 16 * (3 * token + 2 * kept)


def test_operations_of_a_prefill_are_those_of_its_matrix_products() -> None:
    problem = Problem("kda.prefill", heads=64, batch=1, tokens=8192)
    chunk = 2 * (3 * 16 * 128 * 128 + 16 * 16 * (3 * 128 + 2 * 128))
    assert OPERATORS["kda.prefill"].flops(problem) == 8192 // 16 * 64 * chunk


@pytest.mark.parametrize("op", list(OPERATORS))
def test_every_operator_rotates_more_than_the_l2_cache_and_has_a_default_case(op: str) -> None:
    for problem in bench.problems("cpu", {"op": [op]}):
        layers = bench_operators.layer_count(problem)
        assert layers == bench_operators.MOST_LAYERS or layers * OPERATORS[op].moved(problem) >= 2 * bench_operators.ROTATED_BYTES
        assert problem.regime == "random"


def test_an_operator_has_its_own_lists_and_what_is_given_wins() -> None:
    prefills = bench.problems("cpu", {"op": ["kda.prefill"]})
    assert [(p.heads, p.tokens, p.batch) for p in prefills] == [(h, t, 1) for h in (64, 16) for t in (1024, 8192, 32768)]
    assert {(p.heads, p.batch, p.drafts, p.state_dtype) for p in bench.problems("cpu", {"op": ["kda.verify"]})} == {
        (h, b, 3, s) for h in (64, 16) for b in (1, 16, 64, 256) for s in ("fp32", "bf16")
    }
    assert [(p.heads, p.tokens) for p in bench.problems("cpu", {"op": ["kda.prefill"], "heads": "8", "tokens": "5,6"})] == [(8, 5), (8, 6)]
    assert {p.op for p in bench.problems("cpu", {})} == set(OPERATORS)


def test_a_case_is_measured_as_it_stands() -> None:
    assert bench.problems("cpu", {"op": ["kda.decode:heads=2,batch=3"], "heads": None}) == [Problem("kda.decode", heads=2, batch=3)]
    with pytest.raises(ValueError, match=r"^heads: kda.decode:batch=3 fixes it already"):
        bench.problems("cpu", {"op": ["kda.decode:batch=3"], "heads": "2"})
    with pytest.raises(ValueError, match=r"^operator: expected one of kda.decode, .*, which are timed, got 'kda.encode'"):
        bench.problems("cpu", {"op": ["kda.encode"]})


def test_without_a_gpu_the_command_says_what_it_would_measure_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        workbench.main(["bench", "kda.decode", "--heads", "16", "--batch", "1,64", "--device", "cpu"])
    out = capsys.readouterr().out.splitlines()
    assert stopped.value.code == 3 and "nothing was timed" in out[0]
    assert sum(line.startswith("kda.decode:") and "heads=16" in line for line in out) == 4


def test_the_command_takes_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        workbench.main(["bench", "kda.verify:heads=2,batch=3,drafts=2", "--device", "cpu"])
    assert stopped.value.code == 3
    assert re.match(r"kda.verify:model=glm-5.3-flash,heads=2,batch=3,.*drafts=2$", capsys.readouterr().out.splitlines()[1])


def test_a_floor_is_the_slowest_ceiling_at_the_operations_of_the_problem() -> None:
    problem = Problem("kda.prefill", model="tiny", heads=2, batch=1, tokens=64)
    flops = OPERATORS["kda.prefill"].flops(problem)
    copy, matmul = Contender("copy", [], times=[9.0, 10.0, 11.0]), Contender("matmul", [], times=[40.0], flops=2 * flops)
    other = Contender("read_modify_write", [], times=[99.0])
    assert bench.floor(problem, [copy, matmul, other]) == ("matmul", 20.0)
    matmul.times = [4.0]
    assert bench.floor(problem, [copy, matmul, other]) == ("copy", 10.0)
    copy.times, copy.note = [], "out of memory"
    with pytest.raises(RuntimeError, match="copy could not be timed: out of memory"):
        bench.floor(problem, [copy, matmul])


@pytest.mark.parametrize("flops", [1, 2 * 64**3, 2 * 64**3 + 1, 10**12])
def test_the_product_of_a_floor_takes_at_least_the_operations(flops: int) -> None:
    side = bench.matmul_side(flops)
    assert side % bench.MATMUL_STEP == 0 and 2 * (side - bench.MATMUL_STEP) ** 3 < flops <= 2 * side**3


SMALL: dict[str, dict[str, Any]] = {"kda.decode": {}, "kda.prefill": {"tokens": 5}, "kda.verify": {"drafts": 2}}


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_operators, "layer_count", lambda problem: 2)


@pytest.mark.parametrize("op", list(SMALL))
def test_every_contender_that_runs_here_can_be_called_on_every_layer(op: str, two_layers: None) -> None:
    problem = Problem(op, model="tiny", heads=2, batch=2, **SMALL[op])
    layers = OPERATORS[op].layers(problem)
    assert all(a is not b for a, b in zip(layers[0]["state"], layers[1]["state"], strict=True))
    contenders = bench.implementations(problem, layers)
    assert contenders[0].name == "triton" and contenders[0].source
    for contender in contenders:
        assert contender.note or len(contender.calls) == 2, contender.name
        for call in contender.calls:
            out = call()
            out = out[0] if isinstance(out, tuple) else out
            assert bool(out.isfinite().all()), contender.name
    if registry.find("kda.decode", "fla").supports(problem.workload())[0]:
        expected = {"kda.decode": {"fla", "fla kernels"}, "kda.prefill": set(), "kda.verify": {"fla", "fla kernels", "decode cell"}}
        assert expected[op] <= {contender.name for contender in contenders if contender.calls}


@pytest.mark.parametrize("op", list(SMALL))
def test_a_tile_sweep_calls_ours_at_every_tile(op: str, two_layers: None) -> None:
    problem = Problem(op, model="tiny", heads=2, batch=1, **SMALL[op])
    layers = OPERATORS[op].layers(problem)
    contenders = bench.tiled(problem, layers)
    assert len({contender.name for contender in contenders}) == len(OPERATORS[op].tiles) > 5
    assert all(len(contender.calls) == 2 for contender in contenders)
    assert bool(contenders[-1].calls[0]().isfinite().all())


def test_the_replay_of_a_verify_is_timed_at_its_longest_and_with_nothing_to_replay(two_layers: None) -> None:
    """The same layers: a decode of the golden tokens leaves the state of a verify that replays nothing."""
    problem = Problem("kda.verify", model="tiny", heads=2, batch=2, drafts=2)
    layers = OPERATORS["kda.verify"].layers(problem)
    assert all(layer["accepted"].tolist() == [3, 3] and layer["offsets"][0].tolist() == [2, 2] for layer in layers)
    assert layers[0]["offsets"] is layers[1]["offsets"]
    by_name = {contender.name: contender for contender in bench.implementations(problem, layers)}
    before = layers[0]["state"].clone()
    by_name["decode cell"].calls[0]()
    decoded = layers[0]["state"].clone()
    layers[0]["state"].copy_(before)
    layers[0]["window"].copy_(layers[1]["window"])  # the same values at the start
    by_name["triton, no replay"].calls[0]()
    torch.testing.assert_close(layers[0]["state"], decoded, equal_nan=True)
    layers[0]["state"].copy_(before)
    by_name["triton"].calls[0]()
    assert not torch.equal(layers[0]["state"], decoded)


def test_a_loop_over_tokens_is_not_waited_for(two_layers: None) -> None:
    problem = Problem("kda.prefill", model="tiny", heads=2, batch=1, tokens=1025)
    loop = next(c for c in bench.implementations(problem, OPERATORS["kda.prefill"].layers(problem)) if c.name == "torch")
    assert not loop.calls and loop.note == "a loop over tokens: not waited for beyond 1024"


def timed(impl: str, us: float, op: str = "kda.decode", flops: int = 0, **changed: object) -> dict[str, object]:
    return {"op": op, "impl": impl, "heads": 64, "batch": 64, "tokens": 64, "dtype": "bf16", "state_dtype": "fp32", "us": us,
            "bytes": 400_000_000, "flops": flops, "ceiling": "read_modify_write", "ceiling_us": 100.0, "ratio": us / 100,
            "impl_hash": None, **changed}  # fmt: skip


def table(*rows: dict[str, object]) -> tuple[list[dict[str, str]], str]:
    """The lines of the speed table by title, and the note under it."""
    record = {"environment": {"device": "NVIDIA H200", "arch": "sm90", "torch": "2.11"}, "rows": [], "bench": list(rows)}
    head, _, *lines, _, note = readme.speed(record).splitlines()
    titles = head.strip("| ").split(" | ")
    return [dict(zip(titles, line[2:-2].split(" | "), strict=True)) for line in lines], note


def test_the_speed_table_sets_ours_beside_peers_and_floor() -> None:
    [cells], note = table(
        timed("triton", 107.0),
        timed("fla kernels", 160.5),
        timed("copy", 143.0),
        timed("matmul 8192", 1400.0, op="device", flops=2 * 8192**3),
        timed("copy", 100.0, op="device"),
    )
    assert cells["ours, us"] == "107" and cells["FLA kernels, us"] == "160" and "tokens" not in cells
    assert cells["ours / floor"] == "1.07" and cells["FLA kernels / ours"] == "1.50"
    assert "NVIDIA H200" in note and note.endswith("In the same run: matmul 8192 785 TFLOP/s.")
    assert "Floor: an in-place read-modify-write of the same bytes." in note


def test_prefills_of_different_lengths_are_lines_of_their_own() -> None:
    lines, note = table(
        *(
            timed(name, us, op="kda.prefill", batch=1, tokens=tokens, ceiling="copy", ceiling_us=50.0)
            for tokens, times in ((1024, (100.0, 250.0)), (8192, (800.0, 1200.0)))
            for name, us in zip(("triton", "flash_kda kernels"), times, strict=True)
        ),
        timed("copy", 100.0, op="device"),
    )
    assert [(line["tokens"], line["ours, us"], line["FlashKDA kernels / ours"]) for line in lines] == [
        ("1024", "100", "2.50"), ("8192", "800", "1.50"),
    ]  # fmt: skip
    assert "Floor: a copy of the same bytes. In the same run: copy 4.00 TB/s." in note


def test_a_verify_is_set_beside_the_decode_cell() -> None:
    lines, _ = table(timed("triton", 120.0, op="kda.verify", tokens=256), timed("decode cell", 100.0, op="kda.verify", tokens=256))
    assert lines[0]["ours / our decode cell"] == "1.20" and lines[0]["tokens"] == "256"


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(SMALL))
def test_ours_peers_and_ceilings_are_timed_in_one_run(op: str) -> None:
    rows = bench.measure(Problem(op, heads=4, batch=2, device="cuda", **SMALL[op]))
    by_name = {row["impl"]: row for row in rows}
    launches = {"kda.decode": 1, "kda.prefill": 3, "kda.verify": 1}[op]
    assert {"copy", "triton", "fla", "torch", *OPERATORS[op].floor} <= set(by_name)
    ours = by_name["triton"]
    assert ours["launches"] == launches and 0 < ours["us_min"] <= ours["us"] <= ours["us_max"]
    assert ours["runs"] == race.PASSES * race.REPLAYS and not ours["reason"]
    assert all(row["us"] is not None for name, row in by_name.items() if not name.startswith("flash_kda"))


@pytest.mark.gpu
def test_what_a_graph_refuses_is_timed_without_one_and_says_so() -> None:
    x = torch.ones(1024, device="cuda")
    after = Contender("add", [lambda: x.add_(1)])
    host = Contender("host", [lambda: x.sum().item()])
    race.race([host, after], "cuda")
    assert host.times and host.note.startswith("without a graph, which it refuses: ")
    assert after.times and not after.note
