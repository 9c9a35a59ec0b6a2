from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import environment
from loadtest.experiments import __main__ as command
from loadtest.experiments.base import Metric
from loadtest.experiments.catalog import EXPERIMENTS
from loadtest.experiments.report import NOT_MEASURED, fill, render, table

DOCS = Path(__file__).parents[2] / "docs" / "experiments.md"
TEXT = """# Experiments
before
<!-- experiment:batching:begin -->
bygone
<!-- experiment:batching:end -->
between
<!-- experiment:paging:begin -->
<!-- experiment:paging:end -->
after
"""


def _result(**changes: Any) -> dict[str, Any]:
    rate = Metric("throughput", "tokens/s", "higher", "2 clients", ("median",), 1, {"a": [1.0, 3.0], "b": [1234.5]})
    ttft = Metric("ITL of streams", "ms", "lower", "", ("median", "p99"), 0, {"a": [10.0, 20.0]})
    cached = Metric("cached tokens", "tokens", "higher", "", ("median",), 0, {"a": [16.0]})
    count = Metric("preemptions", "", "lower", "", ("max",), 0, {"a": [2.0]})
    return {
        **environment.describe(),
        "arms": [{"name": "a"}, {"name": "b"}],
        "metrics": [metric.to_json() for metric in (rate, ttft, cached, count)],
        "checks": [{"name": "x", "passed": True, "detail": "1"}, {"name": "y", "passed": False, "detail": "2"}],
        "notes": ["mind this"],
        "failures": ["round 1: lost"],
        **changes,
    }


def test_a_table_has_a_row_for_each_metric_and_a_column_for_each_arm() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(_result()).splitlines()]
    assert rows[0] == ["", "a", "b"]
    assert rows[2:] == [
        ["2 clients: throughput, tokens/s", "2.0", "1,234.5"],
        ["ITL of streams p50 / p99, ms", "15 / 20", "-"],
        ["cached tokens", "16", "-"],
        ["preemptions max", "2", "-"],
    ]


def test_checks_failures_and_notes_are_below_the_table() -> None:
    text = render(_result())
    assert "- holds: x (1)\n- FAILED: y (2)\n- FAILED: round 1: lost\n\n- mind this" in text
    assert render(_result(notes=[], checks=[], failures=[])).endswith("|")


def test_documents_are_filled_from_results_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "batching.json").write_text(json.dumps(_result()))
    once = fill(TEXT, tmp_path)
    assert fill(once, tmp_path) == once
    assert "1,234.5" in once
    assert "bygone" not in once
    assert once.count(NOT_MEASURED) == 1
    for kept in ("before", "between", "after"):
        assert kept in once
    (tmp_path / "batching.json").unlink()
    assert fill(once, tmp_path).count(NOT_MEASURED) == 2


def test_markers_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no <!-- experiment:paging:end"):
        fill(TEXT.replace("<!-- experiment:paging:end -->", ""), tmp_path)
    with pytest.raises(ValueError, match="experiment:NAME"):
        fill("nothing here", tmp_path)


def test_the_command_fills_a_document_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    (tmp_path / "batching.json").write_text(json.dumps(_result()))
    assert command.main(["--docs", str(path), "--results", str(tmp_path)]) == 0
    assert "1,234.5" in path.read_text()
    path.write_text("nothing here")
    assert command.main(["--docs", str(path), "--results", str(tmp_path)]) == 2
    assert "page.md" in capsys.readouterr().err


def test_the_document_has_every_experiment_every_config_and_the_kept_results() -> None:
    text = DOCS.read_text()
    for name, kind in EXPERIMENTS.items():
        assert f"<!-- experiment:{name}:begin -->" in text
        assert f"make experiment NAME={name}" in text
        for arm in kind.arms:
            assert f"{arm.config}.yaml" in text
    assert fill(text, DOCS.parent / "benchmarks" / "experiments") == text, "run python -m loadtest.experiments --docs"
