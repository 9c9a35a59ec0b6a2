"""An experiment's result as a table, and the tables of docs/experiments.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest import environment
from loadtest.tables import MISSING, markdown_table, number

NOT_MEASURED = "not measured yet"
_FIGURE_NAMES = {"median": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "min": "min", "max": "max"}
_BEGIN = re.compile(r"<!-- experiment:([a-z_]+):begin -->")


def table(result: Mapping[str, Any]) -> str:
    """Every metric of every case as a row, every arm as a column."""
    arms = [arm["name"] for arm in result["arms"]]
    rows = [[_label(metric), *(_cell(metric, arm) for arm in arms)] for metric in result["metrics"]]
    return markdown_table(["", *arms], rows)


def _label(metric: Mapping[str, Any]) -> str:
    figures = [_FIGURE_NAMES[figure] for figure in metric["figures"]]
    named = f" {' / '.join(figures)}" if figures != ["p50"] else ""
    # "cached tokens, tokens" would say nothing more.
    unit = f", {metric['unit']}" if metric["unit"] and metric["unit"] not in metric["name"].split() else ""
    case = f"{metric['case']}: " if metric["case"] else ""
    return f"{case}{metric['name']}{named}{unit}"


def _cell(metric: Mapping[str, Any], arm: str) -> str:
    values = metric["values"].get(arm)
    if values is None:
        return MISSING
    return " / ".join(number(values[figure], metric["digits"]) for figure in metric["figures"])


def checks(result: Mapping[str, Any]) -> str:
    """One line for each check, failed or not, and for each failure."""
    lines = [f"- {'holds' if check['passed'] else 'FAILED'}: {check['name']} ({check['detail']})"
             for check in result["checks"]]  # fmt: skip
    return "\n".join([*lines, *(f"- FAILED: {failure}" for failure in result["failures"])])


def render(result: Mapping[str, Any]) -> str:
    """Where it was measured, the table, the checks and the notes, as Markdown."""
    notes = "\n".join(f"- {note}" for note in result["notes"])
    parts = [environment.headline(result), table(result), checks(result), notes]
    return "\n\n".join(part for part in parts if part)


def fill(text: str, results: Path) -> str:
    """The text with all that stands between `<!-- experiment:NAME:begin -->` and its end written anew.

    NAME's result is read from results/NAME.json; where there is none, it says so. Raises ValueError for a begin
    without an end, and for a text without any.
    """
    names = _BEGIN.findall(text)
    if not names:
        raise ValueError("the text has no <!-- experiment:NAME:begin -->")
    for name in names:
        begin, end = f"<!-- experiment:{name}:begin -->", f"<!-- experiment:{name}:end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the text has {begin} but no {end}")
        path = results / f"{name}.json"
        content = render(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else NOT_MEASURED
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text
