"""Figures of `load` and `compare` runs: every server of every run over each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.report.figures import (
    COLOURS,
    DASHES,
    Choice,
    Figure,
    Range,
    Table,
    Trace,
    layout,
    level_axis,
    line,
    plain,
    quantity,
    ranged,
    seconds,
)
from loadtest.report.model import Curve, Level, Load, Run, Summary
from loadtest.stats import median
from loadtest.tables import MISSING

_MAX_ECDF_POINTS = 2000
_LATENCIES = {"TTFT": "ttft", "ITL": "itl", "E2E": "e2e"}
_LONG = {"TTFT": "Time to first token", "ITL": "Gap between tokens (ITL)", "E2E": "End-to-end latency"}
_FIGURES = {"TTFT": ("median", "p90", "p99"), "ITL": ("median", "p90", "p99"), "E2E": ("median", "p99")}

Value = Callable[[Level], float | None]


@dataclass(frozen=True, slots=True)
class NamedCurve:
    """A curve with a name that no other on the page has. Its place among them is its colour."""

    name: str
    run: Run
    curve: Curve


def named_curves(runs: Sequence[Run]) -> list[NamedCurve]:
    """The curves of all load and compare runs, also those without a single level."""
    found = [(run, run.content, curve) for run in runs if isinstance(run.content, Load) for curve in run.content.curves]
    # A scenario is worth its space only where there are several.
    scenarios = {content.scenario for _, content, _ in found if content.scenario}
    names = [
        f"{curve.title} ({content.scenario})" if content.scenario and len(scenarios) > 1 else curve.title
        for _, content, curve in found
    ]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    unique = []
    for short, (run, _, _) in zip(names, found, strict=True):
        name = f"{short}, {run.file.removesuffix('.json')}" if counts[short] > 1 else short
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return [NamedCurve(name, run, curve) for name, (run, _, curve) in zip(unique, found, strict=True)]


def over_rounds(levels: Sequence[Level], value: Value) -> Range | None:
    """The median of a figure over the rounds of one level, with its range where there are several."""
    values = [found for level in levels if (found := value(level)) is not None]
    if not values:
        return None
    return Range(median(values), *((min(values), max(values)) if len(values) > 1 else ()))


def latency(metric: str, figure: str) -> Value:
    """What gives a level's figure of TTFT, ITL or E2E."""

    def value(level: Level) -> float | None:
        summary: Summary = getattr(level, _LATENCIES[metric])
        return summary.get(figure)

    return value


def load_figures(curves: Sequence[NamedCurve]) -> list[Figure]:
    """All figures, those with nothing to show left out. One set for each unit of levels (users, requests/s)."""
    figures: list[Figure | None] = []
    for unit in dict.fromkeys(unit for named in curves for unit in named.curve.units()):
        figures.append(_sweep(curves, unit, "Output tokens/s", lambda level: level.output_tokens_per_second))
        figures.append(_sweep(curves, unit, "Completed requests/s", lambda level: level.requests_per_second))
        figures += [_latencies(curves, unit, metric) for metric in ("E2E", "TTFT", "ITL")]
        figures += [_ecdf(curves, unit, metric) for metric in ("TTFT", "E2E")]
    return [figure for figure in figures if figure is not None]


def server_metrics_table(curves: Sequence[NamedCurve]) -> Table | None:
    """What the servers said of themselves, or None where none did."""
    rows = [
        (named.name, f"{level.level:g} {level.unit}", name, quantity(value))
        for named in curves
        for level in named.curve.levels
        for name, value in level.server_metrics.items()
    ]
    return Table(("server", "level", "metric", "value"), tuple(rows)) if rows else None


def levels_table(curves: Sequence[NamedCurve]) -> Table:
    """One row for each measured level: how many requests, and what became of them."""
    rows = []
    for named in curves:
        for level in named.curve.levels:
            counts = [quantity(getattr(level, key)) for key in ("requests", "failures", "retries", "unfinished")]
            complete = "yes" if level.complete else "cut short"
            rows.append((named.name, f"{level.level:g} {level.unit}", *counts, seconds(level.duration_s), complete))
    return Table(
        ("server", "level", "requests", "failures", "retries", "unfinished", "duration", "complete"), tuple(rows)
    )


def _x_title(unit: str) -> str:
    return {"users": "concurrent users", "requests/s": "offered requests/s"}.get(unit, unit)


def _points(named: NamedCurve, unit: str, value: Value) -> tuple[list[float], list[Range], list[bool]]:
    xs, ranges, hollow = [], [], []
    for level, rounds in named.curve.by_level(unit).items():
        found = over_rounds(rounds, value)
        if found is not None:
            xs.append(level)
            ranges.append(found)
            hollow.append(not all(measured.clean for measured in rounds))
    return xs, ranges, hollow


def _caption(traces: Sequence[Trace], more: str = "") -> str:
    parts = [more] if more else []
    if any("error_y" in trace for trace in traces):
        parts.append("Points are medians over rounds; bars reach from the least to the largest round.")
    if any(isinstance(trace["marker"]["symbol"], list) for trace in traces):
        parts.append("Hollow points: requests failed, or the level was cut short.")
    return " ".join(parts)


def _wide(curves: Sequence[NamedCurve], unit: str, cells: Callable[[NamedCurve, float], str]) -> Table:
    """A table with a row for each level and a column for each curve."""
    with_unit = [named for named in curves if unit in named.curve.units()]
    levels = sorted({level.level for named in with_unit for level in named.curve.levels if level.unit == unit})
    rows = tuple((f"{level:g}", *(cells(named, level) for named in with_unit)) for level in levels)
    return Table((unit, *(named.name for named in with_unit)), rows)


def _sweep(curves: Sequence[NamedCurve], unit: str, title: str, value: Value) -> Figure | None:
    traces, levels = [], []
    for style, named in enumerate(curves):
        xs, ranges, hollow = _points(named, unit, value)
        if xs:
            traces.append(line(named.name, xs, ranges, style, hollow=hollow))
            levels += xs
    if not traces:
        return None
    shape = layout(_x_title(unit), title)
    level_axis(shape["xaxis"], levels)

    def cells(named: NamedCurve, level: float) -> str:
        return ranged(over_rounds(named.curve.by_level(unit).get(level, []), value))

    return Figure(f"{title} by {_x_title(unit)}", traces, shape, _wide(curves, unit, cells), _caption(traces))


def _latencies(curves: Sequence[NamedCurve], unit: str, metric: str) -> Figure | None:
    figures = _FIGURES[metric]
    traces, levels, of = [], [], []
    for style, named in enumerate(curves):
        for dash, figure in enumerate(figures):
            xs, ranges, hollow = _points(named, unit, latency(metric, figure))
            if xs:
                name = f"{named.name}, {figure}"
                traces.append(line(name, xs, ranges, style, dash=DASHES.index(("solid", "dash", "dot")[dash]),
                                   hollow=hollow))  # fmt: skip
                levels += xs
                of.append(figure)
    if not traces:
        return None
    shape = layout(_x_title(unit), metric, is_seconds=True)
    level_axis(shape["xaxis"], levels)

    def cells(named: NamedCurve, level: float) -> str:
        rounds = named.curve.by_level(unit).get(level, [])
        found = [over_rounds(rounds, latency(metric, figure)) for figure in figures]
        return " / ".join(seconds(value.value if value else None) for value in found) if rounds else MISSING

    choices = [Choice("all", (True,) * len(of))] + [Choice(name, tuple(f == name for f in of)) for name in figures]
    table = _wide(curves, unit, cells)
    return Figure(
        f"{_LONG[metric]} by {_x_title(unit)}",
        traces,
        shape,
        Table((f"{unit}: {' / '.join(figures)}", *table.header[1:]), table.rows),
        _caption(traces, "Solid: median; dashed: p90; dotted: p99." if len(figures) == 3 else
                 "Solid: median; dashed: p99."),
        "Show",
        tuple(choices),
        # Three lines of each of many servers are too much to begin with.
        0 if len(traces) <= 3 * len(figures) else 1,
    )  # fmt: skip


def ecdf_trace(name: str, samples: Sequence[float], style: int) -> Trace:
    """The share of samples at or below each value. Of very many, every k-th is drawn, and both ends."""
    ordered = sorted(samples)
    count = len(ordered)
    step = -(-count // _MAX_ECDF_POINTS)
    ranks = sorted({*range(0, count, step), count - 1})
    return {
        "type": "scatter",
        "mode": "lines+markers" if count <= 20 else "lines",
        "name": plain(name),
        "x": [ordered[rank] for rank in ranks],
        "y": [(rank + 1) / count for rank in ranks],
        "line": {"color": COLOURS[style % len(COLOURS)], "dash": DASHES[style % len(DASHES)], "width": 2,
                 "shape": "hv"},
        "marker": {"color": COLOURS[style % len(COLOURS)], "symbol": "circle", "size": 5},
    }  # fmt: skip


def distribution_row(name: str, level: str, found: Summary) -> tuple[str, ...]:
    """A row of `DISTRIBUTION_HEADER`."""
    figures = (seconds(found.get(figure)) for figure in ("min", "median", "p90", "p99", "max"))
    return (name, level, f"{found.count:,}", *figures)


DISTRIBUTION_HEADER = ("server", "level", "samples", "min", "median", "p90", "p99", "max")


def _ecdf(curves: Sequence[NamedCurve], unit: str, metric: str) -> Figure | None:
    traces, of, rows = [], [], []
    for style, named in enumerate(curves):
        for level, rounds in named.curve.by_level(unit).items():
            summaries: list[Summary] = [getattr(found, _LATENCIES[metric]) for found in rounds]
            samples = [sample for found in summaries for sample in found.samples]
            if samples:
                traces.append(ecdf_trace(named.name, samples, style))
                of.append(level)
                rows += [distribution_row(named.name, f"{level:g} {unit}", found) for found in summaries]
    if not traces:
        return None
    levels = sorted(set(of))
    shape = layout(metric, "share of requests", x_seconds=True)
    shape["yaxis"] |= {"range": [0, 1.02], "tickformat": ".0%", "hoverformat": ".1%"}
    choices = tuple(Choice(f"{level:g} {unit}", tuple(found == level for found in of)) for level in levels)
    return Figure(
        f"Distribution of {metric} ({unit})",
        traces,
        shape,
        Table(DISTRIBUTION_HEADER, tuple(rows)),
        "Share of requests that took at most so long, all rounds together.",
        "Level",
        choices,
        len(choices) - 1,
    )
