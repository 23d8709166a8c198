"""Paired answers: the test, its interval, what so many questions could show, and files that make no sense."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from parity import accuracy, limits, render
from parity.render import answers

COLUMNS = accuracy.Columns()


def paired(both: int, only_a: int, only_b: int, neither: int = 0, task: str = "") -> tuple[accuracy.Answers, accuracy.Answers]:
    kinds = [(True, True)] * both + [(True, False)] * only_a + [(False, True)] * only_b + [(False, False)] * neither
    return tuple({(task, str(place)): kind[side] for place, kind in enumerate(kinds)} for side in (0, 1))  # type: ignore[return-value]


def whole(both: int, only_a: int, only_b: int, neither: int = 0) -> accuracy.Paired:
    (found,) = accuracy.compare(*paired(both, only_a, only_b, neither))
    return found


def close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=2.0**-40, abs_tol=0)


def test_fifteen_against_twelve_is_p_0_70() -> None:
    found = whole(1200, 15, 12, 92)
    assert f"{found.p:.2f}" == "0.70" and not found.worse and accuracy.exit_code([found]) == 0
    assert render.lay(answers.of([found], ("a", "b")), "text").startswith(
        "EVEN  no difference shown: 15 against 12 discordant of 1319 questions, exact McNemar p = 0.701"
    )


@pytest.mark.parametrize("count", range(11))
def test_p_is_the_share_of_all_splits_that_are_at_least_as_uneven(count: int) -> None:
    splits = [sum(coins) for coins in itertools.product((0, 1), repeat=count)]
    for only_a in range(count + 1):
        uneven = [split for split in splits if abs(2 * split - count) >= abs(2 * only_a - count)]
        assert close(accuracy.mcnemar(only_a, count - only_a), float(Fraction(len(uneven), len(splits))))


def test_thousands_of_discordant_questions_are_no_matter() -> None:
    assert accuracy.mcnemar(5000, 5000) == 1.0 and 0 < accuracy.mcnemar(5200, 4800) < 1e-3 < accuracy.mcnemar(5050, 4950)
    assert accuracy.mcnemar(0, 3000) == 0.0  # below what a float holds


def test_the_interval_is_that_of_bonett_and_price() -> None:
    # By hand for 7 against 1 of 21: shares 8/23 and 2/23, variance (10/23 - (6/23)^2) / 23, z 1.959964.
    low, high = accuracy.interval(7, 1, 21)
    half = 1.9599639845400545 * math.sqrt((10 / 23 - 36 / 529) / 23)
    assert close(low, -6 / 23 - half) and close(high, -6 / 23 + half) and f"{low:.3f} {high:.3f}" == "-0.508 -0.013"
    assert accuracy.interval(1, 7, 21) == (-high, -low)
    assert accuracy.interval(0, 1, 1)[1] == 1.0


def test_what_is_significant_is_so_and_one_question_less_is_not() -> None:
    for discordant in (6, 7, 27, 100, 1001):
        found = whole(10, discordant, 0)
        assert found.significant is not None
        apart = round(found.significant * found.questions)
        smaller = (discordant - apart) // 2
        assert accuracy.mcnemar(smaller, discordant - smaller) < accuracy.ALPHA <= accuracy.mcnemar(smaller + 1, discordant - smaller - 1)


def test_so_few_that_nothing_could_be_shown_say_so() -> None:
    few = whole(95, 5, 0)
    assert (few.significant, few.detectable, few.worse) == (None, None, False) and few.p == 2 / 32
    assert "none: with so few discordant answers no split is significant (all)" in render.lay(answers.of([few], ("a", "b")), "text")
    assert whole(94, 6, 0).worse and accuracy.exit_code([whole(94, 6, 0)]) == 1
    assert whole(100, 0, 0).p == 1.0


@pytest.mark.parametrize("discordant", [6, 27, 200])
def test_the_detectable_difference_is_found_with_the_power_it_says(discordant: int) -> None:
    found = whole(300, discordant, 0)
    assert found.detectable is not None and found.significant is not None
    chance = (1 - found.detectable * found.questions / discordant) / 2  # of a discordant question to fall to the other side
    most = round((discordant - found.significant * found.questions) / 2)
    power = sum(math.comb(discordant, k) * chance**k * (1 - chance) ** (discordant - k) for k in range(most + 1))
    assert math.isclose(power, limits.POWER, rel_tol=2.0**-30)


def test_b_that_is_better_is_no_failure_and_no_questions_are_no_pass() -> None:
    better = whole(10, 2, 30)
    assert (better.worse, accuracy.exit_code([better])) == (False, 0) and better.difference == 28 / 42
    assert answers.of([better], ("a", "b"))[0].verdict == "BETTER"
    assert accuracy.exit_code(accuracy.compare({}, {})) == 3


def test_tasks_have_a_line_each_and_all_of_them_the_verdict() -> None:
    a, b = ({**one, **other} for one, other in zip(paired(3, 9, 0, task="gsm8k"), paired(3, 0, 9, task="arc"), strict=True))
    found = accuracy.compare(a, b)
    assert [(entry.task, entry.questions, entry.only_a, entry.only_b) for entry in found] == [
        ("all", 24, 9, 9), ("gsm8k", 12, 9, 0), ("arc", 12, 0, 9)]  # fmt: skip
    assert accuracy.exit_code(found) == 0 and found[1].worse
    assert [entry["task"] for entry in json.loads(answers.dumps(found))] == ["all", "gsm8k", "arc"]


def test_jsonl_and_csv_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"id": 1, "correct": true}\n\n{"id": "q,2", "correct": 0, "other": []}\n', encoding="utf-8")
    (tmp_path / "a.csv").write_text('id,correct\r\n1,True\r\n"q,2",0.0\r\n')
    loaded = [accuracy.load(tmp_path / name, COLUMNS) for name in ("a.jsonl", "a.csv")]
    assert loaded == [{("", "1"): True, ("", "q,2"): False}] * 2
    (tmp_path / "b.csv").write_text("doc_id,acc,name\n1,1,arc\n")
    assert accuracy.load(tmp_path / "b.csv", accuracy.Columns("doc_id", "acc", "name")) == {("arc", "1"): True}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "expected a file that ends in .jsonl or .csv"),
        ("a.jsonl", None, "can't read"),
        ("a.jsonl", "\udcff", "is not UTF-8 text"),
        ("a.jsonl", "{", "line 1: not JSON"),
        ("a.jsonl", "[1]", "line 1: expected an object, got list"),
        ("a.jsonl", '\n{"id": 1}', "line 2: expected 'correct', got 'id'; name it with --id or --correct"),
        ("a.jsonl", '{"id": {}, "correct": 1}', "line 1: id: expected a word or a whole number"),
        ("a.jsonl", '{"id": 1, "correct": 0.5}', "line 1: correct: expected true, false, 1 or 0, got 0.5"),
        ("a.jsonl", '{"id": 1, "correct": NaN}', "line 1: correct: expected true, false, 1 or 0, got nan"),
        ("a.csv", "id,correct\n1,1\n1,0\n", "line 3: question '1' stands twice"),
        ("a.csv", "id,correct\n1\n", "line 2: expected 2 cells"),
        ("a.csv", "id,correct\n1,1,1\n", "line 2: expected 2 cells"),
        ("a.csv", "1,2\n2,0\n", "line 2: expected 'id', got '1', '2'; name it with"),
        ("a.csv", 'id,correct\n"1,1\n', "not CSV"),
        ("a.csv", "1,1\n2,0\n", "line 1: a column stands twice, '1'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name_and_line(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"^accuracy: ") as refused:
        accuracy.load(path, COLUMNS)
    assert says in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_questions_that_only_one_answered_are_refused_not_dropped() -> None:
    a, b = paired(4, 1, 1)
    missing = {key: value for key, value in b.items() if key[1] != "2"}
    with pytest.raises(ValueError, match="accuracy: B lacks 1 of the 6 questions of A, the first '2'"):
        accuracy.compare(a, missing)
    with pytest.raises(ValueError, match=r"accuracy: a.csv lacks 1 of the 6 questions of b.csv"):
        accuracy.compare(missing, a, ("a.csv", "b.csv"))
