"""The command line: what a user can mend is one line and exit code 2; what ran is in the record and in the exit code."""

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

import workbench
from parity import catalog, record
from reference.points import KDA_CELL

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["kda.decode", "--device", "cpu", "--model", "tiny", "--steps", "1", "--regime", "slow", "--state-dtype", "fp32"]
Run = tuple[int, str, str]
Command = Callable[..., Run]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `workbench ARGUMENTS` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Run:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            workbench.main(list(arguments))
        return int(stopped.value.code or 0), *capsys.readouterr()

    return run


def refused(run: Run) -> str:
    """The one line of a refusal."""
    code, out, err = run
    assert code == 2 and out == "" and "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "kda.verify_offsets, kda.mixer, got 'nosuch'"),
        (["kda.decode:heads=two"], "heads: expected a whole number, got 'two'"),
        (["--model", "nosuch"], "model: expected one of glm-5.3-flash, kimi-linear-48b, tiny, got 'nosuch'"),
        (["kda.decode", "--impl", "nosuch"], "impl: expected one of triton, fla, torch or package.module:function, got 'nosuch'"),
        (["kda.decode", "--impl", "nosuch.module:f"], "impl: can't import 'nosuch.module'"),
        (["kda.decode", "--impl", "tests.candidates:nosuch"], "impl: tests.candidates has no function 'nosuch'"),
        (["kda.decode", "--impl", "tests.candidates:DROPPED_STEP"], "impl: tests.candidates has no function 'DROPPED_STEP'"),
        (["kda.decode", "--impl", ":f"], "impl: "),
        (["kda.decode", "--impl", "tests.candidates:"], "impl: tests.candidates has no function ''"),
        (["--reference", "nosuch"], "got 'nosuch'"),
        (["--dtype", "fp8"], "dtype: expected one of bf16, fp16, fp32, got 'fp8'"),
        (["--state-dtype", "fp16"], "state-dtype: expected one of fp32, bf16, got 'fp16'"),
        (["--regime", "wild"], "regime: expected one of random, slow, sharp, spiky, adversarial, got 'wild'"),
        (["--heads", "0"], "heads: expected 1 to 4096, got 0"),
        (["--heads", "2,-1"], "heads: expected 1 to 4096, got -1"),
        (["--heads", "two"], "heads: expected a whole number, got 'two'"),
        (["--heads", ","], "heads: expected at least one value"),
        (["--batch", "-1"], "batch: expected 0 to 1048576, got -1"),
        (["--steps", "-1"], "steps: expected 0 to 1048576, got -1"),
        (["--device", "tpu"], "device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cpu:0"], "device: expected cpu, cuda or cuda:N, got 'cpu:0'"),
        (["--config", "nosuch.toml"], "config: can't read nosuch.toml"),
        (["--resume", "nosuch.json"], "record: can't read nosuch.json"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(command: Command, tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in refused(command("sweep", "--out", "record.json", *arguments))
    assert not list(tmp_path.iterdir())


def test_an_empty_device_is_not_the_default_one(command: Command) -> None:
    assert "device: expected cpu, cuda or cuda:N, got ''" in refused(command("doctor", "--device", ""))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("arguments", [["sweep"], ["doctor"]])
def test_a_device_that_is_not_here_is_refused(command: Command, arguments: list[str]) -> None:
    assert "device: cuda is not here (0 CUDA devices); use cpu" in refused(command(*arguments, "--device", "cuda"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arch", "sm999"], "arch: expected one of sm80, "),
        (["--arch", ""], "arch: expected one of sm80, "),
        (["nosuch"], "kda.verify_offsets, kda.mixer, got 'nosuch'"),
        (["--model", "nosuch"], "model: expected one of"),
        (["--dtype", "fp8"], "dtype: expected one of"),
        (["--heads", "0"], "heads: expected 1 to 4096"),
        (["--arch", "cpu", "--without", "triton,fla,torch"], "nothing runs kda.decode on cpu: torch: switched off"),
        (["--without", "nosuch"], "nosuch"),
    ],
)
def test_dispatch_refuses_what_it_does_not_know(command: Command, arguments: list[str], says: str) -> None:
    assert says in refused(command("dispatch", *arguments))


def test_options_that_take_a_number_say_so(command: Command) -> None:
    code, out, err = command("sweep", "--steps", "many")
    assert code == 2 and out == "" and "Traceback" not in err and "Invalid value for '--steps'" in err


@pytest.mark.parametrize("out", [".", "nosuch/record.json"])
def test_a_place_for_the_record_that_cannot_be_written_is_refused_before_any_row(command: Command, tmp_path: Path, out: str) -> None:
    assert refused(command("sweep", *QUICK, "--impl", "torch", "--out", out)).startswith("error: out: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("broken.toml", "heads = [1,", "is not TOML"),
        ("wrong.toml", "color = 1", "has 'color'; known are"),
        ("latin.toml", "\udce9 = 1", "is not TOML"),
    ],
)
def test_a_configuration_that_is_broken_is_refused(command: Command, tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert says in refused(command("sweep", "--config", name))


@pytest.mark.parametrize(
    ("text", "says"), [("def f(:\n", "invalid syntax"), ("import nosuch_at_all\n", "nosuch_at_all"), ("1 / 0\n", "division by zero")]
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_words(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    name = f"candidate_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert says in refused(command("sweep", "kda.decode", "--impl", f"{name}:f"))


def test_a_function_in_the_folder_where_the_command_runs_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from optimized.peers.eager import decode\n")
    workbench_script = Path(sys.executable).parent / "workbench"
    if not workbench_script.exists():
        pytest.skip("the workbench command is not installed")
    arguments = ["sweep", "--impl", "mine:decode", *QUICK]
    done = subprocess.run([str(workbench_script), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "can't import" not in done.stderr and "mine:decode" in done.stdout


@pytest.mark.parametrize("text", [None, "", "[]", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [1]}', '{"schema": 1, "rows": [{}]}'])
@pytest.mark.parametrize("format", ["text", "markdown"])
def test_report_refuses_what_is_no_record(command: Command, tmp_path: Path, text: str | None, format: str) -> None:
    if text is not None:
        (tmp_path / "record.json").write_text(text)
    refused(command("report", "record.json", "--format", format))


def test_the_list_shows_what_a_function_of_ones_own_looks_like(command: Command) -> None:
    code, out, _ = command("sweep", "--list", "--signatures")
    assert code == 0
    for name in [*catalog.signature("kda.decode").parameters, *KDA_CELL, "random", "slow", "tiny", "triton", "fla", "torch"]:
        assert re.search(rf"\b{re.escape(name)}\b", out), name
    start, stop = (next(i for i, line in enumerate(out.splitlines()) if text in line) for text in ("def your_function(", ") -> Tensor"))
    (function,) = ast.parse("\n".join(line[2:] for line in out.splitlines()[start : stop + 1]) + ": ...").body
    assert isinstance(function, ast.FunctionDef) and [x.arg for x in function.args.args] == ["q", "k"]


def test_the_last_line_of_a_failure_makes_it_again(command: Command) -> None:
    code, out, _ = command("sweep", *QUICK, "--impl", "torch,tests.candidates:beta_bf16")
    first, *_, last = out.splitlines()
    assert code == 1 and first.startswith("FAIL  kda.decode: 1 FAIL, 1 PASS")
    again, repeated, _ = command(*shlex.split(last)[1:])
    assert again == 1 and repeated.splitlines()[-1] == last
    divergence = [text.partition("First divergence")[2] for text in (out, repeated)]
    assert divergence[0] == divergence[1] != ""


def test_exit_codes_of_a_sweep(command: Command) -> None:
    assert command("sweep", *QUICK, "--impl", "torch")[0] == 0
    assert command("sweep", *QUICK, "--impl", "torch", "--reference", "torch")[0] == 3
    assert command("sweep", *QUICK, "--impl", "torch", "--batch", "0")[0] == 3
    assert command("sweep", *QUICK, "--impl", "tests.candidates:no_update")[0] == 1


def test_report_renders_a_saved_record_in_every_format(command: Command, tmp_path: Path) -> None:
    _, text, _ = command("sweep", *QUICK, "--impl", "torch,tests.candidates:no_update", "--out", "record.json")
    saved = (tmp_path / "record.json").read_text()
    assert command("report", "record.json")[:2] == (1, text)
    assert command("report", "record.json", "--format", "json")[:2] == (1, saved)
    code, junit, _ = command("report", "record.json", "--format", "junit")
    assert code == 1 and [ET.fromstring(junit).get(key) for key in ("tests", "failures")] == ["2", "1"]
    code, markdown, _ = command("report", "record.json", "--format", "markdown", "--out", "report.md")
    assert (code, markdown) == (1, "") and "tests.candidates:no" in (tmp_path / "report.md").read_text()
    assert "--format" in command("report", "record.json", "--format", "yaml")[2]


@pytest.mark.parametrize(
    ("suffix", "begins"), [("html", "<!DOCTYPE html>"), ("md", "**PASS**"), ("xml", "<testsuites"), ("json", "{"), ("txt", "PASS")]
)
def test_report_writes_what_its_file_is_called(command: Command, tmp_path: Path, suffix: str, begins: str) -> None:
    command("sweep", *QUICK, "--impl", "torch", "--out", "record.json")
    assert command("report", "record.json", "--out", f"report.{suffix}")[:2] == (0, "")
    assert (tmp_path / f"report.{suffix}").read_text().startswith(begins)
    assert command("report", "record.json", "--out", f"report.{suffix}", "--format", "markdown")[0] == 0
    assert (tmp_path / f"report.{suffix}").read_text().startswith("**PASS**")


def test_report_merges_records_and_compare_says_what_is_missing(command: Command, tmp_path: Path) -> None:
    for heads in ("1", "2"):
        command("sweep", *QUICK, "--impl", "torch", "--heads", heads, "--out", f"{heads}.json")
    assert command("report", "1.json", "2.json", "--out", "both.json")[:2] == (0, "")
    both = record.load(tmp_path / "both.json")
    assert [row["heads"] for row in both["rows"]] == [1, 2] and record.missing(both) == []
    assert command("report", "both.json")[1].startswith("PASS  kda.decode: 2 PASS on cpu")
    assert command("compare", "1.json", "both.json")[0] == 0
    code, out, _ = command("compare", "both.json", "1.json")
    assert code == 1 and out.startswith("WORSE  1 worse: 1 row and 0 timings in both records") and "missing" in out
    code, out, _ = command("compare", "both.json", "1.json", "--format", "json")
    assert code == 1 and [change["after"] for change in json.loads(out)["changes"]] == ["missing"]


def test_accuracy_pairs_answers_and_exits_1_where_b_is_worse(command: Command, tmp_path: Path) -> None:
    for name, right in (("a", 30), ("b", 20), ("c", 28), ("none", None)):
        lines = [] if right is None else [f"{question},{int(question < right)}" for question in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,correct", *lines, ""]))
    assert [command("accuracy", one, other)[0] for one, other in (("a.csv", "b.csv"), ("b.csv", "a.csv"), ("a.csv", "c.csv"))] == [1, 0, 0]
    code, out, _ = command("accuracy", "none.csv", "none.csv")
    assert code == 3 and out.startswith("VACUOUS  nothing was compared")
    assert command("accuracy", "a.csv", "b.csv", "--out", "page.html")[:2] == (1, "")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "nosuch.json", "here.json"], "record: can't read nosuch.json"),
        (["report", "here.json", "--out", "nosuch/report.html"], "out: there is no folder nosuch"),
        (["compare", "here.json", "nosuch.json"], "record: can't read nosuch.json"),
        (["compare", "here.json", "here.json", "--format", "junit"], "format: expected one of text, json, markdown, html, got 'junit'"),
        (["compare", "here.json", "damaged.json"], "record: here.json or damaged.json is damaged"),
        (["report", "here.json", "damaged.json"], "record: here.json damaged.json is damaged"),
        (["accuracy", "here.json", "here.json"], "accuracy: expected a file that ends in .jsonl or .csv"),
        (["accuracy", "a.csv", "b.csv"], "accuracy: b.csv lacks 1 of the 2 questions of a.csv, the first '2'"),
        (["accuracy", "a.csv", "a.csv", "--id", "doc_id"], "accuracy: a.csv line 2: expected 'doc_id', got 'id', 'correct'"),
    ],
)
def test_what_cannot_be_compared_is_one_line(command: Command, tmp_path: Path, arguments: list[str], says: str) -> None:
    command("sweep", *QUICK, "--impl", "torch", "--out", "here.json")
    damaged = json.loads((tmp_path / "here.json").read_text())
    damaged["rows"][0]["output"] = 5
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    (tmp_path / "a.csv").write_text("id,correct\n1,1\n2,0\n")
    (tmp_path / "b.csv").write_text("id,correct\n1,1\n")
    assert says in refused(command(*arguments))


def test_the_record_names_the_command_and_the_seed(command: Command, tmp_path: Path) -> None:
    command("sweep", *QUICK, "--impl", "torch", "--seed", "11", "--out", "record.json")
    made = json.loads((tmp_path / "record.json").read_text())
    assert made["command"][0] == "workbench" and made["rows"][0]["seed"] == 11 and made["rows"][0]["case"].endswith("seed=11")
    assert made["environment"]["interpreter"] is True


def test_an_interrupted_sweep_keeps_its_rows_and_exits_130(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    heads = ",".join(str(count) for count in range(1, 97))
    arguments = ["sweep", *QUICK, "--steps", "40", "--impl", "torch", "--heads", heads, "--out", str(path)]
    child = subprocess.Popen(
        [sys.executable, "workbench.py", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a parent in the background may have it ignored
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (path.exists() and record.load(path)["rows"]) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and out == "" and "Traceback" not in err
    assert "interrupted: with --out, the rows finished before are in the record" in err
    rows = record.load(path)["rows"]
    assert 0 < len(rows) < 96 and all(row["verdict"] == "PASS" for row in rows)
    told = subprocess.run([sys.executable, "workbench.py", "report", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lost = 96 - len(rows)
    assert told.returncode == 3 and told.stdout.startswith("INCONCLUSIVE  kda.decode: ")
    assert (
        f"{lost} of 96 planned rows missing" in told.stdout and f"MISSING torch kda.decode:model=tiny,heads={len(rows) + 1}," in told.stdout
    )
    assert list(tmp_path.iterdir()) == [path]
