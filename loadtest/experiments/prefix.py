"""Prefix caching at block boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadtest.experiments.base import Arm, Experiment, Record, Series, Session, require
from loadtest.serve_cases import CaseError
from loadtest.stats import median
from loadtest.stream import RequestResult

_OUTPUT_TOKENS = 4
_CACHED = "cached tokens"
_COLD, _AGAIN = "TTFT, prefix never seen", "TTFT, prefix seen"


@dataclass(frozen=True, slots=True)
class Prefix(Experiment):
    """Two requests one after the other whose prompts share their first L tokens, for L around multiples of a block."""

    shared: tuple[int, ...] = (15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, 1024)  # tokens
    whole: tuple[int, ...] = (16, 32, 48, 256)  # prompts asked twice as they are: their last token is never cached
    suffix_tokens: int = 20
    timed: tuple[int, ...] = (256, 1024)  # those of `shared` whose TTFT is kept: shorter ones save less than the noise

    name: ClassVar[str] = "prefix"
    title: ClassVar[str] = "Prefix caching at block boundaries"
    question: ClassVar[str] = "How much of a prompt seen before is found again, and what does it save?"
    arms: ClassVar[tuple[Arm, ...]] = (
        Arm("blocks of 16", "prefix-block-16"),
        Arm("blocks of 32", "prefix-block-32"),
        Arm("no cache", "prefix-none"),
    )
    differs: ClassVar[frozenset[str]] = frozenset({"block_size", "num_blocks", "prefix_cache"})
    block_sizes: ClassVar[tuple[int | None, ...]] = (16, 32, None)  # of the arms; None: nothing is cached
    notes: ClassVar[tuple[str, ...]] = (
        "Both block sizes have the same number of KV slots, so num_blocks differs too.",
        "expected: floor(min(L, n - 1) / block_size) * block_size of a prompt of n tokens that shares L.",
    )

    @classmethod
    def quick(cls) -> Prefix:
        """See Experiment."""
        return cls(shared=(15, 16, 17, 32, 33, 256), whole=(16, 32), timed=(256,))

    async def measure(self, session: Session, record: Record) -> None:
        """A pair of requests for each length, one at a time."""
        for length in self.shared:
            prefix = session.prompts.take(length)
            # The two ends must not begin alike, or one more token would be shared.
            first, second = session.prompts.take(self.suffix_tokens), session.prompts.take(self.suffix_tokens)
            await self._pair(session, record, length, prefix + first, prefix + second)
        for length in self.whole:
            prompt = session.prompts.take(length)
            await self._pair(session, record, length, prompt, prompt)

    async def _pair(self, session: Session, record: Record, length: int, first: list[int], second: list[int]) -> None:
        cold = await session.client.complete(first, _OUTPUT_TOKENS)
        again = await session.client.complete(second, _OUTPUT_TOKENS)
        require([cold, again], [_OUTPUT_TOKENS] * 2)
        if cold.cached_tokens:
            raise CaseError(f"{cold.cached_tokens} tokens of a new prefix were cached already")
        case, arm = _case(length, len(second)), session.arm
        record.add(_CACHED, "tokens", arm, [again.cached_tokens or 0], better="higher", case=case, digits=0)
        if length in self.timed and len(second) > length:
            record.add(_COLD, "ms", arm, [_ttft(cold)], better="lower", case=case, digits=0)
            record.add(_AGAIN, "ms", arm, [_ttft(again)], better="lower", case=case, digits=0)

    def conclude(self, record: Record) -> None:
        """Every count of cached tokens is exactly the expected one, in every round."""
        lengths = [(length, length + self.suffix_tokens) for length in self.shared]
        lengths += [(length, length) for length in self.whole]
        for arm, block_size in zip(self.arms, self.block_sizes, strict=True):
            wrong, count = [], 0
            for shared, prompt in lengths:
                samples = record.samples(_CACHED, arm.name, _case(shared, prompt))
                count += len(samples)
                expected = expected_cached(shared, prompt, block_size)
                if not samples or set(samples) != {expected}:
                    got = ", ".join(f"{sample:.0f}" for sample in samples) or "nothing measured"
                    wrong.append(f"{_case(shared, prompt)}: {got}, expected {expected}")
            record.check(f"cached tokens, {arm.name}", not wrong, "; ".join(wrong) or f"{count} of {count} as expected")
            points = []
            for length in sorted(self.shared):
                samples = record.samples(_CACHED, arm.name, _case(length, length + self.suffix_tokens))
                points += [(length, median(samples))] if samples else []
            x, y = [length for length, _ in points], [tokens for _, tokens in points]
            record.series.append(Series(f"cached tokens, {arm.name}", x, y, "shared tokens", "cached tokens"))


def expected_cached(shared: int, prompt: int, block_size: int | None) -> int:
    """Tokens that a prefix cache of whole blocks gives to a prompt that shares so many: never its last token."""
    return 0 if block_size is None else min(shared, prompt - 1) // block_size * block_size


def _case(shared: int, prompt: int) -> str:
    return f"{shared} of {prompt} tokens shared"


def _ttft(result: RequestResult) -> float:
    if result.ttft is None:
        raise CaseError("no text came, so there is no time to it")
    return 1000 * result.ttft
