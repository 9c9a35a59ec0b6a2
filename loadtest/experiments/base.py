"""What an experiment is: arms that differ in a few keys of the engine, a load, and what must come out of it."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from loadtest import metrics_page
from loadtest.client import Client
from loadtest.prompts import PromptSource
from loadtest.serve_cases import CaseError
from loadtest.stats import summary
from loadtest.stream import RequestResult

Better = Literal["lower", "higher"]
Figures = tuple[str, ...]  # keys of `stats.summary` that a table shows
_WARM_UP_PROMPTS = (16, 64)  # tokens


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison."""

    name: str
    config: str  # the Serve config's name under configs/experiments, without .yaml


@dataclass(slots=True)
class Metric:
    """One measured quantity in one case, for each arm. Samples of all rounds together."""

    name: str
    unit: str
    better: Better
    case: str
    figures: Figures
    digits: int
    samples: dict[str, list[float]] = field(default_factory=dict)  # by arm

    def to_json(self) -> dict[str, Any]:
        """Everything, with each arm's summary."""
        return {
            "name": self.name,
            "unit": self.unit,
            "better": self.better,
            "case": self.case,
            "figures": list(self.figures),
            "digits": self.digits,
            "values": {arm: summary(samples) for arm, samples in self.samples.items()},
        }


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a line plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    x_title: str
    y_title: str


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold, whatever the machine."""

    name: str
    passed: bool
    detail: str


class Record:
    """What an experiment has measured so far."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []
        self.series: list[Series] = []
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.counters: dict[str, dict[str, float]] = {}  # by arm: the server's own counts, summed over rounds
        self.outputs: dict[str, list[str]] = {}  # by arm: texts, where an experiment compares them
        self.failures: list[str] = []

    def add(
        self,
        name: str,
        unit: str,
        arm: str,
        samples: Iterable[float],
        *,
        better: Better,
        case: str = "",
        figures: Figures = ("median",),
        digits: int = 1,
    ) -> None:
        """Adds samples to the metric of that name and case, making it where it is new."""
        metric = next((m for m in self.metrics if (m.name, m.case) == (name, case)), None)
        if metric is None:
            metric = Metric(name, unit, better, case, figures, digits)
            self.metrics.append(metric)
        metric.samples.setdefault(arm, []).extend(samples)

    def samples(self, name: str, arm: str, case: str = "") -> list[float]:
        """An arm's samples of a metric; none where nothing was measured."""
        return [x for m in self.metrics if (m.name, m.case) == (name, case) for x in m.samples.get(arm, [])]

    def count(self, arm: str, name: str, value: float) -> None:
        """Adds to one of an arm's counters."""
        counters = self.counters.setdefault(arm, {})
        counters[name] = counters.get(name, 0) + value

    def check(self, name: str, passed: bool, detail: str) -> None:
        """Notes whether something held that must hold."""
        self.checks.append(Check(name, passed, detail))

    def latencies(self, arm: str, case: str, results: Sequence[RequestResult]) -> None:
        """TTFT and E2E of requests, in milliseconds."""
        ttft = [1000 * result.ttft for result in results if result.ttft is not None]
        e2e = [1000 * (result.ended - result.started) for result in results if result.ended is not None]
        figures = ("median", "p99")
        self.add("TTFT", "ms", arm, ttft, better="lower", case=case, figures=figures, digits=0)
        self.add("E2E", "ms", arm, e2e, better="lower", case=case, figures=figures, digits=0)


class Session:
    """One arm's server in one round, with prompts that are the same for every arm of the round."""

    def __init__(
        self, arm: str, round_index: int, client: Client, prompts: PromptSource, seed: int, base_url: str, model: str
    ) -> None:
        """seed: for whatever else the load draws; the same for every arm of the round."""
        self.arm = arm
        self.round_index = round_index
        self.client = client
        self.prompts = prompts
        self.seed = seed
        self.base_url = base_url
        self.model = model  # the id that the server serves

    async def metric(self, name: str) -> float:
        """The sum of one name's values on /metrics, 0 where there are none."""
        return metrics_page.value(await self.client.page("/metrics"), f"quire:{name}") or 0.0

    async def dispatch(self) -> dict[str, float]:
        """Attention calls by path, since the server's start."""
        return metrics_page.by_label(await self.client.page("/metrics"), "quire:attention_dispatch_total", "path")

    async def idle(self, timeout_s: float = 30.0) -> None:
        """Returns when nothing runs or waits. Raises CaseError after timeout_s."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while await self.metric("num_requests_running") or await self.metric("num_requests_waiting"):
            if asyncio.get_running_loop().time() > deadline:
                raise CaseError(f"the server was not idle after {timeout_s:.0f} s")
            await asyncio.sleep(0.05)


class Experiment(ABC):
    """A question with two or more answers. Subclasses are frozen dataclasses whose fields are the load's sizes."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    arms: ClassVar[tuple[Arm, ...]]
    quick_arms: ClassVar[tuple[str, ...] | None] = None  # with --quick; None: all
    differs: ClassVar[frozenset[str]]  # the engine's keys in which the arms' configs differ
    rounds: ClassVar[int] = 2
    notes: ClassVar[tuple[str, ...]] = ()  # what a reader of the figures must know

    @classmethod
    @abstractmethod
    def quick(cls) -> Experiment:
        """The same with tiny sizes: to see that it works."""

    @abstractmethod
    async def measure(self, session: Session, record: Record) -> None:
        """Loads one arm's server once and records what it saw. Raises CaseError or httpx.HTTPError."""

    @abstractmethod
    def conclude(self, record: Record) -> None:
        """Adds the checks, and series over all arms, once every round is done."""

    async def warm_up(self, session: Session) -> None:
        """A few tokens, so that the first sample isn't a server's first request. Raises CaseError."""
        prompts = [session.prompts.take(length) for length in _WARM_UP_PROMPTS]
        require(await asyncio.gather(*(session.client.complete(prompt, 4) for prompt in prompts)))

    def sizes(self) -> dict[str, Any]:
        """The load's sizes, for the result."""
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}


def require(results: Sequence[RequestResult], max_tokens: Sequence[int] | None = None) -> None:
    """Raises CaseError unless all requests succeeded, with all their tokens where max_tokens says how many."""
    wanted: Sequence[int | None] = max_tokens if max_tokens is not None else [None] * len(results)
    errors = [
        result.error or f"{result.completion_tokens} tokens instead of {count}"
        for result, count in zip(results, wanted, strict=True)
        if not result.ok or (count is not None and result.completion_tokens != count)
    ]
    if errors:
        raise CaseError(f"{len(errors)} of {len(results)} requests went wrong, the first: {errors[0]}")
