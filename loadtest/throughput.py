"""Rates of one batch run, from the time at which each token became known to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchRun:
    """What a worker measured. Times are seconds since just before the first sequence was handed over."""

    prompt_lengths: Sequence[int]  # tokens
    tokens: Sequence[Sequence[int]]  # output, by sequence
    times: Sequence[Sequence[float]]  # when each of them was known, ascending

    @classmethod
    def from_reply(cls, prompts: Sequence[Sequence[int]], reply: dict[str, Any]) -> BatchRun:
        """Reads a worker's reply."""
        return cls([len(prompt) for prompt in prompts], reply["tokens"], reply["times"])

    def check(self, max_tokens: int) -> None:
        """Raises ValueError unless every sequence has exactly max_tokens tokens, each with its time."""
        counts = {len(tokens) for tokens in self.tokens} | {len(times) for times in self.times}
        if len(self.tokens) != len(self.prompt_lengths) or counts != {max_tokens}:
            raise ValueError(f"expected {max_tokens} tokens of {len(self.prompt_lengths)} sequences, got {counts}")

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(times[-1] for times in self.times)

    @property
    def num_output_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(times) for times in self.times)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens of all sequences per second until the last of them has its first output token.

        Where prompts take several steps, tokens decoded meanwhile are work that this rate does not count.
        """
        return sum(self.prompt_lengths) / max(times[0] for times in self.times)

    @property
    def decode_rate(self) -> float | None:
        """Output tokens per second while all sequences decode: from the moment the last of them has its first token
        until the first of them ends. None when there is no such moment.
        """
        start = max(times[0] for times in self.times)
        end = min(times[-1] for times in self.times)
        count = sum(start < moment <= end for times in self.times for moment in times)
        return count / (end - start) if end > start else None

    @property
    def end_to_end_rate(self) -> float:
        """Output tokens per second from hand-over to the last token."""
        return self.num_output_tokens / self.seconds


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far two systems' greedy outputs of the same prompts are the same, as shares from 0 to 1.

    `sequences`: identical ones. `tokens`: those before a sequence's first difference, which later ones follow from.
    """
    same = sum(list(x) == list(y) for x, y in zip(a, b, strict=True))
    common = 0
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x, y, strict=False):
            if left != right:
                break
            common += 1
    longest = sum(max(len(x), len(y)) for x, y in zip(a, b, strict=True))
    return {"sequences": same / len(a) if a else 1.0, "tokens": common / longest if longest else 1.0}
