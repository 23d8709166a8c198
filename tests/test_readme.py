"""The README's measured tables are those of the committed records."""

from pathlib import Path

from parity.render import readme

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_are_rendered_from_the_records() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- speed: results/h200/") == text.count("<!-- end -->") == 1
    assert readme.render(text, ROOT) == text
    assert readme.render(text.replace("| kda.decode | 64 | 1 |", "| kda.decode | 64 | 2 |"), ROOT) == text
