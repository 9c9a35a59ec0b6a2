from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.figures import latency_figure, throughput_figure, write_figures
from tests.loadtest.fake_peers import level


def _server(name: str, *levels: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "title": name.title(), "rounds": [{"levels": list(levels)}]}


_SERVERS = [
    _server("a", level(1, 10.0), level(2, 20.0), level(4, 40.0)),
    _server("b", level(1, 5.0), level(4, 15.0)),
    _server("c", level(1, 5.0), level(2, 1.0, complete=False)),
    _server("unavailable"),
]


def test_a_line_for_each_measured_server_with_gaps_where_nothing_was_completed() -> None:
    (axes,) = throughput_figure(_SERVERS).axes
    lines = {str(line.get_label()): np.asarray(line.get_ydata(), float).tolist() for line in axes.lines}
    assert list(lines) == ["A", "B", "C"]
    assert lines["A"] == [10.0, 20.0, 40.0]
    assert [math.isnan(y) for y in lines["B"]] == [False, True, False]
    assert [math.isnan(y) for y in lines["C"]] == [False, True, True]
    assert axes.get_xscale() == "log"
    assert len({line.get_color() for line in axes.lines}) == len({line.get_marker() for line in axes.lines}) == 3


def test_latencies_are_drawn_at_p50_and_p99_in_their_unit() -> None:
    figure = latency_figure(_SERVERS, [("ttft_s", "time to first token, ms", 1.0), ("e2e_s", "whole, s", 1000.0)])
    assert len(figure.axes) == 4
    assert all(len(axes.lines) == 3 for axes in figure.axes)
    assert np.asarray(figure.axes[2].lines[0].get_ydata(), float)[0] == 2.0


def test_figures_are_png_files(tmp_path: Path) -> None:
    paths = write_figures(_SERVERS, tmp_path / "out")
    assert [path.name for path in paths] == ["throughput.png", "latency.png", "ttft-itl.png"]
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000


def test_nothing_measured_makes_no_figure(tmp_path: Path) -> None:
    assert write_figures([_server("a")], tmp_path) == []
    assert not list(tmp_path.iterdir())
