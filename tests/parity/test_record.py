"""The record: safe at every moment, and read back as it was."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity import record
from parity.problem import parse
from parity.record import Verdict

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = math.nan, math.inf


def of(*verdicts: str) -> record.Record:
    rows = [dict.fromkeys(record.ROW_KEYS) | {"verdict": verdict} for verdict in verdicts]
    return {"schema": 1, "environment": {}, "command": [], "rows": rows, "bench": [], "summary": {}}


def planned(case: str) -> record.Row:
    return {"case": case, "impl": "triton", "reference": "fp32"}


def made_of(plan: record.Row) -> record.Row:
    return dict.fromkeys(record.ROW_KEYS) | plan | {"verdict": "PASS"}


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_stops_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "record.json"
    record.save(of("PASS"), path)
    old = path.read_bytes()

    def stops(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(type(error)):
        record.save(of("FAIL"), path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from parity import record, sweep
real, saves = os.replace, []
def replace(*arguments):
    saves.append(1)
    os.kill(os.getpid(), signal.SIGKILL) if len(saves) == 4 else real(*arguments)
os.replace = replace
given = dict(op="kda.decode", model="tiny", steps=1, impl="torch", heads="1,2,3,4", regime="slow", state_dtype="bf16")
work = sweep.tasks(sweep.layered("cpu", None, given))
sweep.run(work, record.new("cpu", []), out=Path(sys.argv[1]))
"""


def test_a_killed_sweep_leaves_the_rows_before_and_at_most_one_hidden_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    loaded = record.load(path)
    assert [row["heads"] for row in loaded["rows"]] == [1, 2] and loaded["summary"]["PASS"] == 2
    assert [parse(plan["case"]).heads for plan in record.missing(loaded)] == [3, 4] and record.exit_code(loaded) == 3
    (hidden,) = (other for other in tmp_path.iterdir() if other != path)
    assert hidden.name.startswith(".record.json.")


def test_numbers_that_json_cannot_hold_come_back(tmp_path: Path) -> None:
    made = of("FAIL")
    made["rows"][0] |= {
        "reason": "an infinity",
        "output": {"noise_ratio": INF, "cosine": NAN},
        "drift": [{"rel_l2": -INF}, {"rel_l2": 0.1}],
    }
    record.save(made, tmp_path / "record.json")
    assert '"noise_ratio": "Infinity"' in (tmp_path / "record.json").read_text()
    (row,) = record.load(tmp_path / "record.json")["rows"]
    assert row["output"]["noise_ratio"] == INF and math.isnan(row["output"]["cosine"])
    assert [entry["rel_l2"] for entry in row["drift"]] == [-INF, 0.1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't read"),
        ("", "is not JSON"),
        ('{"schema": 1, "rows": [', "is not JSON"),
        ("[]", "is not a record of schema 1"),
        ('{"schema": 2, "rows": []}', "is not a record of schema 1"),
        ('{"schema": 1}', "is not a record of schema 1"),
        ("\udcff", "is not JSON"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=says) as refused:
        record.load(path)
    message = str(refused.value)
    assert "\n" not in message and str(path) in message and "--out FILE.json" in message


@pytest.mark.parametrize(
    ("verdicts", "overall", "code"),
    [
        ("", Verdict.VACUOUS, 3),
        ("PASS", Verdict.PASS, 0),
        ("PASS SKIPPED", Verdict.PASS, 0),
        ("SKIPPED", Verdict.VACUOUS, 3),
        ("PASS VACUOUS", Verdict.VACUOUS, 3),
        ("PASS VACUOUS INCONCLUSIVE SKIPPED", Verdict.INCONCLUSIVE, 3),
        ("FAIL", Verdict.FAIL, 1),
        ("PASS SKIPPED VACUOUS INCONCLUSIVE FAIL", Verdict.FAIL, 1),
    ],
)
def test_exit_codes_follow_from_the_worst_verdict(verdicts: str, overall: Verdict, code: int) -> None:
    made = of(*verdicts.split())
    assert (record.overall(made), record.exit_code(made)) == (overall, code)


@pytest.mark.parametrize(("verdicts", "code"), [("", 3), ("PASS", 3), ("SKIPPED", 3), ("VACUOUS PASS", 3), ("FAIL PASS", 1)])
def test_a_planned_row_that_is_missing_is_no_pass_and_hides_no_failure(verdicts: str, code: int) -> None:
    made = of(*verdicts.split())
    made["planned"] = [planned("kda.decode:heads=9")]
    assert record.missing(made) == made["planned"] and record.exit_code(made) == code
    made["rows"].append(made_of(made["planned"][0]))
    assert record.missing(made) == [] and record.overall(made) == record.worst(made["rows"])


def test_a_row_of_another_implementation_reference_or_device_is_not_the_planned_one() -> None:
    made = of()
    made |= {"planned": [planned("c") | {"part": 0}], "parts": [{"environment": {"device": device}, "command": []} for device in "ab"]}
    for other in ({"impl": "fla"}, {"reference": "fla"}, {"case": "d"}, {"part": 1}):
        made["rows"] = [made_of(made["planned"][0]) | other]
        assert record.missing(made) == made["planned"], other


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"planned": 5}, "planned is no list of objects"),
        ({"planned": [{"case": "c", "impl": "triton"}]}, "a planned row lacks one of case, impl, reference"),
        ({"parts": [{"environment": {}}]}, "a part lacks its environment or its command"),
        ({"bench": [1]}, "bench is no list of objects"),
        ({"planned": [{"case": "c", "impl": "i", "reference": "r", "part": 0}]}, "a row names a part that isn't there"),
    ],
)
def test_plans_and_parts_that_make_no_sense_are_refused_by_name(tmp_path: Path, damage: dict[str, Any], says: str) -> None:
    record.save(of("PASS") | damage, tmp_path / "record.json")
    with pytest.raises(ValueError, match="is damaged: ") as refused:
        record.load(tmp_path / "record.json")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_summary_counts_every_verdict_and_is_made_when_it_is_saved(tmp_path: Path) -> None:
    record.save(of("PASS", "PASS", "SKIPPED"), tmp_path / "record.json")
    expected = {"PASS": 2, "FAIL": 0, "INCONCLUSIVE": 0, "SKIPPED": 1, "VACUOUS": 0}
    assert record.load(tmp_path / "record.json")["summary"] == expected


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    record.check_writable(tmp_path / "new.json")
    with pytest.raises(ValueError, match="is a folder; name a file"):
        record.check_writable(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        record.check_writable(tmp_path / "nosuch" / "record.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="can't be written"):
        record.check_writable(tmp_path / "record.json")
