"""Figures of `engine`, `serve` and `memory` runs: the runs of one kind over each other.

Runs come by the name to show for them; their order gives the colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.report.charts_load import DISTRIBUTION_HEADER, distribution_row, ecdf_trace
from loadtest.report.figures import (
    Choice,
    Figure,
    Range,
    Table,
    bars,
    category_axis,
    layout,
    level_axis,
    line,
    quantity,
    ranged,
    seconds,
    target_marks,
)
from loadtest.report.model import (
    Decode,
    Drafts,
    Engine,
    EngineMetric,
    Kernels,
    Memory,
    Serve,
    ServePrefix,
    ServeThroughput,
    Summary,
)
from loadtest.tables import MISSING

_ARM_TITLES = {"quire": "quire", "mlx_lm": "mlx-lm"}
_MIB = 2**20


def spread(found: Summary) -> Range | None:
    """Median, least and largest of a summary; no range for a single sample."""
    if found.median is None:
        return None
    return Range(found.median) if found.count < 2 else Range(found.median, found.min, found.max)


def ratio_range(ratio: float | None, by_round: Sequence[float]) -> Range | None:
    """A ratio of medians, with the range of the rounds' ratios."""
    if ratio is None:
        return None
    return Range(ratio, min(by_round), max(by_round)) if len(by_round) > 1 else Range(ratio)


def engine_figures(runs: Mapping[str, Engine]) -> list[Figure]:
    """For each metric the ratio to mlx-lm with its target, then the rates of both arms."""
    metrics = list(dict.fromkeys(name for run in runs.values() for case in run.cases for name in case.metrics))
    # The decode ratio is what the targets are about.
    metrics.sort(key=lambda name: name != "decode")
    figures = [_engine_ratio(runs, metric) for metric in metrics]
    figures += [_engine_rates(runs, metric) for metric in metrics]
    return [figure for figure in figures if figure is not None]


def _cases(runs: Mapping[str, Engine], metric: str) -> dict[str, dict[str, EngineMetric]]:
    """Case name to run name to what was measured, in order of appearance."""
    found: dict[str, dict[str, EngineMetric]] = {}
    for name, run in runs.items():
        for case in run.cases:
            if metric in case.metrics:
                found.setdefault(case.name, {})[name] = case.metrics[metric]
    return found


def _caption(runs: Mapping[str, Engine], metric: str, more: str) -> str:
    meaning = next((run.metrics[metric] for run in runs.values() if metric in run.metrics), metric)
    return f"{meaning}; {more}"


def _engine_ratio(runs: Mapping[str, Engine], metric: str) -> Figure | None:
    cases = _cases(runs, metric)
    traces, rows = [], []
    targets: dict[str, float | None] = dict.fromkeys(cases)
    for style, name in enumerate(runs):
        xs, ranges = [], []
        for case, by_run in cases.items():
            found = by_run.get(name)
            measured = ratio_range(found.ratio, found.ratios) if found else None
            if found is None or measured is None:
                continue
            xs.append(case)
            ranges.append(measured)
            targets[case] = found.target if targets[case] is None else targets[case]
            rows.append((case, name, ranged(measured), quantity(found.target)))
        if xs:
            traces.append(line(name, xs, ranges, style) | {"mode": "markers"})
    if not traces:
        return None
    marks = target_marks(list(targets), list(targets.values()), "target (at least)")
    shape = layout("sequences x prompt tokens", "ratio to mlx-lm")
    category_axis(shape["xaxis"], list(cases))
    # Runs beside each other, so that their bars don't cover one another; targets in the middle.
    shape |= {"scattermode": "group", "scattergap": 0.6}
    shape["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
                        "line": {"width": 1, "dash": "dot"}}]  # fmt: skip
    for style, trace in enumerate(traces):
        trace["offsetgroup"] = str(style)
    if marks:
        marks["offsetgroup"] = str(len(traces) // 2)
    return Figure(
        f"{metric.replace('_', ' ').capitalize()}: ratio to mlx-lm",
        traces + ([marks] if marks else []),
        shape,
        Table(("case", "run", "ratio (by round)", "target"), tuple(rows)),
        _caption(runs, metric, "ratio of medians, bars over the rounds' ratios. Above 1 Quire is faster."),
    )


def _engine_rates(runs: Mapping[str, Engine], metric: str) -> Figure | None:
    cases = _cases(runs, metric)
    arms = list(dict.fromkeys(arm for by_run in cases.values() for found in by_run.values() for arm in found.arms))
    traces, rows = [], []
    for style, (name, arm) in enumerate((name, arm) for name in runs for arm in arms):
        title = _ARM_TITLES.get(arm, arm) + (f", {name}" if len(runs) > 1 else "")
        found = {case: spread(by_run[name].arms[arm]) for case, by_run in cases.items() if name in by_run}
        measured = {case: value for case, value in found.items() if value is not None}
        if measured:
            traces.append(bars(title, list(measured), list(measured.values()), style))
            rows += [(case, title, ranged(value)) for case, value in measured.items()]
    if not traces:
        return None
    shape = layout("sequences x prompt tokens", "tokens/s") | {"barmode": "group"}
    category_axis(shape["xaxis"], list(cases))
    return Figure(
        f"{metric.replace('_', ' ').capitalize()}: tokens/s",
        traces,
        shape,
        Table(("case", "arm", "tokens/s"), tuple(rows)),
        _caption(runs, metric, "medians, bars from the least to the largest round."),
    )


def serve_figures(runs: Mapping[str, Serve]) -> list[Figure]:
    """HTTP against in process, latencies by clients, the cached prefix and the long prompt."""
    figures = [
        _serve_rates(runs),
        _serve_ratio(runs),
        _serve_latency(runs, "TTFT"),
        _serve_latency(runs, "ITL"),
        _serve_ecdf(runs),
        _serve_prefix(runs),
        _serve_gaps(runs),
    ]
    return [figure for figure in figures if figure is not None]


def _suffix(runs: Mapping[str, Serve], name: str) -> str:
    return f", {name}" if len(runs) > 1 else ""


def _serve_rates(runs: Mapping[str, Serve]) -> Figure | None:
    traces, rows, clients = [], [], []
    for index, (name, run) in enumerate(runs.items()):
        for arm, title in enumerate(("HTTP", "in process")):
            found = [(case.clients, spread(case.in_process if arm else case.http)) for case in run.throughput]
            measured = [(x, value) for x, value in found if value is not None]
            if measured:
                full = title + _suffix(runs, name)
                xs, ranges = [x for x, _ in measured], [value for _, value in measured]
                traces.append(line(full, xs, ranges, 2 * index + arm, dash=arm))
                rows += [(f"{x:g}", full, ranged(value)) for x, value in measured]
                clients += xs
    if not traces:
        return None
    shape = layout("clients", "output tokens/s")
    level_axis(shape["xaxis"], clients)
    table = Table(("clients", "arm", "output tokens/s"), tuple(rows))
    caption = "Medians; bars: range of the rounds."
    return Figure("Output tokens/s over HTTP and in process", traces, shape, table, caption)


def _serve_ratio(runs: Mapping[str, Serve]) -> Figure | None:
    traces, rows, clients = [], [], []
    targets: dict[float, float] = {}
    for style, (name, run) in enumerate(runs.items()):
        found = [(case, ratio_range(case.ratio, case.ratios)) for case in run.throughput]
        measured = [(case, value) for case, value in found if value is not None]
        if measured:
            xs = [case.clients for case, _ in measured]
            traces.append(line(name, xs, [value for _, value in measured], style))
            clients += xs
            targets |= {case.clients: case.target for case, _ in measured if case.target is not None}
            rows += [(f"{case.clients:g}", name, ranged(value), quantity(case.target)) for case, value in measured]
    if not traces:
        return None
    marks = target_marks(list(targets), list(targets.values()), "target (at least)")
    shape = layout("clients", "HTTP / in process")
    level_axis(shape["xaxis"], clients)
    table = Table(("clients", "run", "ratio (by round)", "target"), tuple(rows))
    caption = "Share of the engine's own rate that arrives over HTTP; bars: range of the rounds."
    traces += [marks] if marks else []
    return Figure("HTTP throughput as a share of the engine's", traces, shape, table, caption)


def _latency_of(case: ServeThroughput, metric: str) -> Summary:
    return case.ttft if metric == "TTFT" else case.itl


def _serve_latency(runs: Mapping[str, Serve], metric: str) -> Figure | None:
    figures = ("median", "p90", "p99")
    traces, rows, clients, of = [], [], [], []
    for style, (name, run) in enumerate(runs.items()):
        for dash, figure in enumerate(figures):
            found = [(case.clients, _latency_of(case, metric).get(figure)) for case in run.throughput]
            measured = [(x, Range(value)) for x, value in found if value is not None]
            if measured:
                xs = [x for x, _ in measured]
                traces.append(line(figure + _suffix(runs, name), xs, [y for _, y in measured], style, dash=dash))
                clients += xs
                of.append(figure)
        for case in run.throughput:
            values = (seconds(_latency_of(case, metric).get(figure)) for figure in figures)
            rows.append((f"{case.clients:g}", name, *values))
    if not traces:
        return None
    shape = layout("clients", metric, is_seconds=True)
    level_axis(shape["xaxis"], clients)
    choices = [Choice("all", (True,) * len(of))] + [Choice(name, tuple(f == name for f in of)) for name in figures]
    table = Table(("clients", "run", *figures), tuple(rows))
    caption = "All requests of all rounds. Solid: median; dashed: p90; dotted: p99."
    return Figure(f"{metric} by clients, over HTTP", traces, shape, table, caption, "Show", tuple(choices))


def _serve_ecdf(runs: Mapping[str, Serve]) -> Figure | None:
    traces, of, rows = [], [], []
    for style, (name, run) in enumerate(runs.items()):
        for case in run.throughput:
            if case.ttft.samples:
                traces.append(ecdf_trace(name, case.ttft.samples, style))
                of.append(case.clients)
                rows.append(distribution_row(name, f"{case.clients:g} clients", case.ttft))
    if not traces:
        return None
    shape = layout("TTFT", "share of requests", x_seconds=True)
    shape["yaxis"] |= {"range": [0, 1.02], "tickformat": ".0%", "hoverformat": ".1%"}
    levels = sorted(set(of))
    choices = tuple(Choice(f"{level:g} clients", tuple(found == level for found in of)) for level in levels)
    caption = "Share of requests whose first token came within so long."
    table = Table(DISTRIBUTION_HEADER, tuple(rows))
    return Figure("Distribution of TTFT", traces, shape, table, caption, "Level", choices, len(choices) - 1)


def _serve_prefix(runs: Mapping[str, Serve]) -> Figure | None:
    traces, rows, names = [], [], []
    for index, title in enumerate(("cold", "cached")):
        found = [(_prefix_name(runs, name, case), spread(case.cached if index else case.cold))
                 for name, run in runs.items() for case in run.prefixes]  # fmt: skip
        measured = [(name, value) for name, value in found if value is not None]
        if measured:
            names += [name for name, _ in measured]
            traces.append(bars(title, [name for name, _ in measured], [value for _, value in measured], index))
    if not traces:
        return None
    for name, run in runs.items():
        for case in run.prefixes:
            cells = (ranged(spread(found), seconds) for found in (case.cold, case.cached))
            rows.append((_prefix_name(runs, name, case), *cells, quantity(case.ratio), quantity(case.target)))
    shape = layout("", "TTFT", is_seconds=True) | {"barmode": "group"}
    category_axis(shape["xaxis"], list(dict.fromkeys(names)))
    table = Table(("prefix", "cold", "cached", "ratio", "target (at most)"), tuple(rows))
    caption = "The same prefix seen first, and seen before. Medians; bars: least to largest."
    return Figure("TTFT with a new and a cached prefix", traces, shape, table, caption)


def _prefix_name(runs: Mapping[str, Serve], name: str, case: ServePrefix) -> str:
    return f"{case.prefix_tokens:,.0f} tokens{_suffix(runs, name)}"


def _serve_gaps(runs: Mapping[str, Serve]) -> Figure | None:
    parts = ("median before", "one chunk", "median during", "largest during")
    traces, rows = [], []
    for style, (name, run) in enumerate(runs.items()):
        for case in run.gaps:
            found = (case.before.median, case.chunk_s, case.during.median, case.largest_s)
            values = dict(zip(parts, found, strict=True))
            measured = {part: Range(value) for part, value in values.items() if value is not None}
            title = f"{case.prompt_tokens:,.0f} tokens into {case.streams:g} streams{_suffix(runs, name)}"
            if measured:
                traces.append(bars(title, list(measured), list(measured.values()), style))
            row = [*(seconds(value) for value in values.values()), quantity(case.largest_in_chunks)]
            rows.append((title, *row, quantity(case.target)))
    if not traces:
        return None
    shape = layout("", "gap between tokens", is_seconds=True) | {"barmode": "group", "showlegend": True}
    category_axis(shape["xaxis"], parts)
    table = Table(("long prompt", *parts, "largest, in chunks", "target (at most)"), tuple(rows))
    caption = "What decoding streams see while a long prompt is read; the largest gap should be near one chunk's time."
    return Figure("Gaps while a long prompt arrives", traces, shape, table, caption)


def decode_figures(runs: Mapping[str, Decode]) -> list[Figure]:
    """Milliseconds of a step over the batch, a line for each arm and context."""
    traces, rows = [], []
    order = 0
    for index, (name, run) in enumerate(runs.items()):
        lines = dict.fromkeys((case.arm, case.context) for case in run.cases)
        for arm, context in lines:
            cases = [case for case in run.cases if (case.arm, case.context) == (arm, context)]
            steps = [spread(case.step_ms) for case in cases]
            label = f"{run.shape}, {arm}, {context:,.0f} tokens" + (f", {name}" if len(runs) > 1 else "")
            points = [(case.batch, step) for case, step in zip(cases, steps, strict=True) if step is not None]
            traces.append(line(label, [x for x, _ in points], [y for _, y in points], order, dash=index))
            order += 1
            rows += [(label, f"{batch:g}", quantity(step.value)) for batch, step in points]
    if not traces:
        return []
    table = Table(("steps", "sequences", "ms a step"), tuple(rows))
    caption = "A step gives each sequence a token; scheduler and sampler are in it."
    return [Figure("Decode steps", traces, layout("sequences", "ms a step"), table, caption)]


def drafts_figures(runs: Mapping[str, Drafts]) -> list[Figure]:
    """Decode rates by kind of answer, a line for each arm, and the share of right drafts beside them."""
    traces, rows = [], []
    for index, (name, run) in enumerate(runs.items()):
        where = f", {name}" if len(runs) > 1 else ""
        for order, arm in enumerate(("plain", "drafts")):
            rates = [(case.name, spread(case.decode[arm])) for case in run.cases]
            points = [(case, rate) for case, rate in rates if rate is not None]
            traces.append(line(arm + where, [x for x, _ in points], [y for _, y in points], order, dash=index))
        for case in run.cases:
            figures = (case.decode["plain"].median, case.decode["drafts"].median, case.acceptance)
            rows.append((case.name + where, *(quantity(value) for value in figures)))
    if not rows:
        return []
    shape = layout("answers x sequences", "tokens/s while all decode")
    category_axis(shape["xaxis"], list(dict.fromkeys(case.name for run in runs.values() for case in run.cases)))
    table = Table(("answers x sequences", "tokens/s", "with drafts", "share of right drafts"), tuple(rows))
    return [Figure("Drafts", traces, shape, table, "Greedy answers are the same in both arms.")]


def kernel_figures(runs: Mapping[str, Kernels]) -> list[Figure]:
    """The share of a copy's bandwidth, by shape."""
    traces, rows = [], []
    for index, (name, run) in enumerate(runs.items()):
        points = [(timing.name, Range(timing.share)) for timing in run.timings]
        traces.append(line(name, [x for x, _ in points], [y for _, y in points], index))
        rows += [
            (f"{timing.name}, {name}" if len(runs) > 1 else timing.name, quantity(timing.share),
             MISSING if timing.target is None else quantity(timing.target))
            for timing in run.timings
        ]  # fmt: skip
    if not rows:
        return []
    shape = layout("sequences x tokens", "share of a copy's bandwidth")
    category_axis(shape["xaxis"], [row[0] for row in rows])
    table = Table(("sequences x tokens", "share", "target (at least)"), tuple(rows))
    return [Figure("Attention kernels", traces, shape, table, "Bytes that must be read, over the time of a call.")]


def memory_figures(runs: Mapping[str, Memory]) -> list[Figure]:
    """Resident memory, and KV blocks by state, over the requests sent."""
    figures = [
        _memory(runs, "Resident memory", "RSS, MiB", "rss_bytes", _MIB),
        _memory(runs, "KV blocks by state", "blocks", "kv_blocks", 1),
    ]
    return [figure for figure in figures if figure is not None]


def _memory(runs: Mapping[str, Memory], title: str, unit: str, what: str, divisor: int) -> Figure | None:
    traces, rows = [], []
    keys = list(dict.fromkeys(key for run in runs.values() for sample in run.samples for key in getattr(sample, what)))
    for index, (name, run) in enumerate(runs.items()):
        suffix = f", {name}" if len(runs) > 1 else ""
        for order, key in enumerate(keys):
            points = [(sample.requests, getattr(sample, what)[key] / divisor)
                      for sample in run.samples if key in getattr(sample, what)]  # fmt: skip
            if points:
                label = key.replace("_", " ") + suffix
                ranges = [Range(y) for _, y in points]
                traces.append(line(label, [x for x, _ in points], ranges, order, dash=index))
        for sample in run.samples:
            values: Mapping[str, float] = getattr(sample, what)
            cells = (quantity(values[key] / divisor) if key in values else MISSING for key in keys)
            rows.append((f"{sample.requests:g}{suffix}", *cells))
    if not traces:
        return None
    shape = layout("requests sent", unit)
    table = Table(("requests", *(key.replace("_", " ") for key in keys)), tuple(rows))
    caption = "Looked at while the server idles. Memory that grows with the requests would be a leak."
    return Figure(title, traces, shape, table, caption if divisor > 1 else "Free and evictable blocks can be had.")
