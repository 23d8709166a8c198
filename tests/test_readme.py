"""The README's measured tables are those of the committed records."""

import itertools
import re
from pathlib import Path

from parity import record, sweep
from parity.render import readme

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_are_rendered_from_the_records() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (text.count("<!-- speed: results/h200/"), text.count("<!-- parity: results/h200/"), text.count("<!-- end -->")) == (2, 1, 3)
    assert readme.render(text, ROOT) == text
    for told, other in (("| kda.decode | 64 | 1 |", "| kda.decode | 64 | 2 |"), ("| 32 PASS |", "| 31 PASS, 1 FAIL |")):
        assert told in text and readme.render(text.replace(told, other), ROOT) == text


def test_the_decode_sweep_has_every_row_that_its_command_names() -> None:
    (command,) = re.findall(
        r"sweep (kda\.decode (?:.|\n)*?) \\?\s*--out \"\$out/kda_decode_sweep\.json", (ROOT / "results/measure.sh").read_text()
    )
    words = command.replace("\\\n", " ").split()
    given = {name.lstrip("-").replace("-", "_"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    lists = sweep.layered("cpu", None, {"op": words[0]} | given)
    planned = set(itertools.product(lists.heads, lists.batch, lists.dtype, lists.state_dtype, lists.regime, (lists.steps,), lists.impl))
    made = record.load(ROOT / "results/h200/kda_decode_sweep.json")
    keys = ("heads", "batch", "dtype", "state_dtype", "regime", "steps", "impl")
    assert {tuple(row[key] for key in keys) for row in made["rows"]} == planned and len(made["rows"]) == len(planned) == 192


def test_the_paragraph_on_drift_says_what_its_record_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = record.load(ROOT / "results/h200/kda_decode_512.json")["rows"]
    last = {(row["state_dtype"], row["regime"]): row["drift"][-1] for row in rows}
    assert {entry["step"] for entry in last.values()} == {512} and {row["verdict"] for row in rows} == {"PASS"}
    drift = {key: entry["state_rel_l2"] for key, entry in last.items()}
    for told in (
        f"{drift['fp32', 'random']:.1e}".replace("e-06", "e-6"),
        f"{drift['fp32', 'slow']:.1e}".replace("e-06", "e-6"),
        f"({last['fp32', 'slow']['injected']:.0e})".replace("e-08", "e-8"),
        f"takes in {last['bf16', 'slow']['injected']:.2%}".replace("%", " %"),
        f"ends {drift['bf16', 'random']:.1%} and {drift['bf16', 'slow']:.1%} away".replace("%", " %"),
    ):
        assert told in text, told


def test_the_sentence_on_the_times_of_fla_says_what_its_records_say() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    now, before = (
        {
            row["impl"]: row["us"]
            for row in record.load(ROOT / f"results/h200/{name}.json")["bench"]
            if (row["heads"], row["batch"], row["state_dtype"]) == (64, 64, "fp32")
        }
        for name in ("kda_decode_bench", "kda_decode_bench_earlier")
    )
    for told in (
        f"took {before['fla kernels']:.0f} us instead of {now['fla kernels']:.0f}",
        f"and {before['fla']:.0f} from our pools instead of {now['fla']:.0f}",
        f"(ours {before['fla kernels'] / before['triton']:.2f} and {before['fla'] / before['triton']:.2f} times as fast)",
    ):
        assert told in text, told
    assert {f"{run['triton']:.0f}" for run in (now, before)} == {"154"} and "Ours stayed at 154." in text
