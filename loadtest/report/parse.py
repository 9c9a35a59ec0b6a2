"""One result document, whatever its kind, to its content and its warnings. Raises Malformed and nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from loadtest.report.fields import Fields, Malformed, as_text
from loadtest.report.model import (
    Content,
    Curve,
    Decode,
    DecodeCase,
    Drafts,
    DraftsCase,
    Engine,
    EngineCase,
    EngineMetric,
    Experiment,
    Kernels,
    KernelTiming,
    Level,
    Load,
    Memory,
    MemorySample,
    Metric,
    Series,
    Serve,
    ServeGaps,
    ServePrefix,
    ServeThroughput,
    Summary,
)
from loadtest.stats import median, percentile

_MAX_LISTED = 5  # messages of one sort among the warnings

Parsed = tuple[Content, list[str]]


def parse(document: Fields) -> tuple[str, Content, list[str]]:
    """Kind, content and warnings of a result document."""
    parsers: dict[str, Callable[[Fields], Parsed]] = {
        "engine": _engine,
        "serve": _serve,
        "memory": _memory,
        "decode": _decode,
        "kernels": _kernels,
        "drafts": _drafts,
        "load": _load,
        "compare": _compare,
        "experiment": _experiment,
        "gpu": _gpu,
    }
    kind = document.text("benchmark")
    if kind is None:
        raise Malformed('it has no "benchmark" key, so it is no result of a benchmark')
    if kind not in parsers:
        raise Malformed(f'"benchmark" is {kind!r}; this version knows {", ".join(parsers)}')
    content, warnings = parsers[kind](document)
    return kind, content, warnings


def parse_summary(found: Fields) -> Summary:
    """A `loadtest.stats.summary`, with what an older file lacks computed from its samples."""
    samples = found.numbers("samples")
    figures = {name: found.number(name) for name in ("median", "p90", "p95", "p99", "min", "max")}
    if samples:
        computed: dict[str, Callable[[], float]] = {
            "median": lambda: median(samples),
            "p90": lambda: percentile(samples, 90),
            "p95": lambda: percentile(samples, 95),
            "p99": lambda: percentile(samples, 99),
            "min": lambda: min(samples),
            "max": lambda: max(samples),
        }
        figures = {name: computed[name]() if value is None else value for name, value in figures.items()}
    count = found.number("count")
    return Summary(count=len(samples) if count is None else int(count), samples=samples, **figures)


def _engine(document: Fields) -> Parsed:
    cases, warnings = [], []
    for case in document.children("cases"):
        name = case.text("name") or "?"
        metrics = {}
        rates = case.child("tokens_per_second")
        for metric in rates.keys():  # noqa: SIM118 (it is no mapping)
            found = rates.child(metric)
            arms = {arm: parse_summary(found.child(arm)) for arm in ("quire", "mlx_lm")}
            ratios = found.numbers("ratios_by_round")
            metrics[metric] = EngineMetric(arms, found.number("ratio_of_medians"), ratios, found.number("target"))
        failure = case.text("failure")
        if failure:
            warnings.append(f"{name} failed: {failure}")
        cases.append(EngineCase(name, metrics, failure))
    return Engine(tuple(cases), document.texts("metrics")), warnings


def _serve(document: Fields) -> Parsed:
    throughput, prefixes, gaps = [], [], []
    for case in document.children("cases"):
        ratio, target = case.number("ratio_of_medians"), case.number("target")
        kind = case.text("kind")
        if kind == "Throughput":
            http, inside, ttft, itl = (
                parse_summary(case.child(name))
                for name in ("http_tokens_per_second", "in_process_tokens_per_second", "ttft_s", "itl_s")
            )
            ratios = case.numbers("ratios_by_round")
            throughput.append(ServeThroughput(case.required("clients"), http, inside, ratio, ratios, target, ttft, itl))
        elif kind == "PrefixTTFT":
            cold, cached = (parse_summary(case.child(name)) for name in ("cold_ttft_s", "cached_ttft_s"))
            prefixes.append(ServePrefix(case.required("prefix_tokens"), cold, cached, ratio, target))
        elif kind == "Gaps":
            before, during = (parse_summary(case.child(name)) for name in ("gap_before_s", "gap_during_s"))
            largest, chunk, chunks = (
                case.number(name) for name in ("largest_gap_s", "chunk_s", "largest_gap_in_chunks")
            )
            streams, prompt_tokens = case.required("streams"), case.required("prompt_tokens")
            gaps.append(ServeGaps(streams, prompt_tokens, before, during, largest, chunk, chunks, target))
    warnings = [f"failed: {as_text(failure)}" for failure in document.list("failures")]
    return Serve(tuple(throughput), tuple(prefixes), tuple(gaps), document.number("server_ready_s")), warnings


def _memory(document: Fields) -> Parsed:
    samples = tuple(
        MemorySample(sample.required("requests"), sample.table("rss_bytes"), sample.table("kv_blocks"))
        for sample in document.children("samples")
    )
    warnings = [] if document.flag("blocks_are_back", True) else ["KV blocks are missing at the end"]
    surprises = [as_text(surprise) for surprise in document.list("surprises")]
    warnings += [f"unexpected: {surprise}" for surprise in surprises[:_MAX_LISTED]]
    if len(surprises) > _MAX_LISTED:
        warnings.append(f"and {len(surprises) - _MAX_LISTED} more that were unexpected")
    return Memory(samples), warnings


def _decode(document: Fields) -> Parsed:
    cases = []
    for case in document.children("cases"):
        rounds = case.children("rounds")
        step, prefill = (
            _of_rounds(tuple(found.required(name) for found in rounds)) for name in ("step_ms", "prefill_tokens_per_s")
        )
        arm = case.text("arm") or "?"
        cases.append(DecodeCase(arm, case.required("context"), case.required("batch"), step, prefill))
    return Decode(document.text("shape") or "?", tuple(cases)), []


def _of_rounds(samples: tuple[float, ...]) -> Summary:
    return parse_summary(Fields({"samples": list(samples)}))


def _drafts(document: Fields) -> Parsed:
    cases = []
    for case in document.children("cases"):
        decode = case.child("tokens_per_second").child("decode")
        arms = {arm: parse_summary(decode.child(arm)) for arm in ("plain", "drafts")}
        name = f"{case.text('kind') or '?'} x {case.required('sequences'):g}"
        cases.append(DraftsCase(name, arms, case.number("acceptance")))
    return Drafts(tuple(cases)), []


def _kernels(document: Fields) -> Parsed:
    timings = []
    for timing in document.children("timings"):
        if timing.flag("chosen", True):
            rows, length, dim = (timing.required(name) for name in ("num_rows", "seq_len", "head_dim"))
            name = f"{rows:g} x {length:,.0f}, head {dim:g}{', int8' if timing.flag('quantized') else ''}"
            timings.append(KernelTiming(name, timing.required("s"), timing.required("share"), timing.number("target")))
    wrong = [check.text("case") or "?" for check in document.children("checks") if not check.flag("right", True)]
    warnings = [f"wrong result: {case}" for case in wrong[:_MAX_LISTED]]
    return Kernels(tuple(timings)), warnings


def _level(found: Fields) -> Level:
    numbers = {
        name: found.number(name)
        for name in (
            "requests", "failures", "retries", "unfinished", "duration_s",
            "output_tokens_per_second", "requests_per_second",
        )
    }  # fmt: skip
    return Level(
        level=found.required("level"),
        unit=found.text("unit") or "users",
        complete=found.flag("complete", True),
        ttft=parse_summary(found.child("ttft_s")),
        itl=parse_summary(found.child("itl_s")),
        e2e=parse_summary(found.child("e2e_s")),
        server_metrics=found.table("server_metrics"),
        **numbers,
    )


def _level_warnings(levels: list[Level], where: str = "") -> list[str]:
    warnings = []
    failures, requests = (sum(getattr(level, name) or 0 for level in levels) for name in ("failures", "requests"))
    if failures:
        warnings.append(f"{where}{failures:,.0f} of {requests:,.0f} requests failed")
    # Some are always in flight when a level ends; where they are the most, those that took longest are not counted.
    early = sorted({f"{level.level:g} {level.unit}" for level in levels
                    if (level.unfinished or 0) > (level.requests or 0)})  # fmt: skip
    if early:
        warnings.append(f"{where}more requests were in flight at the end than were done: {', '.join(early)}")
    cut = sorted({f"{level.level:g} {level.unit}" for level in levels if not level.complete})
    if cut:
        warnings.append(f"{where}cut short: {', '.join(cut)}")
    return warnings


def _generator_warnings(found: Fields, where: str = "") -> list[str]:
    if "generator" not in found or not found.child("generator").flag("saturated"):
        return []
    generator = found.child("generator")
    cpu, lag = generator.number("cpu_percent_max"), generator.number("lag_ms_p99")
    measured = [f"CPU up to {cpu:.0f} %" if cpu is not None else "", f"lag p99 {lag:.0f} ms" if lag is not None else ""]
    inside = ", ".join(part for part in measured if part)
    return [f"{where}the load generator was saturated{f' ({inside})' if inside else ''}: figures are its own, too"]


def _error_warnings(found: Fields, where: str = "") -> list[str]:
    errors = sorted(found.table("errors").items(), key=lambda item: -item[1])
    warnings = [f"{where}{count:,.0f} x {message or '(no message)'}" for message, count in errors[:_MAX_LISTED]]
    if len(errors) > _MAX_LISTED:
        warnings.append(f"{where}and {len(errors) - _MAX_LISTED} other errors")
    return warnings


def _load(document: Fields) -> Parsed:
    levels = [_level(found) for found in document.children("levels")]
    title = document.text("label") or document.text("model") or "server"
    warnings = _generator_warnings(document) + _level_warnings(levels) + _error_warnings(document)
    return Load(document.text("scenario") or "", (Curve(title, tuple(levels)),)), warnings


def _compare(document: Fields) -> Parsed:
    curves, warnings = [], _generator_warnings(document) + _error_warnings(document)
    for server in document.children("servers"):
        title = server.text("title") or server.text("name") or "server"
        where = f"{title}: "
        levels = []
        for found in server.children("rounds"):
            levels += [_level(level) for level in found.children("levels")]
            warnings += _generator_warnings(found, where) + _error_warnings(found, where)
        status = server.text("status") or "measured"
        if status != "measured":
            warnings.append(f"{where}{status}: {server.text('reason') or 'no reason is given'}")
        warnings += _level_warnings(levels, where) + _generator_warnings(server, where) + _error_warnings(server, where)
        curves.append(Curve(title, tuple(levels), _server_details(server, status), server.numbers("ready_s")))
    return Load("compare", tuple(curves)), list(dict.fromkeys(warnings))


def _server_details(server: Fields, status: str) -> Mapping[str, str]:
    """What the table of servers says, as text."""
    command, environment = server.raw("command"), server.raw("environment")
    if isinstance(command, list):
        command = shlex.join(as_text(part) for part in command)
    if isinstance(environment, dict):
        environment = " ".join(f"{name}={as_text(value)}" for name, value in environment.items())
    limited = server.child("levels_limited").text("reason")
    remarks = [as_text(note) for note in server.list("notes")] + ([f"fewer levels: {limited}"] if limited else [])
    details = {
        "status": status, "reason": server.text("reason"), "version": server.raw("version"),
        "dtype": server.raw("dtype"), "command": command, "environment": environment, "remarks": "; ".join(remarks),
    }  # fmt: skip
    return {name: as_text(value) for name, value in details.items() if value}


def _series(found: Fields) -> Series:
    xs: list[float | str] = [x if isinstance(x, int | float) else as_text(x) for x in found.list("x")]
    ys = [Fields({"y": y}).number("y") for y in found.list("y")]
    if len(xs) != len(ys):
        raise Malformed(f"series {found.text('name')!r} has {len(xs)} x and {len(ys)} y")
    x_title, y_title = (found.text(name) or "" for name in ("x_title", "y_title"))
    return Series(found.text("name") or "", tuple(xs), tuple(ys), x_title, y_title)


def _arms(document: Fields) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for arm in document.children("arms"):
        rest: dict[str, Any] = {key: arm.raw(key) for key in arm.keys() if key != "name"}  # noqa: SIM118
        config = rest["config"] if set(rest) == {"config"} else rest
        found[arm.text("name") or "?"] = as_text(config)
    return found


def _experiment(document: Fields) -> Parsed:
    metrics = []
    for metric in document.children("metrics"):
        values = metric.child("values")
        by_arm = {arm: parse_summary(values.child(arm)) for arm in values.keys()}  # noqa: SIM118
        better = metric.text("better") or "lower"
        known = ("median", "p90", "p95", "p99", "min", "max")
        figures = tuple(name for name in metric.list("figures") if name in known) or ("median",)
        texts = {key: metric.text(key) or "" for key in ("name", "unit", "case")}
        metrics.append(Metric(**texts, better=better, figures=figures, values=by_arm))
    name = document.text("name") or "experiment"
    checks = tuple(
        (found.text("name") or "?", found.flag("passed"), found.text("detail") or "")
        for found in document.children("checks")
    )
    content = Experiment(
        name=name,
        title=document.text("title") or name,
        question=document.text("question") or "",
        arms=_arms(document),
        metrics=tuple(metrics),
        series=tuple(_series(found) for found in document.children("series")),
        checks=checks,
        notes=tuple(as_text(note) for note in document.list("notes")),
    )
    warnings = [f"did not hold: {name}: {detail}" for name, passed, detail in checks if not passed]
    warnings += [f"failed: {as_text(failure)}" for failure in document.list("failures")]
    return content, warnings + _generator_warnings(document) + _error_warnings(document)


# Kind of case, key of a round (with a summary's figure), and how to show it.
_GPU_METRICS = (
    ("decode", "step_ms", "Decode step", "ms", "lower"),
    ("prefill", "tokens_per_s", "Prefill", "tokens/s", "higher"),
    ("mixed", "output_tokens_per_s", "Mixed traffic, output", "tokens/s", "higher"),
    ("mixed", "ttft_s.median", "Mixed traffic, TTFT median", "s", "lower"),
    ("mixed", "ttft_s.p99", "Mixed traffic, TTFT p99", "s", "lower"),
    ("mixed", "itl_s.median", "Mixed traffic, ITL median", "s", "lower"),
    ("mixed", "itl_s.p99", "Mixed traffic, ITL p99", "s", "lower"),
)


def _gpu(document: Fields) -> Parsed:
    """Arms that differ in the engine: shown as an experiment of its own for each shape of model."""
    warnings, metrics = [], []
    cases = document.children("cases")
    for kind, key, title, unit, better in _GPU_METRICS:
        for case in cases:
            if case.text("kind") != kind:
                continue
            arms = case.child("arms")
            values = {arm: _of_rounds(_figures(arms.child(arm), key)) for arm in arms.keys()}  # noqa: SIM118
            measured = {arm: found for arm, found in values.items() if found.samples}
            name = (case.text("name") or "?").removeprefix(f"{kind} ")
            metrics.append(Metric(title, unit, better, name, ("median",), measured))
    configurations = {}
    engines = document.child("arms")
    for arm in engines.keys():  # noqa: SIM118
        engine = engines.child(arm)
        configurations[arm] = "; ".join(as_text(engine.raw(key)) for key in ("options", "chosen") if engine.raw(key))
        if failure := engine.text("failure"):
            warnings.append(f"{arm} is missing: {failure}")
    for case in cases:
        arms = case.child("arms")
        for arm in arms.keys():  # noqa: SIM118
            if failure := arms.child(arm).text("failure"):
                warnings.append(f"{case.text('name')}, {arm}: {failure}")
        if case.flag("cut_short"):
            warnings.append(f"cut short: {case.text('name')}")
    warnings += [f"skipped: {found.text('case')}: {found.text('reason')}" for found in document.children("skipped")]
    shape = document.text("shape") or "?"
    content = Experiment(
        name=f"gpu {shape}",
        title=f"engines on one GPU, {shape}",
        question="In process, on random weights, taking turns.",
        arms=configurations,
        metrics=tuple(metrics),
        series=(),
        checks=(),
        notes=(),
    )
    return content, warnings


def _figures(arm: Fields, key: str) -> tuple[float, ...]:
    name, _, part = key.partition(".")
    found = (reply.child(name).number(part) if part else reply.number(name) for reply in arm.children("rounds"))
    return tuple(value for value in found if value is not None)
