"""Records into one: the newest row of a case, where each was made, and what no part has made."""

from typing import Any

import pytest

from optimized import registry
from parity import merge, record, render
from parity.render import facts
from tests.parity.test_render import of, row, timed


def part(*rows: record.Row, began: str | None = None, bench: tuple[record.Row, ...] = (), **environment: Any) -> record.Record:
    made = of(*(dict.fromkeys(record.ROW_KEYS) | entry for entry in rows), bench=bench)
    made["environment"] |= {"device": "H200", "arch": "sm90", "driver": "580", "began": began, "interpreter": False} | environment
    return made | {"command": ["workbench", "sweep", str(began)]}


def merged(*records: record.Record) -> record.Record:
    return merge.merge(records, ["workbench", "report"])


def seconds(made: record.Record) -> list[float]:
    return [entry["seconds"] for entry in made["rows"]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_row_of_the_record_begun_later_is_kept_whatever_the_order(order: tuple[int, int]) -> None:
    parts = [part(row(seconds=1.0), began="2026-01-02"), part(row(seconds=2.0), row(seconds=3.0, heads=4), began="2026-01-03")]
    made = merged(*(parts[place] for place in order))
    assert seconds(made) == [2.0, 3.0] and made["summary"]["PASS"] == 2
    assert [entry["command"][-1] for entry in made["parts"]] == ["2026-01-03"]  # nothing is left of the other


def test_records_that_do_not_say_when_come_first_in_the_order_they_were_named() -> None:
    first, second, dated = (part(row(seconds=at), began=began) for at, began in ((1.0, None), (2.0, None), (3.0, "2026-01-01")))
    assert seconds(merged(first, second)) == [2.0] and seconds(merged(second, first)) == [1.0]
    assert seconds(merged(dated, first)) == [3.0]


def test_rows_of_other_devices_implementations_or_references_stand_beside_each_other() -> None:
    made = merged(part(row(), row(impl="fla"), row(reference="fla")), part(row(), device="B200", arch="sm100"))
    assert len(made["rows"]) == 4
    assert [record.environment_of(made, entry)["device"] for entry in made["rows"]] == ["H200"] * 3 + ["B200"]


def test_devices_and_drivers_that_differ_are_named_in_every_format() -> None:
    here = {"arch": "sm90"}
    made = merged(
        part(row(**here), row(heads=3, **here)),
        part(row(heads=4, **here), driver="590"),
        part(row(arch="sm100"), device="B200", arch="sm100"),
    )
    for format in ("text", "markdown", "html"):
        rendered = render.render(made, format)
        for told in ("driver: 580 (3 rows), 590 (1 row)", "device: H200 (3 rows), B200 (1 row)", "H200 (sm90) and B200 (sm100)"):
            assert told in rendered, (format, told)
    assert made["environment"]["torch"] == "2.13" and made["environment"]["driver"] is None
    assert "MIXED" not in render.render(merged(part(row()), part(row(heads=3))), "text")


def test_a_merge_of_merges_is_the_merge_of_all() -> None:
    a, b = part(row(seconds=1.0), row(heads=4, seconds=2.0), began="1"), part(row(heads=3, seconds=3.0), began="2")
    c = part(row(seconds=4.0), began="3", driver="590")
    twice, once = merged(merged(a, b), c), merged(a, b, c)
    assert twice == once and seconds(once) == [4.0, 2.0, 3.0]
    assert [record.environment_of(twice, entry)["began"] for entry in twice["rows"]] == ["3", "1", "2"]


def test_sources_of_a_merged_record_are_those_of_the_packages_of_each_part() -> None:
    versions = [{"torch": torch, "triton": "3.6.0", "fla-core": fla} for torch, fla in (("2.11.0", "0.6.0"), ("2.13.0", "0.7.0"))]
    hashes = [registry.find("kda.decode", "fla").source_hash(dict(version)) for version in versions]
    assert hashes[0] != hashes[1]
    parts = [
        part(row(impl="fla", heads=heads, impl_hash=mark), **version) for heads, mark, version in zip((2, 3), hashes, versions, strict=True)
    ]
    assert facts.stale(merged(*parts)) == []
    parts[1]["rows"][0]["impl_hash"] = hashes[0]
    assert facts.stale(merged(*parts)) == ["kda.decode fla: its sources have changed since (1 rows)"]


def test_what_one_part_planned_and_another_made_is_not_missing() -> None:
    plans = [{key: entry[key] for key in record.PLANNED_KEYS} for entry in (row(), row(heads=3), row(heads=4))]
    killed, rest = part(row()) | {"planned": plans}, part(row(heads=3))
    assert [plan["case"] for plan in record.missing(merged(killed, rest))] == [plans[2]["case"]]
    assert record.missing(merged(killed, rest, part(row(heads=4)))) == []
    assert len(record.missing(merged(killed, rest, part(row(heads=4), device="B200")))) == 1  # another machine's is not this one's


def test_timed_rows_are_replaced_by_whole_cases() -> None:
    old = part(bench=(timed("triton", 40.0), timed("fla", 50.0), timed("triton", 90.0, heads=32)), began="1")
    new = part(bench=(timed("triton", 41.0),), began="2")
    found = [(entry["impl"], entry["us"], entry["part"]) for entry in merged(old, new)["bench"]]
    assert found == [("triton", 41.0, 1), ("triton", 90.0, 0)]


def test_a_merged_record_is_read_back_and_its_parts_checked(tmp_path: Any) -> None:
    made = merged(part(row()), part(row(heads=3), driver="590"))
    record.save(made, tmp_path / "merged.json")
    assert record.load(tmp_path / "merged.json") == made
    made["rows"][0]["part"] = 7
    record.save(made, tmp_path / "merged.json")
    with pytest.raises(ValueError, match="a row names a part that isn't there"):
        record.load(tmp_path / "merged.json")
