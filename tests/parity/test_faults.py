"""Wrong implementations on the command line: each fails with the step, the place, the point and a cause that says it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import workbench
from parity import limits
from parity.record import Row
from tests.candidates import DROPPED_STEP

REGIMES, STATES = ("random", "slow"), ("fp32", "bf16")
SQUARE = "glm-5.3-flash"  # K = V: a transposed state has the right shape

# name -> model, steps, first bad step, point, cause
FAULTS: dict[str, tuple[str, int, int, str, str]] = {
    "beta_bf16": ("tiny", 3, 1, "beta", "beta rounded to bf16"),
    "decay_after_update": ("tiny", 3, 1, "decay", "decay applied after the update"),
    "stale_slot": ("tiny", 3, 1, "state", r"stale slot: state of sequence [01]"),
    "transposed_state": (SQUARE, 3, 1, "state", "state read and stored transposed"),
    "dropped_update": ("tiny", DROPPED_STEP + 3, DROPPED_STEP, "delta", "update dropped"),
}


def sweep(name: str, out: Path, *options: str) -> tuple[int, list[Row]]:
    """Exit code and rows of a sweep of one candidate."""
    arguments = ["sweep", "kda.decode", "--impl", f"tests.candidates:{name}", "--device", "cpu", "--out", str(out), *options]
    with pytest.raises(SystemExit) as stopped:
        workbench.main(arguments)
    return int(stopped.value.code or 0), json.loads(out.read_text())["rows"]


def visible(row: Row) -> str:
    """By how much each tensor's worst (step, head) is beyond its limit."""
    case = f"{row['regime']} {row['state_dtype']}"
    return f"{row['impl'].rpartition(':')[2]:<18} {case:<11} " + ", ".join(
        f"{name} {row[name]['worst_step_over']:.3g}" for name in ("output", "state")
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_candidate_fails_with_step_place_point_and_cause(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, steps, step, point, cause = FAULTS[name]
    options = ["--model", model, "--steps", str(steps), "--regime", ",".join(REGIMES), "--state-dtype", ",".join(STATES)]
    code, rows = sweep(name, tmp_path / "record.json", *options)
    printed = capsys.readouterr().out
    assert code == 1 and {(row["regime"], row["state_dtype"]) for row in rows} == {(r, s) for r in REGIMES for s in STATES}
    for row in rows:
        first = row["first_divergence"]
        assert row["verdict"] == "FAIL" and first is not None, row["reason"]
        assert (first["step"], first["point"]) == (step, point), row["case"]
        assert re.fullmatch(cause, first["cause"])
        assert first["sequence"] in (0, 1) and first["head"] in (0, 1) and first["tensor"] in ("output", "state")
        assert first["noise_ratio"] > 10 * first["limit"]
        print(visible(row))
    assert printed.startswith("FAIL  kda.decode: 4 FAIL") and cause.split(" [")[0].split(":")[0] in printed
    assert printed.splitlines()[-1].startswith("workbench sweep ") and printed.splitlines()[-1].endswith(f"--impl tests.candidates:{name}")


def test_a_stale_slot_names_the_sequence_whose_state_it_was(tmp_path: Path) -> None:
    _, rows = sweep("stale_slot", tmp_path / "record.json", "--model", "tiny", "--steps", "1", "--batch", "3")
    for row in rows:
        first = row["first_divergence"]
        assert first["cause"] == f"stale slot: state of sequence {(first['sequence'] - 1) % 3}"


def test_a_dropped_update_is_right_until_it_is_dropped(tmp_path: Path) -> None:
    options = ["--model", "tiny", "--regime", "slow", "--state-dtype", "fp32"]
    _, (short,) = sweep("dropped_update", tmp_path / "short.json", *options, "--steps", str(DROPPED_STEP - 1))
    _, (long,) = sweep("dropped_update", tmp_path / "long.json", *options, "--steps", str(DROPPED_STEP))
    assert short["first_divergence"] is None and long["first_divergence"]["step"] == DROPPED_STEP
    assert short["state"]["worst_step_over"] < 1 < long["state"]["worst_step_over"]
    assert [a["state_rel_l2"] for a in short["drift"]] == [a["state_rel_l2"] for a in long["drift"][:-1]]


def test_the_named_head_is_the_one_that_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from parity import gate
    from parity.problem import Problem
    from reference import kda
    from tests.candidates import given

    def head_two_of_sequence_one(q: Any, k: Any, **x: Any) -> Any:
        def at(point: str, value: Any) -> Any:
            if point == "beta" and value.shape[0] == 3:
                value = value.clone()
                value[1, 2] = value[1, 2].bfloat16()
            return value

        return kda.decode(q, k, **x, at=at)

    row = gate.judge(Problem("kda.decode", model="tiny", heads=4, batch=3, steps=1), given(head_two_of_sequence_one, contract=None))
    first = row["first_divergence"]
    assert [first[key] for key in ("sequence", "head", "point", "cause")] == [1, 2, "beta", "beta rounded to bf16"]
    assert row["state"]["noise_ratio_head"] > limits.FP32_BOUNDARY.head
