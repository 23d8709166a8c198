"""Renderings: what a person or a CI reads is what the record says."""

import re
import shlex
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from optimized import registry
from parity import record as records
from parity import render
from parity.render import cells, text

NAN, INF = float("nan"), float("inf")


def row(verdict: str = "PASS", reason: str = "", heads: int = 2, impl: str = "triton", **changed: Any) -> records.Row:
    skipped = verdict == "SKIPPED"
    output = {"cosine": 0.999998, "rel_l2": 0.00171, "noise_ratio": 0.00831, "noise_ratio_head": 0.02, "limit": 2, "limit_head": 6}
    state = {"rel_l2": 3e-7, "noise_ratio": 1.04, "noise_ratio_head": 1.2, "limit": 8, "limit_head": 24, "would_pass": 12800.0}
    return {
        "case": f"kda.decode:heads={heads},seed=7", "op": "kda.decode", "impl": impl, "reference": "fp32", "model": "tiny", "arch": "cpu",
        "heads": heads, "batch": 2, "tokens": 2, "dtype": "bf16", "state_dtype": "fp32", "regime": "random", "steps": 16, "seed": 7,
        "verdict": verdict,
        "reason": reason, "path": None if skipped else {"kernels": [{"name": "_kda_decode_kernel", "launches": 16}], "proved": True},
        "output": None if skipped else output, "state": None if skipped else state, "drift": [{"step": 16, "state_rel_l2": 4.2e-7}],
        "growth_slope": 0.02, "first_divergence": None, "invariants": {"untouched_slots": True}, "seconds": 1.0, **changed,
    }  # fmt: skip


def failed(**changed: Any) -> records.Row:
    largest = {"step": 12, "sequence": 0, "head": 1, "over": 838.2}
    first = {"step": 3, "tensor": "state", "sequence": 1, "head": 0, "point": "beta", "cause": "beta rounded to bf16",
             "channel": {"value": 17, "key": 93}, "candidate": 0.123456789, "gold": 0.123456781, "ulp": 1, "limit": 24,
             "noise_ratio": 12725.3, "largest": largest}  # fmt: skip
    return row("FAIL", "state is over its limit", first_divergence=first) | changed


def timed(impl: str, us: float, heads: int = 16) -> records.Row:
    return {"op": "kda.decode", "impl": impl, "model": "tiny", "heads": heads, "batch": 64, "tokens": 64, "dtype": "bf16",
            "state_dtype": "fp32", "us": us, "us_min": us, "us_max": us, "bytes": 120_000_000, "flops": 1, "ceiling": "copy",
            "ceiling_us": 20.0, "ratio": us / 20, "launches": 1}  # fmt: skip


def of(*rows: records.Row, bench: tuple[records.Row, ...] = ()) -> records.Record:
    return {"schema": 1, "environment": {"device": "x", "arch": "cpu", "torch": "2.13", "interpreter": True}, "command": [],
            "rows": list(rows), "bench": list(bench), "summary": {}}  # fmt: skip


def table_line(rendered: str, impl: str) -> list[str]:
    return next(line.split() for line in rendered.splitlines() if line.split()[:1] == [impl])


def test_first_line_is_the_verdict_with_its_counts() -> None:
    first, *_ = text.render(of(row(), row(heads=3), row("SKIPPED", "no fla", impl="fla"))).splitlines()
    assert first == "PASS  kda.decode: 2 PASS, 1 SKIPPED on cpu (Triton's interpreter ran the kernels: verdicts, no timing)"
    assert text.render(of(row(), failed())).startswith("FAIL  kda.decode: 1 FAIL, 1 PASS on cpu")


def test_rows_of_other_sources_are_marked_and_those_of_another_machine_are_not() -> None:
    elsewhere = {"torch": "2.11.0+cu130", "triton": "3.6.0", "fla-core": None}
    made = of(row(impl="torch", impl_hash=registry.find("kda.decode", "torch").source_hash(elsewhere)))
    made["environment"] |= elsewhere
    assert "STALE" not in text.render(made)
    made["rows"][0]["impl_hash"] = "0123456789abcdef"
    assert "STALE kda.decode torch: its sources have changed since (1 rows)" in text.render(made)


@pytest.mark.parametrize("impl", ["triton", "my kernels; rm -rf:decode"])
def test_last_line_reproduces_the_first_bad_row_from_a_shell(impl: str) -> None:
    bad = failed(heads=8, impl=impl)
    last = text.render(of(row(), row("INCONCLUSIVE", "no proof", heads=3), bad, failed(heads=9)), width=40).splitlines()[-1]
    assert shlex.split(last) == ["workbench", "sweep", bad["case"], "--impl", impl]


def test_first_divergence_names_place_values_cause_and_the_limit_that_passes() -> None:
    rendered = text.render(of(row(), failed()))
    for fact in ("step 3 of 16, state, sequence 1, head 0, value 17, key 93", "candidate 0.123456789, gold 0.123456781: 1 ULP apart",
                 "12700, 530 times its limit of 24", "beta (beta rounded to bf16)", "with limits 12800 times as wide"):  # fmt: skip
        assert fact in rendered
    assert rendered.index("step 3") < rendered.index("step 12, sequence 0, head 1: 838 times its limit (the largest error, not the first)")
    assert "First divergence" not in text.render(of(row()))


def test_nan_inf_and_errors_above_one_are_shown() -> None:
    values = {**row()["output"], "rel_l2": NAN, "noise_ratio": NAN, "cosine": NAN}
    drift = [{"step": 16, "state_rel_l2": 1.2}]
    line = table_line(text.render(of(row("FAIL", "not finite", output=values, growth_slope=INF, drift=drift))), "triton")
    assert line[1:4] == ["NaN/2", "NaN", "NaN"] and {"inf", "1.20e0"} <= set(line)


def test_the_table_shows_what_failed_a_head_or_an_invariant() -> None:
    state = {**row()["state"], "noise_ratio_head": 31.2}
    line = table_line(text.render(of(row("FAIL", "two", state=state, invariants={"canaries": False, "inputs": True}), row())), "triton")
    assert "31.2/24 head" in " ".join(line) and "canaries" in line and "inputs" not in line


def test_skipped_rows_are_counted_with_their_reason_and_never_pass() -> None:
    rendered = text.render(of(*(row("SKIPPED", reason, impl="fla") for reason in ("not\ninstalled", "not installed"))))
    assert "SKIPPED fla: not installed (2 rows)" in rendered
    assert "PASS" not in rendered and rendered.startswith("VACUOUS  kda.decode: nothing ran, 2 SKIPPED")


def test_columns_that_all_rows_share_move_to_the_caption() -> None:
    caption, header, *_ = (line for line in text.render(of(row(), row(heads=3))).splitlines()[1:] if "heads" in line or "dtype" in line)
    assert "dtype bf16, state fp32, regime random, steps 16" in caption
    assert "heads" in header.split() and "heads" not in caption and "dtype" not in header


def test_no_digit_is_lost_in_a_narrow_terminal() -> None:
    wide, narrow = (table_line(text.render(of(row(), row(heads=3)), width=width), "triton") for width in (200, 40))
    assert wide == narrow and {"0.171%", "4.20e-7", "0.00831/2"} <= set(wide)


def test_control_characters_reach_no_terminal() -> None:
    assert "\x1b" not in text.render(of(row("FAIL", "\x1b[2Jred")))
    assert "\x1b[1;31mFAIL" in text.render(of(row("FAIL")), color=True)


def test_bench_puts_a_case_together_and_marks_its_fastest() -> None:
    rows = timed("triton", 40.0), timed("triton", 90.0, 32), timed("fla", 50.0), timed("fla", NAN, 32)
    lines = text.render(of(bench=rows)).splitlines()
    body = [line.split() for line in lines if line.startswith(("triton", "fla"))]
    assert [(cells[0], cells[1], "*" in cells) for cells in body] == [
        ("triton", "16", True), ("fla", "16", False), ("triton", "32", False), ("fla", "32", False)]  # fmt: skip
    assert "3" in body[0] and "nothing was compared" in lines[0]  # 120 MB in 40 us: 3 TB/s


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], ""),
        ([0.0, 0.0], "▁▁"),
        ([1e-9, 4e-9, 8e-9], "▂▅█"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([NAN, 1.0, INF, None], "!█!!"),
        ([0.0] * 63 + [1.0], "▁▁▁▁▁▁▁█"),
        ([1.0] + [0.0] * 63, "█▁▁▁▁▁▁▁"),
    ],
)
def test_a_sparkline_goes_from_zero_to_its_largest_value_and_keeps_both_ends(values: list[Any], line: str) -> None:
    assert cells.sparkline(values) == line


def test_drift_has_its_sparkline_in_every_table_and_none_without_a_curve() -> None:
    drift = [{"step": step, "state_rel_l2": error, "rel_l2": 1.0} for step, error in enumerate((1e-7, 2e-7, 4e-7), 1)]
    stateless = [{"step": step, "rel_l2": error} for step, error in enumerate((4e-3, 2e-3, 1e-3), 1)]
    for format in ("text", "markdown", "html"):
        rendered = render.render(of(row(drift=drift), row(heads=3, drift=stateless)), format)
        assert "▃▅█" in rendered and "█▅▃" in rendered and "by step" in rendered, format
    assert "by step" not in text.render(of(row()))  # one step is no curve


def test_markdown_tables_have_the_cells_of_their_header() -> None:
    rendered = render.render(of(row(impl="a|b"), failed(heads=3), bench=(timed("x|y", 1.0), timed("z", 2.0))), "markdown")
    tables = [block.splitlines() for block in rendered.split("\n\n") if block.startswith("| ")]
    assert [len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) for table in tables] == [1, 1]
    assert "Made on cpu, torch 2.13" in rendered and "First divergence" in rendered


def test_junit_counts_and_survives_control_characters() -> None:
    broken = [failed(reason="\x00\x1b<&>"), row("INCONCLUSIVE", "no proof"), row("VACUOUS", "empty"), row("SKIPPED", "no GPU"), row()]
    root = ET.fromstring(render.render(of(*broken), "junit"))
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["5", "1", "2", "1"]
    (failure,) = root.iter("failure")
    assert failure.get("message") == "<&>" and "beta rounded" in (failure.text or "")


def test_junit_has_an_error_for_each_missing_row() -> None:
    planned = [{"case": f"kda.decode:heads={heads},seed=7", "impl": "triton", "reference": "fp32"} for heads in (2, 3, 4)]
    root = ET.fromstring(render.render(of(row()) | {"planned": planned}, "junit"))
    assert [root.get(key) for key in ("tests", "failures", "errors")] == ["3", "0", "2"]
    assert [error.get("type") for error in root.iter("error")] == ["MISSING", "MISSING"]


def test_missing_rows_are_named_and_of_many_the_first() -> None:
    planned = [{"case": f"kda.decode:heads={heads}", "impl": "triton", "reference": "fla"} for heads in range(1, 41)]
    rendered = text.render(of(row()) | {"planned": planned})
    assert rendered.startswith("INCONCLUSIVE  kda.decode: 1 PASS, 40 of 40 planned rows missing on cpu")
    named = [line for line in rendered.splitlines() if line.startswith("MISSING triton kda.decode:heads=")]
    assert len(named) == 20 and all(line.endswith(" against fla") for line in named)
    assert "MISSING and 20 more\n" in rendered and "--resume RECORD" in rendered


def test_a_record_in_which_nothing_ran_says_so_in_every_format() -> None:
    assert "nothing ran" in text.render(of()) and "nothing ran" in render.render(of(), "markdown")
    for rows in ([], [row("SKIPPED", "no GPU")]):
        assert ET.fromstring(render.render(of(*rows), "junit")).get("errors") == "1"


def test_json_is_the_record_as_saved(tmp_path: Any) -> None:
    record = of(row(growth_slope=NAN), row("SKIPPED", "no GPU"))
    rendered = render.render(record, "json")
    records.save(record, tmp_path / "record.json")
    assert rendered == (tmp_path / "record.json").read_text()


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="text, json, junit, markdown"):
        render.render(of(), "yaml")
