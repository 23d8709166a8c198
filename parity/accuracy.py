"""Two runs over the same questions: did B answer worse than A, and could this many questions have shown it?

Only discordant questions, which one of the two got right, say anything: McNemar's test, exact, asks whether they fall evenly.
The interval of the difference is Bonett and Price's (Wald's with one added to both counts; Statistics in Medicine 2012).
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from parity import limits

Answers = dict[tuple[str, str], bool]  # right or wrong, by task and question
ALPHA = 1 - limits.CONFIDENCE
_TRUTH = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
_BISECTIONS = 50


@dataclass(frozen=True)
class Columns:
    """What a file calls a question, whether it was answered right, and its task, which may be absent."""

    id: str = "id"
    correct: str = "correct"
    task: str = "task"


@dataclass(frozen=True)
class Paired:
    """The questions of one task. Differences are shares of all its questions, B's minus A's."""

    task: str
    questions: int
    both: int  # right
    only_a: int
    only_b: int
    p: float  # two-sided
    low: float  # of the confidence interval
    high: float
    significant: float | None  # the least difference that so many discordant questions call significant; None: not even all of them
    detectable: float | None  # the least true difference that they would find with limits.POWER

    @property
    def difference(self) -> float:
        return (self.only_b - self.only_a) / self.questions if self.questions else 0.0

    @property
    def worse(self) -> bool:
        return self.p < ALPHA and self.only_b < self.only_a


def load(path: Path, columns: Columns) -> Answers:
    """Answers of a .jsonl or .csv file, one row a question. ValueError with the file and line of what is wrong."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"accuracy: expected a file that ends in .jsonl or .csv, got {path}; one row a question")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"accuracy: can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"accuracy: {path} is not UTF-8 text ({error.reason})") from error
    answers: Answers = {}
    for line, row in _csv(path, text) if path.suffix == ".csv" else _jsonl(path, text):
        where = f"accuracy: {path} line {line}"
        for name in (columns.id, columns.correct):
            if row.get(name) in (None, ""):
                raise ValueError(
                    f"{where}: expected {name!r}, got {', '.join(map(repr, row)) or 'nothing'}; name it with --id or --correct"
                )
        key = (_word(where, columns.task, row.get(columns.task) or ""), _word(where, columns.id, row[columns.id]))
        if key in answers:
            raise ValueError(f"{where}: question {key[1]!r} stands twice; one row a question")
        answers[key] = _truth(where, columns.correct, row[columns.correct])
    return answers


def _csv(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = list(reader.fieldnames or [])
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"accuracy: {path} line 1: a column stands twice, {twice[0]!r}")
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"accuracy: {path} line {reader.line_num}: expected {len(names)} cells, as in its first line")
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"accuracy: {path} line {reader.line_num}: not CSV ({error})") from error


def _jsonl(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"accuracy: {path} line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"accuracy: {path} line {number}: expected an object, got {type(row).__name__}")
        yield number, row


def _word(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str | int):
        raise ValueError(f"{where}: {name}: expected a word or a whole number, got {value!r:.60}")
    return str(value)


def _truth(where: str, name: str, value: Any) -> bool:
    found = _TRUTH.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{where}: {name}: expected true, false, 1 or 0, got {value!r:.60}")
    return found


def compare(a: Answers, b: Answers, names: tuple[str, str] = ("A", "B")) -> list[Paired]:
    """All questions, then each task where there are several. ValueError unless both answered the same questions."""
    for (one, other), (name, lacking) in (((a, b), names), ((b, a), names[::-1])):
        if lost := [key for key in one if key not in other]:
            task, question = lost[0]
            first = f"{question!r} of task {task!r}" if task else repr(question)
            raise ValueError(
                f"accuracy: {lacking} lacks {len(lost)} of the {len(one)} questions of {name}, the first {first}; pair the same ones"
            )
    tasks = list(dict.fromkeys(task for task, _ in a))
    found = [_paired("all", [(a[key], b[key]) for key in a])]
    if len(tasks) > 1:
        found += [_paired(task or "(no task)", [(a[key], b[key]) for key in a if key[0] == task]) for task in tasks]
    return found


def exit_code(found: list[Paired]) -> int:
    """1 when B is significantly worse over all questions; 3 when there were none; else 0."""
    return 3 if not found[0].questions else int(found[0].worse)


def _paired(task: str, answers: list[tuple[bool, bool]]) -> Paired:
    both, only_a, only_b = (answers.count(kind) for kind in ((True, True), (True, False), (False, True)))
    questions, discordant = len(answers), only_a + only_b
    low, high = interval(only_a, only_b, questions)
    least = _critical(discordant)
    significant = None if least is None else (discordant - 2 * least) / questions
    detectable = None if least is None else _shift(discordant, least) * discordant / questions
    return Paired(task, questions, both, only_a, only_b, mcnemar(only_a, only_b), low, high, significant, detectable)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p: the chance of a split at least as uneven when each discordant question falls to either side alike."""
    count, term, total = only_a + only_b, 1, 0
    for k in range(min(only_a, only_b) + 1):
        total += term
        term = term * (count - k) // (k + 1)
    return min(1.0, 2 * total / 2**count)


def interval(only_a: int, only_b: int, questions: int) -> tuple[float, float]:
    """The confidence interval of B's share of right answers minus A's."""
    z = NormalDist().inv_cdf((1 + limits.CONFIDENCE) / 2)
    a, b = ((only + 1) / (questions + 2) for only in (only_a, only_b))
    half = z * math.sqrt((a + b - (a - b) ** 2) / (questions + 2))
    return max(-1.0, b - a - half), min(1.0, b - a + half)


def _critical(count: int) -> int | None:
    """The largest smaller half of a split of `count` that is significant; None when no split is."""
    found, term, total = None, 1, 0
    for k in range(count // 2 + 1):
        total += term
        if not 2 * total / 2**count < ALPHA:
            break
        found = k
        term = term * (count - k) // (k + 1)
    return found


def _shift(count: int, most: int) -> float:
    """How uneven discordant questions must truly fall, from 0 to 1, to leave at most `most` of `count` on one side with limits.POWER."""
    low, high = 0.0, 0.5  # the chance of that side
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(most, count, middle) >= limits.POWER else (low, middle)
    return 1 - 2 * low


def _at_most(most: int, count: int, chance: float) -> float:
    """P(X <= most) of a binomial X."""
    log, inverse, whole = math.log(chance), math.log1p(-chance), math.lgamma(count + 1)
    terms = (whole - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * log + (count - k) * inverse for k in range(most + 1))
    return math.fsum(map(math.exp, terms))
