"""The sweep: options in layers, cases that spell themselves, rows that are kept or made again."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from parity import record, sweep
from parity.problem import DTYPES, STATE_DTYPES, Problem, parse
from parity.regimes import REGIMES
from reference.presets import PRESETS

ONE = {"model": "tiny", "steps": 1, "regime": "slow", "state_dtype": "fp32", "impl": "torch"}


def options(config: Path | None = None, device: str = "cpu", **given: Any) -> sweep.Options:
    return sweep.layered(device, config, given)


def config(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def swept(given: dict[str, Any], **how: Any) -> list[record.Row]:
    made = record.new("cpu", ["workbench"])
    return sweep.run(sweep.tasks(options(**{"op": "kda.decode"} | given)), made, **how)["rows"]


def test_the_command_line_outranks_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, 'heads = [3, 5]\nsteps = 7\nstate-dtype = "bf16"\nregime = "sharp,spiky"\n')
    layered = options(file, heads="8", regime=None)
    assert (layered.heads, layered.steps, layered.state_dtype, layered.regime) == ((8,), 7, ("bf16",), ("sharp", "spiky"))
    assert (layered.batch, layered.dtype) == (sweep.Options().batch, ("bf16",))


def test_the_default_shapes_are_those_of_the_device_and_any_layer_changes_them(tmp_path: Path) -> None:
    assert options().heads == (2,) and options(device="cuda").heads == (16, 64)
    assert sweep.layered("cuda", None, {"device": "cpu"}).heads == (2,)
    assert options(config(tmp_path, 'device = "cuda:0"\nsteps = 3'), batch=4).batch == (4,)
    assert options(config(tmp_path, 'device = "cuda:0"\nsteps = 3')).steps == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("color = 'red'", "'color'; known are batch, device, drafts, dtype"),
        ("heads = ", "is not TOML"),
        ("heads = 1.5", "heads: expected a whole number, got 1.5"),
        ("heads = true", "heads: expected a whole number, got True"),
        ("regime = []", "regime: expected at least one value"),
        ("steps = 'many'", "steps: expected a whole number, got 'many'"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"config|expected") as refused:
        options(config(tmp_path, text))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config: can't read"):
        options(tmp_path / "nosuch.toml")


def test_lists_are_comma_separated_and_each_value_counts_once() -> None:
    layered = options(heads=" 1, 2,2,,4 ", regime="slow,random,slow")
    assert (layered.heads, layered.regime) == ((1, 2, 4), ("slow", "random"))


def test_a_sweep_is_the_product_of_its_lists() -> None:
    given = options(
        op="kda.decode", model="tiny", heads="1,2", batch="1,3", dtype="bf16,fp16", regime="slow", impl="torch,triton", state_dtype="bf16"
    )
    work = sweep.tasks(given)
    found = [(task.problem.heads, task.problem.batch, task.problem.dtype, task.impl.name) for task in work]
    assert found == list(itertools.product((1, 2), (1, 3), ("bf16", "fp16"), ("torch", "triton")))


def test_what_takes_minutes_in_the_interpreter_runs_there_only_when_it_is_named() -> None:
    assert "fla" not in [task.impl.name for task in sweep.tasks(options(op="kda.prefill", model="tiny"))]
    assert {task.impl.name for task in sweep.tasks(options(op="kda.prefill", model="tiny", impl="fla"))} == {"fla"}


def test_a_case_is_one_problem() -> None:
    work = sweep.tasks(options(op=("kda.decode:model=tiny,heads=3,steps=5",), impl="torch"))
    assert [(task.problem.heads, task.problem.steps) for task in work] == [(3, 5)]


def test_every_case_spells_itself() -> None:
    for model, dtype, state, regime in itertools.product(PRESETS, DTYPES, STATE_DTYPES, REGIMES):
        problem = Problem("kda.decode", model, 3, 5, dtype, state, regime, 9)
        assert parse(str(problem)) == problem and str(parse(str(problem))) == str(problem)
    assert str(Problem("kda.decode", "tiny", seed=7)).endswith(",steps=16,device=cpu,seed=7")
    assert parse("kda.decode") == Problem("kda.decode")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("kda.decode:colour=red", "got 'colour=red'"),
        ("kda.decode:heads", "got 'heads'"),
        ("kda.decode:heads=two", "heads: expected a whole number, got 'two'"),
        ("kda.decode:heads=0", "heads: expected 1 to 4096, got 0"),
        ("nosuch:heads=1", "got 'nosuch'"),
        ("kda.decode:dtype=fp8", "dtype: expected one of bf16, fp16, fp32, got 'fp8'"),
    ],
)
def test_a_case_with_a_mistake_says_which(case: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"expected|takes") as refused:
        parse(case)
    assert says in str(refused.value)


def resumed(tmp_path: Path, given: dict[str, Any] = ONE, **changed: Any) -> record.Row:
    """The row of a sweep that resumes a record of one row, whose time is a mark; `changed` edits that row first."""
    path = tmp_path / "old.json"
    swept(ONE, out=path)
    old = record.load(path)
    old["rows"][0] |= {"seconds": -1.0} | changed
    record.save(old, path)
    (row,) = swept(given, resume=record.load(path))
    return row


def test_resume_keeps_a_row_of_the_same_inputs_contract_and_sources(tmp_path: Path) -> None:
    assert resumed(tmp_path)["seconds"] == -1


@pytest.mark.parametrize(
    "changed",
    [
        {"impl_hash": "0" * 16},
        {"contract": {"rounds": {}, "accumulate": "fp32", "deterministic": True}},
        {"reference": "triton"},
        {"impl": "triton"},
        {"case": "kda.decode:model=tiny"},
        {"verdict": "SKIPPED"},
    ],
)
def test_resume_makes_a_row_again_when_something_changed(tmp_path: Path, changed: dict[str, Any]) -> None:
    row = resumed(tmp_path, **changed)
    assert row["seconds"] >= 0 and row["verdict"] == "PASS"


@pytest.mark.parametrize("changed", [{"seed": 5}, {"steps": 2}, {"heads": 3}])
def test_resume_makes_a_row_of_other_inputs(tmp_path: Path, changed: dict[str, Any]) -> None:
    row = resumed(tmp_path, ONE | changed)
    assert row["seconds"] >= 0 and all(row[key] == value for key, value in changed.items())


def test_fail_fast_stops_at_the_first_failure_and_only_there() -> None:
    work = ONE | {"impl": "torch,tests.candidates:beta_bf16,torch,tests.candidates:no_update", "op": ("kda.decode",)}
    assert [row["verdict"] for row in swept(work)] == ["PASS", "FAIL", "FAIL"]
    assert [row["verdict"] for row in swept(work, fail_fast=True)] == ["PASS", "FAIL"]


def test_the_record_on_disk_has_every_row_that_is_finished(tmp_path: Path) -> None:
    path, seen = tmp_path / "record.json", []
    rows = swept(ONE | {"heads": "1,2,3"}, out=path, finished=lambda row: seen.append(len(record.load(path)["rows"])))
    assert seen == [1, 2, 3] and len(rows) == 3


def test_a_problem_named_twice_is_one_row() -> None:
    once = Problem("kda.decode")
    one = sweep.Options(("kda.decode",), state_dtype=("fp32",), regime=("random",), seed=(-1, once.seed), steps=16)
    assert len(sweep.problems(one)) == 1


def test_a_record_holds_its_plan_and_a_resume_completes_it(tmp_path: Path) -> None:
    path, work = tmp_path / "record.json", sweep.tasks(options(**{"op": "kda.decode"} | ONE | {"heads": "1,2,3"}))

    def stops(task: sweep.Task) -> None:
        if task is work[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(work, record.new("cpu", []), out=path, started=stops)
    half = record.load(path)
    half["rows"][0]["seconds"] = -1.0
    assert [plan["case"] for plan in record.missing(half)] == [str(task.problem) for task in work[1:]]
    whole = sweep.run(work, record.new("cpu", []), resume=half)
    assert record.missing(whole) == [] and record.exit_code(whole) == 0
    assert [row["heads"] for row in whole["rows"]] == [1, 2, 3] and whole["rows"][0]["seconds"] == -1


def test_a_sweep_that_is_stopped_in_its_first_row_says_what_it_planned(tmp_path: Path) -> None:
    def stops(task: sweep.Task) -> None:
        raise KeyboardInterrupt

    path, work = tmp_path / "record.json", sweep.tasks(options(**{"op": "kda.decode"} | ONE | {"heads": "1,2"}))
    with pytest.raises(KeyboardInterrupt):
        sweep.run(work, record.new("cpu", []), out=path, started=stops)
    assert [plan["case"] for plan in record.missing(record.load(path))] == [str(task.problem) for task in work]


def test_a_resume_that_is_stopped_loses_no_row_it_kept(tmp_path: Path) -> None:
    path, given = tmp_path / "record.json", {"op": "kda.decode"} | ONE
    sweep.run(sweep.tasks(options(**given | {"heads": "2,3"})), record.new("cpu", []), out=path)
    before, work = record.load(path), sweep.tasks(options(**given | {"heads": "1,2,3"}))

    def stops(task: sweep.Task) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(work, record.new("cpu", []), out=path, resume=before, started=stops)
    assert [row["heads"] for row in record.load(path)["rows"]] == [2, 3]


@pytest.mark.parametrize("seed", ["٣", "1_0", "+1", "0x1", "1.0", ""])
def test_whole_numbers_are_decimal_digits(seed: str) -> None:
    with pytest.raises(ValueError, match="seed: expected"):
        sweep.layered("cpu", None, {"seed": seed})
    with pytest.raises(ValueError, match="seed: expected"):
        parse(f"kda.decode:seed={seed}")
