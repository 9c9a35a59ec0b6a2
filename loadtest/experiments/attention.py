"""Pages copied into dense tensors before attention, against pages read where they lie."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from loadtest.experiments.base import Arm, Experiment, Record, Series, Session, require
from loadtest.serve_cases import CaseError
from loadtest.stats import gaps, median
from loadtest.stream import RequestResult

GATHERED_PATH = "gather_sdpa"
_PREFILL_PATHS = ("chunk_sdpa", "chunk_tiled")
_METRIC = "time between tokens"


@dataclass(frozen=True, slots=True)
class Attention(Experiment):
    """Decoding after contexts of several lengths, alone and in a batch."""

    contexts: tuple[int, ...] = (128, 512, 2048)  # tokens; shorter ones are beginnings of the longest
    batches: tuple[int, ...] = (1, 4, 8)  # sequences at once
    most_tokens: int = 8192  # of a batch's contexts together: reading them takes far longer than what is timed
    output_tokens: int = 32

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "Gathered pages against pages read in place"
    question: ClassVar[str] = "What does a decode step pay for copying the pages of each context into one tensor?"
    arms: ClassVar[tuple[Arm, ...]] = (Arm("in place", "attention-in-place"), Arm("gathered", "attention-gathered"))
    differs: ClassVar[frozenset[str]] = frozenset({"attention_backend_options"})
    notes: ClassVar[tuple[str, ...]] = (
        "Each sequence has a prompt of its own, so no two of a batch read the same pages.",
        "The option moves prefill to another path too, so prefill isn't timed: prompts are cached beforehand.",
        "Times are between the moment when all sequences of a batch have a token and the moment when the first ends.",
    )

    @classmethod
    def quick(cls) -> Attention:
        """See Experiment."""
        return cls(contexts=(128, 512), batches=(1, 4), output_tokens=12)

    def cases(self) -> list[tuple[int, int]]:
        """Contexts and batches that are measured, in order."""
        return [(c, b) for c in self.contexts for b in self.batches if c * b <= self.most_tokens]

    async def measure(self, session: Session, record: Record) -> None:
        """Every context at every batch size. All prompts are cached beforehand, so that a batch decodes together."""
        longest = [
            max(context for context, batch in self.cases() if batch > index) for index in range(max(self.batches))
        ]
        prompts = [session.prompts.take(length) for length in longest]
        before = await session.dispatch()
        require(await asyncio.gather(*(session.client.complete(prompt, 1) for prompt in prompts)))
        for context, batch in self.cases():
            # New last tokens, so that a prompt is never wholly cached and its context is what it says.
            asked = [prompt[: context - 1] + session.prompts.words(1) for prompt in prompts[:batch]]
            results = await asyncio.gather(*(session.client.complete(prompt, self.output_tokens) for prompt in asked))
            require(results, [self.output_tokens] * batch)
            times = [1000 * gap for gap in decode_gaps(results)]
            record.add(_METRIC, "ms", session.arm, times, better="lower", case=_case(context, batch),
                       figures=("median", "p99"))  # fmt: skip
        for path, count in (await session.dispatch()).items():
            record.count(session.arm, f"attention_dispatch {path}", count - before.get(path, 0))

    def conclude(self, record: Record) -> None:
        """The arms must have taken different paths: each decode path in one arm only."""
        decode = {arm.name: _decode_paths(record, arm.name) for arm in self.arms}
        in_place, gathered = decode.values()
        record.check(
            "the arms decode on different paths",
            gathered == {GATHERED_PATH} and bool(in_place) and GATHERED_PATH not in in_place,
            "; ".join(f"{arm}: {', '.join(sorted(paths)) or 'none'}" for arm, paths in decode.items()),
        )
        for arm in self.arms:
            for batch in self.batches:
                points = sorted(
                    (context, median(samples))
                    for context in self.contexts
                    if (samples := record.samples(_METRIC, arm.name, _case(context, batch)))
                )
                x, y = [context for context, _ in points], [time for _, time in points]
                record.series.append(
                    Series(f"{arm.name}, {batch} sequences", x, y, "context, tokens", f"{_METRIC}, ms")
                )


def _case(context: int, batch: int) -> str:
    return f"{batch} x {context} tokens"


def _decode_paths(record: Record, arm: str) -> set[str]:
    counters = record.counters.get(arm, {})
    used = {name.removeprefix("attention_dispatch ") for name, count in counters.items() if count > 0}
    return used - set(_PREFILL_PATHS)


def decode_gaps(results: Sequence[RequestResult]) -> list[float]:
    """Seconds between a sequence's tokens while all of them decode. Raises CaseError when there is no such moment."""
    if any(not result.content_times for result in results):
        raise CaseError("a sequence had no text at all, so its tokens can't be timed")
    start = max(result.content_times[0] for result in results)
    end = min(result.content_times[-1] for result in results)
    found = [
        gap for result in results for gap in gaps([moment for moment in result.content_times if start <= moment <= end])
    ]
    if not found:
        raise CaseError("the sequences never decoded all at once: ask for more output tokens")
    return found
