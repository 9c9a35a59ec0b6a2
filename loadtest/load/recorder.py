"""Raw samples of requests, and the figures of a stretch of time made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.load.sweep import Level
from loadtest.stats import gaps, ratio, summary
from loadtest.stream import RequestResult


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that has ended. Times are seconds since the epoch, so that processes' samples can be joined."""

    tag: str
    started: float
    ended: float
    content: tuple[float, ...]  # seconds from start to each event with text
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    retries: int
    error: str | None
    unfinished: bool  # it was stopped by us: neither a success nor a failure

    @classmethod
    def of(cls, tag: str, result: RequestResult, clock_offset: float) -> Sample:
        """clock_offset: what to add to `time.perf_counter()` to get the time since the epoch."""
        ended = result.started if result.ended is None else result.ended
        return cls(
            tag,
            result.started + clock_offset,
            ended + clock_offset,
            tuple(time - result.started for time in result.content_times),
            result.prompt_tokens,
            result.completion_tokens,
            result.cached_tokens,
            result.retries,
            result.error,
            result.hung_up,
        )

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None and not self.unfinished

    @property
    def ttft(self) -> float | None:
        """Seconds from start to the first text."""
        return self.content[0] if self.content else None

    def to_json(self) -> dict[str, Any]:
        """For another process; `from_json` takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sample:
        """What `to_json` gave."""
        return cls(**{**fields, "content": tuple(fields["content"])})


class Recorder:
    """Keeps all samples of a run."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._sent = 0

    def add(self, samples: Iterable[Sample]) -> None:
        """Appends samples, in any order of time."""
        self.samples.extend(samples)

    def take_unsent(self) -> list[Sample]:
        """Those that this was not yet asked for."""
        unsent = self.samples[self._sent :]
        self._sent = len(self.samples)
        return unsent

    def finished_since(self, moment: float) -> list[float]:
        """When the requests ended that began at a moment or later, ascending; unfinished ones don't count."""
        return sorted(s.ended for s in self.samples if s.started >= moment and not s.unfinished)

    def tokens_between(self, start: float, end: float) -> float:
        """Output tokens that came in a stretch of time; see `level_figures`."""
        return _tokens_between(self.samples, start, end)


def level_figures(level: Level, samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures of one level, from requests that began in it.

    A request counts where it ended: with its TTFT, E2E time and tokens per second if that was within the measured
    time. Throughput counts the tokens that came within that time, of all requests: a request's tokens are spread
    over its events with text. So requests that cross an edge count with their part. One that never ended has no
    usage: an event of it counts as many tokens as one did on average elsewhere.
    """
    start = level.measured_from if level.measured_from is not None else level.entered
    end = level.ended if level.ended is not None else start
    mine = [s for s in samples if level.entered <= s.started < end and s.ended > start]
    ended = [s for s in mine if s.ended <= end and not s.unfinished]
    good = [s for s in ended if s.ok]
    seconds = max(0.0, end - start)
    tokens = _tokens_between(samples, start, end)
    return {
        "level": int(level.value) if float(level.value).is_integer() else level.value,
        "unit": level.unit,
        "started": start,
        "duration_s": seconds,
        "complete": level.complete,
        "requests": len(ended),
        "failures": sum(s.error is not None for s in ended),
        "unfinished": len(mine) - len(ended),
        "retries": sum(s.retries for s in mine),
        "output_tokens": tokens,
        "output_tokens_per_second": ratio(tokens, seconds),
        "requests_per_second": ratio(len(good), seconds),
        **latencies(good),
        "prompt_tokens": _whole(s.prompt_tokens for s in good),
        "completion_tokens": _whole(s.completion_tokens for s in good),
        "cached_tokens": _whole(s.cached_tokens for s in good),
        "by_tag": {tag: latencies([s for s in good if s.tag == tag]) for tag in sorted({s.tag for s in good})},
    }


def latencies(good: Sequence[Sample]) -> dict[str, Any]:
    """TTFT, ITL and E2E time of successes, in seconds."""
    return {
        "ttft_s": summary([s.ttft for s in good if s.ttft is not None]),
        "itl_s": summary([gap for s in good for gap in gaps(s.content)]),
        "e2e_s": summary([s.ended - s.started for s in good]),
    }


def errors(samples: Iterable[Sample]) -> dict[str, int]:
    """How often each failure occurred."""
    return dict(Counter(s.error for s in samples if s.error is not None))


def without_samples(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same figures, and those within them, without raw samples."""
    return {
        name: without_samples(value) if isinstance(value, Mapping) else value
        for name, value in figures.items()
        if name != "samples"
    }


def tokens_per_event(samples: Sequence[Sample]) -> float:
    """Output tokens by usage for each event with text; 1 where nothing is known."""
    known = [s for s in samples if s.completion_tokens and s.content]
    events = sum(len(s.content) for s in known)
    return sum(s.completion_tokens or 0 for s in known) / events if events else 1.0


def _tokens_between(samples: Sequence[Sample], start: float, end: float) -> float:
    average = tokens_per_event(samples)
    total = 0.0
    for s in samples:
        if s.ended < start or s.started > end:
            continue
        inside = sum(start < s.started + offset <= end for offset in s.content)
        own = s.completion_tokens / len(s.content) if s.completion_tokens and s.content else average
        total += inside * own
    return total


def _whole(numbers: Iterable[int | None]) -> dict[str, Any]:
    return summary([number for number in numbers if number is not None])
