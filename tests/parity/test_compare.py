"""Two records: what got worse beyond noise, and a row that is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from parity import compare, limits, merge, record, render
from parity.compare import Change, Turn
from parity.render import changes
from tests.parity.test_merge import part
from tests.parity.test_render import of, row, timed

NAN = float("nan")


def found(old: list[record.Row], new: list[record.Row], **how: Any) -> compare.Comparison:
    return compare.compare(part(*old), part(*new) | how)


def turns(old: list[record.Row], new: list[record.Row], **how: Any) -> list[tuple[str, str, Any, Any]]:
    return [(change.turn.value, change.what, change.before, change.after) for change in found(old, new, **how).changes]


def erring(tensor: str, **values: Any) -> record.Row:
    return row(**{tensor: row()[tensor] | values})


def timing(us: float | None, low: float = 0.0, high: float = 0.0, impl: str = "triton", **changed: Any) -> record.Row:
    return timed(impl, us or 1.0) | {"us": us, "us_min": low or us, "us_max": high or us} | changed


def timings(old: list[record.Row], new: list[record.Row]) -> compare.Comparison:
    return compare.compare(part(bench=tuple(old)), part(bench=tuple(new)))


def test_equal_records_changed_nothing_and_exit_0() -> None:
    same = found([row(), row(heads=3)], [row(), row(heads=3)])
    assert (same.changes, same.rows, same.exit_code()) == ([], 2, 0)


@pytest.mark.parametrize(
    ("was", "now", "turn", "code"),
    [
        ("PASS", "FAIL", "WORSE", 1),
        ("PASS", "INCONCLUSIVE", "WORSE", 1),
        ("PASS", "SKIPPED", "WORSE", 1),
        ("SKIPPED", "FAIL", "WORSE", 1),
        ("INCONCLUSIVE", "FAIL", "WORSE", 1),
        ("FAIL", "PASS", "BETTER", 0),
        ("SKIPPED", "PASS", "BETTER", 0),
        ("FAIL", "INCONCLUSIVE", "CHANGED", 0),
    ],
)
def test_a_verdict_that_changed_is_worse_better_or_neither(was: str, now: str, turn: str, code: int) -> None:
    seen = found([row(was)], [row(now)])
    verdicts = [change for change in seen.changes if change.what == "verdict"]
    assert [(change.turn, change.before, change.after) for change in verdicts] == [(turn, was, now)] and seen.exit_code() == code


def test_a_row_that_is_missing_is_a_failure_and_one_that_is_added_is_not() -> None:
    assert turns([row(), row(heads=3)], [row()]) == [("WORSE", "row", "PASS", "missing")]
    assert turns([row()], [row(), row(heads=3)]) == [("CHANGED", "row", "not there", "PASS")]
    assert turns([row()], [row(), row("FAIL", heads=3)]) == [("WORSE", "row", "not there", "FAIL")]
    plan = {"case": "kda.decode:heads=9", "impl": "triton", "reference": "fp32"}
    assert turns([row()], [row()], planned=[plan]) == [("WORSE", "row", "planned", "missing")]
    assert found([row()], [row(heads=3)]).exit_code() == 1


def test_nothing_in_both_records_is_vacuous() -> None:
    for old, new in (([], []), ([], [row()])):
        seen = found(old, new)
        assert seen.exit_code() == 3 and changes.of(seen, part(), part())[0].verdict == "VACUOUS"


@pytest.mark.parametrize("tensor", ["output", "state"])
@pytest.mark.parametrize(("ratio", "limit"), [("noise_ratio", "limit"), ("noise_ratio_head", "limit_head")])
def test_an_error_grows_beyond_noise_or_not(tensor: str, ratio: str, limit: str) -> None:
    most = row()[tensor][limit]
    floor = limits.GROWTH_FLOOR * most
    for before, after, turn in (
        (floor, limits.GROWTH * floor * 1.01, ["WORSE"]),
        (floor, limits.GROWTH * floor * 0.99, []),
        (floor / 100, limits.GROWTH * floor * 0.99, []),  # healthy, whatever it was before
        (limits.GROWTH * floor * 1.01, floor / 100, ["BETTER"]),
        (floor, NAN, ["WORSE"]),
        (NAN, floor, ["BETTER"]),
        (NAN, NAN, []),
    ):
        assert [turn for turn, *_ in turns([erring(tensor, **{ratio: before})], [erring(tensor, **{ratio: after})])] == turn, (
            before,
            after,
        )


def test_drift_that_more_than_doubled_is_worse() -> None:
    def drifting(error: float) -> record.Row:
        return row(drift=[{"step": 16, "state_rel_l2": error}])

    assert turns([drifting(1e-7)], [drifting(1.9e-7)]) == []
    assert turns([drifting(1e-7)], [drifting(2.1e-7)]) == [("WORSE", "state drift", 1e-7, 2.1e-7)]


def test_a_check_that_is_gone_is_worse_and_another_contract_is_said() -> None:
    assert turns([row(contract=None)], [row(contract=None, invariants={})]) == [
        ("WORSE", "invariants", "checked", "not checked: untouched_slots")
    ]
    rounds = {"rounds": {"beta": "bfloat16"}}
    assert turns([row(contract={"rounds": {}})], [row(contract=rounds)]) == [
        ("CHANGED", "contract", "rounds nothing inside", "beta to bfloat16")
    ]


def test_times_are_worse_only_beyond_both_spreads_and_what_runs_differ_by() -> None:
    apart = limits.RUNS_APART * 100
    assert timings([timing(100, 99, 101)], [timing(apart + 1, apart, apart + 2)]).exit_code() == 1
    assert timings([timing(100, 99, 101)], [timing(apart - 1, 102, apart)]).changes == []  # runs differ by that
    assert timings([timing(100, 99, 130)], [timing(apart + 1, 120, 140)]).changes == []  # spreads meet
    (faster,) = timings([timing(apart + 1)], [timing(100)]).changes
    assert (faster.turn, faster.before[0], faster.after) == (Turn.BETTER, apart + 1, (100, 100, 100))


def test_a_timing_that_is_gone_is_worse_and_a_slower_ceiling_is_the_machines() -> None:
    gone, untimed = timings([timing(100)], []), timings([timing(100)], [timing(None, reason="out of memory")])
    assert (gone.exit_code(), gone.changes[0].after) == (1, "missing")
    assert (untimed.exit_code(), untimed.changes[0].after) == (1, "not timed: out of memory")
    slower = timings([timing(100, impl="copy")], [timing(200, impl="copy")])
    assert [change.turn for change in slower.changes] == [Turn.CHANGED] and slower.exit_code() == 0


def test_rows_of_merged_records_are_compared_device_by_device() -> None:
    h200, b200 = part(row()), part(row(), device="B200")
    both = merge.merge([h200, b200], [])
    assert compare.compare(both, both).rows == 2
    assert [(change.what, change.after) for change in compare.compare(both, h200).changes] == [("row", "missing")]


def test_the_page_says_verdict_old_new_and_how_to_make_it_again() -> None:
    old, new = of(row(), row(heads=3), row("FAIL", heads=4)), of(row("FAIL", "broke"), row(heads=3), row("FAIL", heads=4))
    for made in (old, new):
        made["rows"] = [entry | {"contract": None} for entry in made["rows"]]
    blocks = changes.of(compare.compare(old, new), old, new)
    text = render.lay(blocks, "text")
    assert text.startswith("WORSE  1 worse: 3 rows and 0 timings in both records")
    assert "FAIL in both records: 1 of 3 rows" in text and text.endswith("workbench sweep kda.decode:heads=2,seed=7 --impl triton\n")
    (line,) = (line.split() for line in text.splitlines() if line.startswith("WORSE ") and "verdict" in line)
    assert line[:4] == ["WORSE", "verdict", "PASS", "FAIL"]
    for format in ("markdown", "html"):
        assert "broke" not in render.lay(blocks, format) and "verdict" in render.lay(blocks, format)


def test_json_holds_every_change_with_its_case() -> None:
    told = json.loads(changes.dumps(found([erring("state", noise_ratio=1.0)], [erring("state", noise_ratio=NAN)])))
    assert [(change["turn"], change["after"], change["case"]) for change in told["changes"]] == [("WORSE", "NaN", row()["case"])]


def test_the_two_bench_records_of_the_h200_differ_in_the_peers_only() -> None:
    folder = Path(__file__).resolve().parents[2] / "results/h200"
    seen = compare.compare(*(record.load(folder / f"kda_decode_bench{name}.json") for name in ("_earlier", "")))
    worse: list[Change] = [change for change in seen.changes if change.turn == Turn.WORSE]
    assert seen.timings == 99 and {change.row["impl"] for change in worse} <= {"fla", "fla kernels", "torch"} and worse
