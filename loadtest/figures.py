"""PNG figures of a comparison: throughput and latencies by number of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from loadtest.peers.report import all_levels, latency_ms, level_entries, throughputs
from loadtest.stats import median

# Okabe and Ito's colours, told apart by all common kinds of sight, without the yellow that white paper swallows.
_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI = 150
_MISSING = float("nan")  # drawn as a gap

Server = Mapping[str, Any]
Value = Callable[[Server, int], float | None]


def write_figures(servers: Sequence[Server], folder: Path) -> list[Path]:
    """Writes all figures of a result's `servers` into the folder; returns their paths, none if nothing was measured.

    A server keeps its colour and marker in all of them. A level that wasn't completed in every round is a gap.
    """
    if not all_levels(servers):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "throughput.png": throughput_figure(servers),
        "latency.png": latency_figure(servers, [("e2e_s", "whole request, s", 1000.0)]),
        "ttft-itl.png": latency_figure(
            servers, [("ttft_s", "time to first token, ms", 1.0), ("itl_s", "time between tokens, ms", 1.0)]
        ),
    }
    paths = []
    for name, figure in figures.items():
        FigureCanvasAgg(figure)
        figure.savefig(folder / name, dpi=_DPI)
        paths.append(folder / name)
    return paths


def throughput_figure(servers: Sequence[Server]) -> Figure:
    """Output tokens per second: a line for each measured server, its rounds' range as a bar on each point."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    levels = all_levels(servers)
    _lines(axes, servers, levels, _median_throughput)
    for index, server in enumerate(servers):
        for level in levels:
            values = throughputs(server, level)
            if len(values) > 1 and _is_complete(server, level):
                axes.vlines(level, min(values), max(values), colors=_COLOURS[index % len(_COLOURS)], alpha=0.5)
    _dress(axes, levels, "output tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return figure


def latency_figure(servers: Sequence[Server], quantities: Sequence[tuple[str, str, float]]) -> Figure:
    """p50 left and p99 right, on one scale; a row for each quantity: its key, its label, milliseconds in its unit."""
    figure = Figure(figsize=(11, 0.5 + 4.2 * len(quantities)), layout="constrained")
    levels = all_levels(servers)
    grid = figure.subplots(len(quantities), 2, squeeze=False, sharex=True, sharey="row")
    for row, (key, label, unit) in zip(grid, quantities, strict=True):
        for axes, (name, title) in zip(row, (("median", "p50"), ("p99", "p99")), strict=True):
            _lines(axes, servers, levels, _latency(key, name, unit))
            _dress(axes, levels, label)
            axes.set_title(title)
            axes.label_outer()
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))), fontsize="small")
    return figure


def _median_throughput(server: Server, level: int) -> float | None:
    values = throughputs(server, level)
    return median(values) if values else None


def _latency(key: str, name: str, unit: float) -> Value:
    def value(server: Server, level: int) -> float | None:
        found = latency_ms(server, level, key, name)
        return None if found is None else found / unit

    return value


def _lines(axes: Axes, servers: Sequence[Server], levels: Sequence[int], value: Value) -> None:
    for index, server in enumerate(servers):
        found = [value(server, level) if _is_complete(server, level) else None for level in levels]
        if all(y is None for y in found):
            continue
        axes.plot(
            levels,
            [_MISSING if y is None else y for y in found],
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=6,
            linewidth=1.8,
            label=server["title"],
        )


def _is_complete(server: Server, level: int) -> bool:
    entries = level_entries(server, level)
    return bool(entries) and all(entry["complete"] for entry in entries)


def _dress(axes: Axes, levels: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, labels=[str(level) for level in levels])
    axes.minorticks_off()
    axes.set_xlabel("clients at once")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
