"""Markdown tables whose columns also line up in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "-"


def number(value: float | None, digits: int = 1, suffix: str = "") -> str:
    """A measured value with thousands separators, or a dash where nothing was measured."""
    return MISSING if value is None else f"{value:,.{digits}f}{suffix}"


def number_range(values: Sequence[float], digits: int = 2) -> str:
    """The least and the largest of measured values, or a dash where nothing was measured."""
    return f"{number(min(values), digits)} to {number(max(values), digits)}" if values else MISSING


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column aligned left and the others right. Raises ValueError for a row of another length."""
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells and the header {len(header)}: {row}")
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, *rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = ["-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    padded = [
        [cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (zip(line, widths, strict=True) for line in lines)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))
