"""Candidates, files and options that mean harm or are merely careless: a verdict or one line, never a pass and never damage."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench
from optimized import interpreter
from optimized.peers import eager
from parity import gate, record, sweep
from parity.problem import Problem
from reference import kda
from tests.candidates import given
from tests.optimized.test_kda_decode import cell

CASE = Problem("kda.decode", model="tiny", steps=2)
QUICK = ["sweep", "kda.decode:model=tiny,heads=1,batch=1,steps=1", "--impl"]


def stops_the_process(q: Tensor, k: Tensor, **x: Any) -> Tensor:
    raise SystemExit(0)


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        workbench.main(arguments)
    return int(stopped.value.code or 0)


def test_a_candidate_that_leaves_the_process_fails() -> None:
    row = gate.judge(CASE, given(stops_the_process))
    assert row["verdict"] == "FAIL" and row["reason"].startswith("raised SystemExit: 0")


def test_a_module_that_leaves_the_process_on_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaves_on_import.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert command(*QUICK, "leaves_on_import:decode") == 2
    assert "impl: can't import 'leaves_on_import'" in capsys.readouterr().err


def test_what_the_reference_side_raises_is_not_the_candidates_fault() -> None:
    row = gate.judge(CASE, given(eager.decode), given(stops_the_process))
    assert row["verdict"] == "INCONCLUSIVE" and "the reference raised SystemExit" in row["reason"]


@pytest.mark.skipif(not interpreter.active(), reason="needs the interpreter")
def test_a_kernel_that_ran_only_while_it_was_observed_is_not_proved() -> None:
    from optimized import kda_decode

    calls: list[int] = []

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        calls.append(1)
        return (kda_decode.decode if len(calls) == 1 else eager.decode)(q, k, **x)

    row = gate.judge(CASE, given(candidate, kernels=("kda_decode_kernel",)))
    assert (row["verdict"], row["reason"]) == ("INCONCLUSIVE", "not proved: kda_decode_kernel was launched 0 times in 2 steps")


def test_a_record_goes_through_a_link_and_into_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert command(*QUICK, "torch", "--out", str(tmp_path / "pipe")) == 2
    assert "is no ordinary file" in capsys.readouterr().err and (tmp_path / "pipe").is_fifo()
    assert command(*QUICK, "torch", "--out", str(tmp_path / "link.json")) == 0
    assert (tmp_path / "link.json").is_symlink() and record.load(tmp_path / "real.json")["summary"]["PASS"] == 1
    assert (tmp_path / "real.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "--seed", "99999999999999999999"], "seed: expected -1 to 2147483647"),
        (["sweep", "kda.decode:device=foo"], "device: expected cpu, cuda or cuda:N"),
        (["sweep", "--heads", "100000000000"], "heads: expected 1 to 4096"),
        (["sweep", "kda.decode:heads=2", "--heads", "4"], "heads: kda.decode:heads=2 fixes it already"),
        (["sweep", "kda.decode:heads=2,heads=3"], "case: heads stands twice"),
        (["dispatch", "--without", "nosuch"], "without: expected some of"),
    ],
)
def test_options_that_contradict_or_overflow_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("damage", [{"output": 5}, {"invariants": [1]}, {"drift": [[1]]}, {"path": {"kernels": 5}}, {"verdict": "GREAT"}])
def test_a_damaged_record_is_one_line(damage: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = gate.judge(CASE, given(eager.decode)) | damage
    made = record.new("cpu", []) | {"rows": [row]}
    (tmp_path / "record.json").write_text(json.dumps(made))
    assert command("report", str(tmp_path / "record.json")) == 2
    assert capsys.readouterr().err.startswith("error: record: ")


def test_rows_of_other_versions_are_made_again() -> None:
    work = sweep.tasks(sweep.layered("cpu", None, {"op": ["kda.decode:model=tiny,steps=1"], "impl": "torch"}))
    made = sweep.run(work, record.new("cpu", []))
    here = record.environment("cpu")
    assert sweep.kept(work, made, here) == 1
    made["environment"]["torch"] = "1.0"
    assert sweep.kept(work, made, here) == 0


@pytest.mark.parametrize("decode", [kda.decode, eager.decode])
def test_pools_that_overlap_or_need_gradients_are_refused(decode: Callable[..., Tensor]) -> None:
    for name, change in (
        ("window", lambda x: torch.zeros(4096, dtype=x.dtype).as_strided(x.shape, (40, 3, 1))),
        ("window", lambda x: x.clone().requires_grad_()),
        ("state", lambda x: x.clone().requires_grad_()),
    ):
        x = cell(2)
        x[name] = change(x[name])
        before = x["state"].detach().clone()
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            decode(**x)
        assert torch.equal(x["state"], before)


def test_a_rate_that_is_nan_is_not_hidden() -> None:
    pytest.importorskip("triton")
    from optimized import kda_decode

    for decode in (kda.decode, eager.decode, kda_decode.decode):
        x = cell(1)
        x["a_log"] = torch.full_like(x["a_log"], torch.nan)
        assert decode(**x).isnan().any(), decode.__module__
