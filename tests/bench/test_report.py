"""Tables as people see them."""

from __future__ import annotations

from pathlib import Path

from ktransformer2.bench.report import status_table, summary_table, table, tables_by_part
from ktransformer2.bench.status import read_status


def test_table_aligns_numbers_right_and_text_left() -> None:
    rows: list[dict[str, object]] = [
        {"name": "a", "ms": 1.5, "tokens": 12_000},
        {"name": "long", "ms": None, "note": "x"},
    ]
    assert table(rows) == (
        "name   ms  tokens  note\n"
        "a     1.5  12,000\n"
        "long               x"
    )  # fmt: skip
    assert table([]) == ""


def test_rows_of_one_part_stand_together() -> None:
    rows: list[dict[str, object]] = [{"part": "one", "x": 1}, {"part": "two", "y": 2}, {"part": "one", "x": 3}]
    assert tables_by_part(rows) == "one\nx\n1\n3\n\ntwo\ny\n2"


def test_summary_shows_target_and_state() -> None:
    assert summary_table("memory", {"waste_tokens": 0.02, "saved_vs_static": 0.5}) == (
        "key              value  target    state\n"
        "waste_tokens      0.02  <= 0.026  green\n"
        "saved_vs_static    0.5  >= 0.7    RED"
    )


def test_status_shows_every_key(tmp_path: Path) -> None:
    status = read_status(tmp_path / "none.json")
    text = status_table(status)
    assert len(text.split("\n")) == 1 + len(status)
    assert "1/memory/waste_tokens" in text
