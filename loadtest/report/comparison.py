"""Runs of one kind against a baseline: figure by figure, the ratio, and whether it is beyond the rounds' noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.report.charts import ratio_range, spread
from loadtest.report.charts_load import NamedCurve, latency, over_rounds
from loadtest.report.figures import Range, Table, quantity, ranged, seconds
from loadtest.report.model import Decode, Drafts, Engine, Experiment, Kernels, Memory, Serve, Summary
from loadtest.stats import ratio
from loadtest.tables import MISSING

Better = Literal["lower", "higher"]
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of one run."""

    value: Range
    better: Better
    is_seconds: bool = False

    def shown(self) -> str:
        """For a cell."""
        return ranged(self.value, seconds if self.is_seconds else quantity)


Facts = dict[str, Fact]  # by a name that is the same in every run


def verdict(fact: Fact, baseline: Fact) -> str:
    """The ratio to the baseline, and better or worse where the ranges of the rounds are apart.

    Single measurements have no range, so nothing can be said of them but the ratio.
    """
    found = ratio(fact.value.value, baseline.value.value)
    if found is None:
        return MISSING
    a, b = fact.value, baseline.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return f"{found:.2f}x"
    if a.low <= b.high and b.low <= a.high:
        return f"{found:.2f}x, ranges overlap"
    return f"{found:.2f}x, {'better' if (found > 1) == (fact.better == 'higher') else 'worse'}"


def compare(subjects: Sequence[tuple[str, Facts]], baseline: int = 0) -> Table | None:
    """One row for each figure that the baseline and another subject have; None where there is none."""
    if len(subjects) < 2:
        return None
    base_name, base = subjects[baseline]
    others = [subject for index, subject in enumerate(subjects) if index != baseline]
    rows = []
    for key, fact in base.items():
        if not any(key in facts for _, facts in others):
            continue
        row = [key, fact.better, fact.shown()]
        for _, facts in others:
            found = facts.get(key)
            row += [found.shown(), verdict(found, fact)] if found else [MISSING, MISSING]
        rows.append(tuple(row))
    if not rows:
        return None
    header = ["figure", "better is", f"{base_name} (baseline)"]
    for name, _ in others:
        header += [name, "ratio"]
    return Table(tuple(header), tuple(rows))


def load_facts(named: NamedCurve) -> Facts:
    """Throughput and latencies of each level. Levels that were cut short or had failures are no ground for a ratio."""
    facts: Facts = {}
    for unit in named.curve.units():
        for level, rounds in named.curve.by_level(unit).items():
            clean = [found for found in rounds if found.clean]
            where = f"{level:g} {unit}"
            _add(facts, f"{where}: output tokens/s", over_rounds(clean, lambda x: x.output_tokens_per_second), "higher")
            _add(facts, f"{where}: requests/s", over_rounds(clean, lambda x: x.requests_per_second), "higher")
            for metric in ("TTFT", "ITL", "E2E"):
                for figure in ("median", "p99"):
                    found = over_rounds(clean, latency(metric, figure))
                    _add(facts, f"{where}: {metric} {figure}", found, "lower", is_seconds=True)
    return facts


def engine_facts(run: Engine) -> Facts:
    """Our rates, and their ratios to mlx-lm's."""
    facts: Facts = {}
    for case in run.cases:
        for name, metric in case.metrics.items():
            title = f"{case.name}: {name.replace('_', ' ')}"
            ours = metric.arms.get("quire", Summary())
            _add(facts, f"{title}, tokens/s", spread(ours), "higher")
            _add(facts, f"{title}, ratio to mlx-lm", ratio_range(metric.ratio, metric.ratios), "higher")
    return facts


def serve_facts(run: Serve) -> Facts:
    """Rates, latencies and ratios. Latencies are of all requests, so they come without a range of rounds."""
    facts: Facts = {}
    for case in run.throughput:
        where = f"{case.clients:g} clients"
        _add(facts, f"{where}: HTTP tokens/s", spread(case.http), "higher")
        _add(facts, f"{where}: HTTP / in process", ratio_range(case.ratio, case.ratios), "higher")
        for metric, found in (("TTFT", case.ttft), ("ITL", case.itl)):
            for figure in ("median", "p99"):
                _add(facts, f"{where}: {metric} {figure}", _one(found.get(figure)), "lower", is_seconds=True)
    for prefix in run.prefixes:
        where = f"prefix of {prefix.prefix_tokens:,.0f} tokens"
        _add(facts, f"{where}: TTFT cold", spread(prefix.cold), "lower", is_seconds=True)
        _add(facts, f"{where}: TTFT cached", spread(prefix.cached), "lower", is_seconds=True)
    for gap in run.gaps:
        where = f"{gap.prompt_tokens:,.0f} tokens into {gap.streams:g} streams"
        _add(facts, f"{where}: largest gap", _one(gap.largest_s), "lower", is_seconds=True)
        _add(facts, f"{where}: largest gap in chunks", _one(gap.largest_in_chunks), "lower")
    _add(facts, "server ready after", _one(run.ready_s), "lower", is_seconds=True)
    return facts


def memory_facts(run: Memory) -> Facts:
    """Resident memory at the end, and its growth."""
    facts: Facts = {}
    if run.samples:
        first, last = run.samples[0].rss_bytes, run.samples[-1].rss_bytes
        for name, value in last.items():
            _add(facts, f"{name}: RSS at the end, MiB", Range(value / _MIB), "lower")
            if name in first:
                _add(facts, f"{name}: growth, MiB", Range((value - first[name]) / _MIB), "lower")
    return facts


def decode_facts(run: Decode) -> Facts:
    """A step's time and prefill, by arm, context and batch."""
    facts: Facts = {}
    for case in run.cases:
        where = f"{run.shape}, {case.arm}, {case.context:,.0f} tokens, {case.batch:g} sequences"
        _add(facts, f"{where}: ms a step", spread(case.step_ms), "lower")
        _add(facts, f"{where}: prefill tokens/s", spread(case.prefill), "higher")
    return facts


def kernel_facts(run: Kernels) -> Facts:
    """Microseconds of a call, and the share of a copy's bandwidth."""
    facts: Facts = {}
    for timing in run.timings:
        _add(facts, f"{timing.name}: us", Range(timing.seconds * 1e6), "lower")
        _add(facts, f"{timing.name}: share of the copy", Range(timing.share), "higher")
    return facts


def drafts_facts(run: Drafts) -> Facts:
    """Decode rates of both arms, and the share of right drafts."""
    facts: Facts = {}
    for case in run.cases:
        for arm, rate in case.decode.items():
            _add(facts, f"{case.name}, {arm}: decode tokens/s", spread(rate), "higher")
        if case.acceptance is not None:
            _add(facts, f"{case.name}: share of right drafts", Range(case.acceptance), "higher")
    return facts


def experiment_facts(run: Experiment) -> Facts:
    """Each metric of each arm. Ranges would be of samples, not of rounds, so there are none."""
    facts: Facts = {}
    for metric in run.metrics:
        better: Better = "higher" if metric.better == "higher" else "lower"
        for arm, found in metric.values.items():
            for figure in metric.figures:
                name = ", ".join(part for part in (metric.name, metric.case, arm, figure) if part)
                unit = f" ({metric.unit})" if metric.unit else ""
                _add(facts, name + unit, _one(found.get(figure)), better)
    return facts


def facts_of(kind_runs: Mapping[str, object]) -> list[tuple[str, Facts]]:
    """The facts of runs by name, of whatever kind they are."""
    readers: dict[type, Callable[..., Facts]] = {
        Engine: engine_facts,
        Serve: serve_facts,
        Memory: memory_facts,
        Decode: decode_facts,
        Kernels: kernel_facts,
        Drafts: drafts_facts,
        Experiment: experiment_facts,
    }
    return [(name, readers[type(content)](content)) for name, content in kind_runs.items()]


def _one(value: float | None) -> Range | None:
    return None if value is None else Range(value)


def _add(facts: Facts, name: str, value: Range | None, better: Better, *, is_seconds: bool = False) -> None:
    if value is not None:
        facts[name] = Fact(value, better, is_seconds)
