"""The levels of a load test as a table: in the log, and in Locust's browser UI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.tables import markdown_table, number

_COLUMNS = {
    "level": "level",
    "requests": "requests",
    "failures": "failures",
    "rate": "tokens/s",
    "requests_rate": "requests/s",
    "ttft_p50": "TTFT p50 ms",
    "ttft_p99": "TTFT p99 ms",
    "itl_p50": "ITL p50 ms",
    "itl_p99": "ITL p99 ms",
    "e2e_p50": "E2E p50 ms",
    "e2e_p99": "E2E p99 ms",
}


def markdown(levels: Sequence[Mapping[str, Any]]) -> str:
    """The levels as a Markdown table."""
    rows = [list(row(figures).values()) for figures in levels]
    return markdown_table(list(_COLUMNS.values()), rows)


def row(figures: Mapping[str, Any]) -> dict[str, str]:
    """One level's cells by column."""

    def milliseconds(name: str, which: str) -> str:
        value = figures[name][which]
        return number(None if value is None else 1000 * value)

    return {
        "level": f"{figures['level']:g} {figures['unit']}{'' if figures['complete'] else ' (cut)'}",
        "requests": str(figures["requests"]),
        "failures": str(figures["failures"]),
        "rate": number(figures["output_tokens_per_second"]),
        "requests_rate": number(figures["requests_per_second"], 2),
        **{
            f"{short}_p{which}": milliseconds(f"{short}_s", "median" if which == 50 else "p99")
            for short in ("ttft", "itl", "e2e")
            for which in (50, 99)
        },
    }


def columns() -> list[dict[str, str]]:
    """The structure of the browser's table of levels."""
    return [{"key": key, "title": title} for key, title in _COLUMNS.items()]
