"""Result files of all kinds and ages, normalized. Times are in seconds; None is what was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some samples. Older files lack p90 and p99, which come from the samples then."""

    count: int = 0
    median: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None
    samples: tuple[float, ...] = ()

    def get(self, name: str) -> float | None:
        """The figure of that name: median, p90, p95, p99, min or max."""
        value: float | None = getattr(self, name)
        return value


@dataclass(frozen=True, slots=True)
class Level:
    """One step of a load: so many users, or so many requests/s offered."""

    level: float
    unit: str
    complete: bool
    requests: float | None
    failures: float | None
    retries: float | None
    unfinished: float | None
    duration_s: float | None
    output_tokens_per_second: float | None
    requests_per_second: float | None
    ttft: Summary
    itl: Summary
    e2e: Summary
    server_metrics: Mapping[str, float]

    @property
    def clean(self) -> bool:
        """Whether it ran to its end and every request succeeded. Some are always in flight when a level ends."""
        return self.complete and not self.failures


@dataclass(frozen=True, slots=True)
class Curve:
    """One server under a load of several levels, measured in one or more rounds."""

    title: str
    levels: tuple[Level, ...]  # of all rounds, in the order they were measured
    details: Mapping[str, str] = field(default_factory=dict)  # version, command and the like
    ready_s: tuple[float, ...] = ()

    def units(self) -> list[str]:
        """Units of its levels, in order of appearance."""
        return list(dict.fromkeys(level.unit for level in self.levels))

    def by_level(self, unit: str) -> dict[float, list[Level]]:
        """Rounds of each level of this unit, ascending."""
        found: dict[float, list[Level]] = {}
        for level in self.levels:
            if level.unit == unit:
                found.setdefault(level.level, []).append(level)
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Load:
    """A `load` run (one curve) or a `compare` run (one for each server)."""

    scenario: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One rate of one case, in tokens/s, of both arms."""

    arms: Mapping[str, Summary]
    ratio: float | None  # of the medians, the first arm's to the second's
    ratios: tuple[float, ...]  # by round
    target: float | None


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Sequences handed to both arms together."""

    name: str
    metrics: Mapping[str, EngineMetric]
    failure: str | None


@dataclass(frozen=True, slots=True)
class Engine:
    """An `engine` run."""

    cases: tuple[EngineCase, ...]
    metrics: Mapping[str, str]  # what each of them means


@dataclass(frozen=True, slots=True)
class ServeThroughput:
    """The same load over HTTP and in process, tokens/s."""

    clients: float
    http: Summary
    in_process: Summary
    ratio: float | None
    ratios: tuple[float, ...]
    target: float | None
    ttft: Summary
    itl: Summary


@dataclass(frozen=True, slots=True)
class ServePrefix:
    """TTFT of prompts whose prefix was new, and was cached."""

    prefix_tokens: float
    cold: Summary
    cached: Summary
    ratio: float | None
    target: float | None


@dataclass(frozen=True, slots=True)
class ServeGaps:
    """Gaps of decoding streams while a long prompt is read."""

    streams: float
    prompt_tokens: float
    before: Summary
    during: Summary
    largest_s: float | None
    chunk_s: float | None
    largest_in_chunks: float | None
    target: float | None


@dataclass(frozen=True, slots=True)
class Serve:
    """A `serve` run."""

    throughput: tuple[ServeThroughput, ...]
    prefixes: tuple[ServePrefix, ...]
    gaps: tuple[ServeGaps, ...]
    ready_s: float | None


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The idle server after so many requests."""

    requests: float
    rss_bytes: Mapping[str, float]
    kv_blocks: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """A `memory` run."""

    samples: tuple[MemorySample, ...]


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Steps of one batch, in one way of running them."""

    arm: str
    context: float
    batch: float
    step_ms: Summary  # of the rounds
    prefill: Summary  # tokens/s


@dataclass(frozen=True, slots=True)
class Decode:
    """A `decode` run: an engine's steps on a GPU."""

    shape: str
    cases: tuple[DecodeCase, ...]


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Decode attention of equally long sequences."""

    name: str
    seconds: float
    share: float  # of a copy's bandwidth
    target: float | None


@dataclass(frozen=True, slots=True)
class Kernels:
    """A `kernels` run: the timings of the numbers of splits that the engine would choose."""

    timings: tuple[KernelTiming, ...]


@dataclass(frozen=True, slots=True)
class DraftsCase:
    """One kind of answer, so many at once."""

    name: str
    decode: Mapping[str, Summary]  # tokens/s by arm: plain, drafts
    acceptance: float | None  # share of the drafts that were right


@dataclass(frozen=True, slots=True)
class Drafts:
    """A `drafts` run: the same engine with a drafter and without."""

    cases: tuple[DraftsCase, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of an experiment, by arm."""

    name: str
    unit: str
    better: str  # "lower" or "higher"
    case: str  # which of the experiment's loads; empty where there is one only
    figures: tuple[str, ...]  # of the summary, that are worth showing
    values: Mapping[str, Summary]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of an experiment's plot."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    x_title: str
    y_title: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """An `experiment` run: arms that differ in one thing, and what was measured of each."""

    name: str
    title: str
    question: str
    arms: Mapping[str, str]  # name to its configuration, as text
    metrics: tuple[Metric, ...]
    series: tuple[Series, ...]
    checks: tuple[tuple[str, bool, str], ...]  # what must hold, whether it did, and the detail
    notes: tuple[str, ...]


Content = Load | Engine | Serve | Memory | Decode | Kernels | Drafts | Experiment


@dataclass(frozen=True, slots=True)
class Run:
    """One result file."""

    path: Path
    file: str  # its name on the page
    kind: str  # its "benchmark" key
    date: str | None
    commit: str | None
    uncommitted: bool
    machine: str
    versions: Mapping[str, str]
    label: str | None
    model: str | None
    arguments: Mapping[str, str]
    warnings: tuple[str, ...]
    content: Content


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that is no result, and why."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Results:
    """All that was found."""

    runs: tuple[Run, ...]
    unread: tuple[Unread, ...]
