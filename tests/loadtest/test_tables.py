from __future__ import annotations

import pytest

from loadtest.tables import markdown_table, number, number_range


def test_columns_line_up_and_the_table_is_markdown() -> None:
    lines = markdown_table(["name", "x"], [["a", "1"], ["longer", "1,000.5"]]).splitlines()
    assert lines == [
        "| name   |       x |",
        "| ------ | ------: |",
        "| a      |       1 |",
        "| longer | 1,000.5 |",
    ]


def test_a_cell_cannot_break_its_row() -> None:
    assert "a\\|b" in markdown_table(["x"], [["a|b"]])


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        markdown_table(["x"], [["a", "b"]])


def test_what_was_not_measured_is_a_dash() -> None:
    assert number(None, 2, "x") == "-"
    assert number(1234.567, 2, "x") == "1,234.57x"
    assert number_range([]) == "-"
    assert number_range([2.0, 1.0, 1.5]) == "1.00 to 2.00"
