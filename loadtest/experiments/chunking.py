"""How large a step may be, against the streams that wait for it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import ClassVar

from loadtest.experiments.base import Arm, Experiment, Record, Series, Session, require
from loadtest.experiments.load import until
from loadtest.serve_cases import CaseError, split_gaps
from loadtest.stats import median, percentile
from loadtest.stream import RequestResult

_HEAD_START = 8  # events of each stream before the long prompt is sent
_FOREVER = 4096  # more tokens than a stream will ever get before its client hangs up
_WAIT_S = 120.0
_ALONE, _AMONG = "TTFT of the long prompt alone", "TTFT of the long prompt among streams"
_BEFORE, _DURING = "ITL of the streams before", "ITL of the streams meanwhile"
_WHOLE = (64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Chunking(Experiment):
    """A long prompt arrives at streams that are decoding."""

    streams: int = 4
    stream_prompt_tokens: int = 32
    long_prompt_tokens: int = 1800
    trials: int = 2  # in each round

    name: ClassVar[str] = "chunking"
    title: ClassVar[str] = "Chunk size: the long prompt against the streams"
    question: ClassVar[str] = (
        "What does a smaller step cost the prompt that is cut into chunks, and what does it give the others?"
    )
    arms: ClassVar[tuple[Arm, ...]] = (
        *(Arm(str(size), f"chunking-{size}") for size in _WHOLE),
        Arm("512, shrinking", "chunking-512-shrinking"),
        Arm("1024, shrinking", "chunking-1024-shrinking"),
    )
    quick_arms: ClassVar[tuple[str, ...] | None] = ("64", "512")
    differs: ClassVar[frozenset[str]] = frozenset({"max_num_batched_tokens", "chunk_halving_context"})
    rounds: ClassVar[int] = 1
    notes: ClassVar[tuple[str, ...]] = (
        "The number is max_num_batched_tokens: a chunk and the streams' tokens together. Chunks are whole "
        "(chunk_halving_context null), except in the arms that say shrinking (auto).",
    )

    @classmethod
    def quick(cls) -> Chunking:
        """See Experiment."""
        return cls(streams=2, long_prompt_tokens=700, trials=1)

    async def measure(self, session: Session, record: Record) -> None:
        """Trials of a long prompt alone, and then among streams."""
        for _ in range(self.trials):
            steps = await session.metric("engine_steps_total")
            alone = await session.client.complete(session.prompts.take(self.long_prompt_tokens), 1)
            require([alone], [1])
            steps = await session.metric("engine_steps_total") - steps
            among, before, during = await self._among_streams(session)
            arm = session.arm
            add = record.add
            add("steps of the long prompt", "", arm, [steps], better="lower", digits=0)
            add(_ALONE, "ms", arm, [1000 * _ttft(alone)], better="lower", digits=0)
            add(_AMONG, "ms", arm, [1000 * _ttft(among)], better="lower", digits=0)
            add(_BEFORE, "ms", arm, [1000 * gap for gap in before], better="lower", digits=0)
            add(_DURING, "ms", arm, [1000 * gap for gap in during], better="lower", digits=0,
                figures=("median", "max"))  # fmt: skip

    async def _among_streams(self, session: Session) -> tuple[RequestResult, list[float], list[float]]:
        """The long prompt's result, and the streams' gaps before and during it, in seconds."""
        watched: list[RequestResult] = []
        streams = [
            asyncio.create_task(
                session.client.complete(
                    session.prompts.take(self.stream_prompt_tokens), _FOREVER, on_start=watched.append
                )
            )
            for _ in range(self.streams)
        ]

        def decoding(events: int) -> bool:
            if any(task.done() for task in streams):
                raise CaseError(f"a stream ended early: {[result.error for result in watched]}")
            return len(watched) == self.streams and all(len(result.content_times) >= events for result in watched)

        try:
            await until(lambda: decoding(_HEAD_START), "the streams' first tokens", _WAIT_S)
            among = await session.client.complete(session.prompts.take(self.long_prompt_tokens), 1)
            require([among], [1])
            end = among.started + _ttft(among)
            # A gap counts once it is over, so each stream needs one token more.
            await until(
                lambda: decoding(1) and all(r.content_times[-1] >= end for r in watched), "more tokens", _WAIT_S
            )
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        before, during = split_gaps(watched, among.started, end)
        await session.idle()
        return among, before, during

    def conclude(self, record: Record) -> None:
        """Smaller steps must cut the prompt into more of them; how that feels is left to the figures."""
        whole = [(size, found) for size in _WHOLE if (found := record.samples("steps of the long prompt", str(size)))]
        steps = [median(found) for _, found in whole]
        record.check(
            "smaller steps are more steps",
            len(steps) > 1 and all(a > b for a, b in itertools.pairwise(steps)),
            ", ".join(f"{size}: {count:.0f}" for (size, _), count in zip(whole, steps, strict=True)) or "not measured",
        )
        sizes = [float(size) for size, _ in whole]
        for metric, q in ((_AMONG, 50), (_DURING, 50), (_DURING, 100)):
            # A run that failed half-way has the one metric and not the other.
            points = [(size, percentile(found, q)) for size in sizes
                      if (found := record.samples(metric, f"{size:.0f}"))]  # fmt: skip
            name = metric if q == 50 else f"largest {metric}"
            x, y = [size for size, _ in points], [time for _, time in points]
            record.series.append(Series(name, x, y, "max_num_batched_tokens", "ms"))


def _ttft(result: RequestResult) -> float:
    if result.ttft is None:
        raise CaseError("the long prompt's only token had no text, so there is no time to it")
    return result.ttft
