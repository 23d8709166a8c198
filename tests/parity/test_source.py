"""The cases of the source PRs: the list, what it says of a decode from zero, offsets of a layer and of a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench
from optimized.peers import eager_verify
from parity import source
from parity.case import Case
from parity.problem import Problem, parse
from parity.render import facts
from parity.trajectory import run


def test_the_list_on_a_gpu_has_every_size_of_the_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.problem.check_device", lambda device: None)
    monkeypatch.setattr("optimized.arch.of_device", lambda device: "sm90")
    sizes = [(p.heads, p.batch) for p in source._on_gpu("cpu") if p.op == "kda.mixer" and p.steps == 64]
    assert sizes == [(heads, batch) for heads in (8, 16, 32, 64) for batch in (1, 16, 64, 256)]


def test_a_cpu_runs_the_same_list_at_one_size() -> None:
    few, many = ([(p.op, p.state_dtype, p.steps, p.offsets, p.fresh) for p in ps] for ps in (source.problems("cpu"), source._on_gpu("cpu")))
    assert few == list(dict.fromkeys(many)) and len(few) == 7


def test_the_command_runs_it_and_reports_the_drift_from_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    with pytest.raises(SystemExit) as stopped:
        workbench.main(["sweep", "--preset", "source", "--impl", "torch", "--device", "cpu", "--out", str(out)])
    rows, printed = json.loads(out.read_text())["rows"], capsys.readouterr().out
    assert stopped.value.code in (0, None) and [row["case"] for row in rows] == [str(p) for p in source.problems("cpu")]
    assert rows[0]["absolute"] is not None
    (line,) = facts.from_zero(rows)
    assert line in printed and [part.split(":")[0] for part in line.partition("at step ")[2].split(", ")] == ["1", "8", "32", "64", "128"]


def test_a_preset_fixes_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["--preset", "source", "--heads", "8"], "error: heads: --preset source fixes it already"),
        (["--preset", "nosuch"], "error: preset: expected source, got 'nosuch'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            workbench.main(["sweep", *arguments])
        assert stopped.value.code == 2 and capsys.readouterr().err.startswith(says)


def test_a_fresh_problem_starts_from_zeros_and_says_so() -> None:
    problem = parse("kda.decode:model=tiny,fresh=1")
    pools = Case(problem).pools()
    assert "fresh=1" in str(problem) and "fresh" not in str(Problem("kda.decode"))
    assert not pools.state[pools.index].any() and not pools.window[pools.index].any() and bool(pools.state[pools.spare()].isnan().all())


@pytest.mark.parametrize("offsets", ["layer", "model"])
def test_offsets_of_the_model_are_given_to_the_layer(offsets: str) -> None:
    seen: list[Any] = []

    def candidate(q: Tensor, k: Tensor, **x: Any) -> Tensor:
        seen.append(x.get("offsets"))
        return eager_verify.verify(q, k, **x)

    case = Case(parse(f"kda.verify:model=tiny,drafts=2,offsets={offsets}"))
    pools = case.pools()
    for step in (1, 2):
        run(candidate, case, pools, case.inputs(step).tensors)
    accepted = case.inputs(2).others["accepted"]
    assert seen == [None, None] if offsets == "layer" else torch.equal(seen[1][0], accepted - 1)


def test_offsets_belong_to_verify() -> None:
    with pytest.raises(ValueError, match=r"offsets: kda\.decode has none, got model; they are a verify's"):
        parse("kda.decode:offsets=model")
