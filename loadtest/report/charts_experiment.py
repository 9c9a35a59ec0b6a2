"""Figures of one experiment: its metrics by arm, with all samples, and its series."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.report.figures import (
    COLOURS,
    MARKERS,
    Figure,
    Range,
    Table,
    Trace,
    bars,
    category_axis,
    layout,
    line,
    plain,
    quantity,
)
from loadtest.report.model import Experiment, Metric, Series, Summary
from loadtest.stats import ratio
from loadtest.tables import MISSING

_MOST_POINTS = 200  # more samples than these are drawn as a box with its outliers only


def experiment_figures(found: Experiment) -> list[Figure]:
    """One figure for each metric, with all of its cases, then one for each pair of axes of the series."""
    figures = [_metric(found, [metric for metric in found.metrics if (metric.name, metric.unit) == key])
               for key in dict.fromkeys((metric.name, metric.unit) for metric in found.metrics)]  # fmt: skip
    axes = dict.fromkeys((series.x_title, series.y_title) for series in found.series)
    figures += [_series([series for series in found.series if (series.x_title, series.y_title) == key])
                for key in axes]  # fmt: skip
    return [figure for figure in figures if figure is not None]


def _metric(found: Experiment, metrics: Sequence[Metric]) -> Figure | None:
    first = metrics[0]
    arms = list(dict.fromkeys([*found.arms, *(arm for metric in metrics for arm in metric.values)]))
    traces = [trace for style, arm in enumerate(arms) if (trace := _arm(arm, metrics, style))]
    if not traces:
        return None
    title = f"{first.name} ({first.unit})" if first.unit else first.name
    alone = _is_alone(metrics)
    # An arm that has its own place on the axis stands in its middle.
    mode = "overlay" if alone else "group"
    # The heading has the name, which may be longer than the axis.
    shape = layout("", first.unit) | {"boxmode": mode, "barmode": mode}
    category_axis(shape["xaxis"], arms if alone else [metric.case for metric in metrics])
    better = {"lower": "Lower is better.", "higher": "Higher is better."}.get(first.better, "")
    boxes = any(trace["type"] == "box" for trace in traces)
    caption = f"{better} Boxes: quartiles with the median; points: samples.".strip() if boxes else better
    return Figure(title, traces, shape, _metric_table(arms, metrics), caption)


def _is_alone(metrics: Sequence[Metric]) -> bool:
    """Whether there is one case without a name, so that the axis shows the arms instead."""
    return len(metrics) == 1 and not metrics[0].case


def _arm(arm: str, metrics: Sequence[Metric], style: int) -> Trace | None:
    """A box where there are samples, a bar where no arm has more than one of a case."""
    found = [(metric.case, metric.values[arm]) for metric in metrics if arm in metric.values]
    alone = _is_alone(metrics)
    colour = COLOURS[style % len(COLOURS)]
    most = max((len(summary.samples) for metric in metrics for summary in metric.values.values()), default=0)
    if most > 1 and any(summary.samples for _, summary in found):
        samples = [(arm if alone else case, y) for case, summary in found for y in summary.samples]
        many = max(len(summary.samples) for _, summary in found) > _MOST_POINTS
        trace: Trace = {
            "type": "box",
            "name": plain(arm),
            "x": [plain(x) for x, _ in samples],
            "y": [y for _, y in samples],
            "boxpoints": "outliers" if many else "all",
            "jitter": 0.5,
            "pointpos": 0,
            "fillcolor": "rgba(0,0,0,0)",
            "line": {"color": colour, "width": 2},
            "marker": {"color": colour, "symbol": MARKERS[style % len(MARKERS)], "size": 6, "opacity": 0.75},
        }
        if not alone:
            trace["offsetgroup"] = str(style)
        return trace
    medians = [(arm if alone else case, Range(summary.median)) for case, summary in found if summary.median is not None]
    if not medians:
        return None
    return bars(arm, [x for x, _ in medians], [y for _, y in medians], style)


def _metric_table(arms: Sequence[str], metrics: Sequence[Metric]) -> Table:
    rows = []
    for metric in metrics:
        figures = metric.figures
        baseline = metric.values.get(arms[0], Summary())
        for arm in arms:
            if arm not in metric.values:
                continue
            values = metric.values[arm]
            shown = " / ".join(quantity(values.get(name)) for name in figures)
            against = " / ".join(_ratio(values.get(name), baseline.get(name)) for name in figures)
            extent = f"{quantity(values.min)} to {quantity(values.max)}" if values.min is not None else MISSING
            rows.append((metric.case or "all", arm, f"{values.count:,}", " / ".join(figures), shown, extent, against))
    header = ("case", "arm", "samples", "figures", "values", "least to largest", f"ratio to {arms[0]}")
    return Table(header, tuple(rows))


def _ratio(value: float | None, baseline: float | None) -> str:
    found = ratio(value, baseline)
    return MISSING if found is None else f"{found:.3f}x"


def _series(series: Sequence[Series]) -> Figure | None:
    traces, rows = [], []
    first = series[0]
    for style, found in enumerate(series):
        points = [(x, Range(y)) for x, y in zip(found.x, found.y, strict=True) if y is not None]
        if points:
            trace = line(found.name, [x for x, _ in points], [y for _, y in points], style)
            traces.append(trace | ({"mode": "lines"} if len(points) > 60 else {}))
        rows += [(found.name, x if isinstance(x, str) else f"{x:g}", quantity(y))
                 for x, y in zip(found.x, found.y, strict=True)]  # fmt: skip
    if not traces:
        return None
    title = f"{first.y_title or 'value'} by {first.x_title or 'x'}"
    shape = layout(first.x_title, first.y_title) | {"showlegend": True}
    if any(isinstance(x, str) for found in series for x in found.x):
        names = dict.fromkeys(x if isinstance(x, str) else f"{x:g}" for found in series for x in found.x)
        category_axis(shape["xaxis"], list(names))
    return Figure(title, traces, shape, Table(("series", first.x_title or "x", first.y_title or "y"), tuple(rows)))


def arms_table(found: Experiment) -> Table | None:
    """What each arm is, or None where the file doesn't say."""
    rows = tuple((arm, config) for arm, config in found.arms.items() if config)
    return Table(("arm", "configuration"), rows, words=True) if rows else None
