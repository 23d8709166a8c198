"""The README's measured tables are those of the committed records."""

from pathlib import Path

from parity import record
from parity.render import readme

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_are_rendered_from_the_records() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- speed: results/h200/") == text.count("<!-- end -->") == 2
    assert readme.render(text, ROOT) == text
    assert readme.render(text.replace("| kda.decode | 64 | 1 |", "| kda.decode | 64 | 2 |"), ROOT) == text


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
