"""What each engine of the GPU comparison is asked to do, step by step: the same loop and the same clock for all.

An arm is a `Stepper`, a few lines around an engine. Prompts are made here from a seed, so that all arms get the same
ones without their passing through a pipe. Imports nothing of any engine.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from loadtest.stats import gaps
from loadtest.worker_protocol import Handler

_FIRST_ID = 10  # those below are often special


class Stepper(Protocol):
    """An engine that is moved by its caller. All requests go on past end-of-sequence tokens."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int, temperature: float) -> None:
        """Queues a request; temperature 0 is greedy."""

    def step(self) -> list[tuple[str, int]]:
        """One step: the requests of which tokens became known to the host, and how many of each."""

    def busy(self) -> bool:
        """Whether a step has anything to do."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests, known to be unfinished."""

    def settle(self) -> None:
        """Gives back what memory the last requests left behind. Called when idle, or when it failed to come to rest."""

    def counters(self) -> dict[str, int]:
        """Of the paths that steps took, for the result; they only grow."""


def random_prompts(seed: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Prompts of random token ids, the same for the same arguments wherever they are made."""
    source = random.Random(seed)
    span = min(vocab_size, 1 << 16) - _FIRST_ID
    return [[_FIRST_ID + value % span for value in array("H", source.randbytes(2 * n))] for n in lengths]


class StepLoop:
    """Runs a Stepper's cases. A case that failed half-way is ended by `end`."""

    def __init__(self, stepper: Stepper, vocab_size: int) -> None:
        self._stepper = stepper
        self._vocab_size = vocab_size
        self._count = 0
        self._open: dict[str, int] = {}  # unfinished requests, and the tokens that they still get
        self._batch = 0  # sequences of decode_begin
        # As servers do: no collection looks through what the start has made.
        gc.collect()
        gc.freeze()

    def handlers(self) -> dict[str, Handler]:
        """What a worker answers, beside `build`."""
        return {
            "decode_begin": self.decode_begin,
            "decode_round": self.decode_round,
            "end": self.end,
            "prefill": self.prefill,
            "arrivals": self.arrivals,
        }

    def decode_begin(self, batch: int, context: int, max_tokens: int, seed: int) -> dict[str, Any]:
        """Prefills `batch` greedy sequences and steps until each has a token; they stay for `decode_round`.

        Raises RuntimeError for a step that gives a sequence several tokens, as decode_round does.
        """
        self._batch = batch
        prompts = random_prompts(seed, [context] * batch, self._vocab_size)
        start = time.perf_counter()
        waiting = {self._add(prompt, max_tokens) for prompt in prompts}
        while waiting:
            waiting -= {request_id for request_id, _ in self._decode_step()}
        return {"prefill_tokens_per_s": batch * context / (time.perf_counter() - start)}

    def decode_round(self, steps: int, skip: int) -> dict[str, Any]:
        """The time of `steps` steps in which every sequence gets one token, after `skip` such steps not counted.

        step_ms is the mean, gaps_ms each step's. Between rounds the sequences wait, so arms can take turns. Raises
        RuntimeError where sequences end before the round is over, or a step gives one several tokens.
        """
        before = self._stepper.counters()
        moments: list[float] = []
        while len(moments) <= steps + skip:
            if ended := self._batch - len(self._open):
                raise RuntimeError(f"{ended} of {self._batch} sequences ended before the round was over")
            if len(self._decode_step()) == self._batch:
                moments.append(time.perf_counter())
        taken = [1e3 * gap for gap in gaps(moments[skip:])]
        return {"step_ms": sum(taken) / len(taken), "gaps_ms": taken, "counters": self._counted(before)}

    def end(self) -> None:
        """Ends all requests and lets the engine come to rest; even if it can't, it gives back what they left behind."""
        try:
            self._come_to_rest()
        finally:
            self._stepper.settle()

    def prefill(self, batch: int, context: int, seed: int) -> dict[str, Any]:
        """`batch` prompts handed over together, one token out of each."""
        prompts = random_prompts(seed, [context] * batch, self._vocab_size)
        before = self._stepper.counters()
        start = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, 1)
        while self._open:
            self._step()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens_per_s": batch * context / seconds, "counters": self._counted(before)}

    def arrivals(
        self, requests: list[tuple[float, int, int]], temperature: float, seed: int, limit_s: float
    ) -> dict[str, Any]:
        """Serves requests (arrival in seconds, prompt tokens, output tokens; by arrival) as they come, in real time.

        TTFT counts from the arrival, also where a step that was under way kept the request from being taken in.
        After limit_s what is left is ended and counted as unfinished. Tokens that became known together have gaps of 0.
        """
        prompts = random_prompts(seed, [length for _, length, _ in requests], self._vocab_size)
        before = self._stepper.counters()
        times: list[list[float]] = [[] for _ in requests]
        place: dict[str, int] = {}
        start = time.perf_counter()
        now = 0.0
        while len(place) < len(requests) or self._open:
            now = time.perf_counter() - start
            if now > limit_s:
                break
            while len(place) < len(requests) and requests[len(place)][0] <= now:
                index = len(place)
                place[self._add(prompts[index], requests[index][2], temperature)] = index
            if not self._open:
                time.sleep(max(0.0, requests[len(place)][0] - now))
                continue
            found = self._step()
            now = time.perf_counter() - start
            for request_id, count in found:
                times[place[request_id]] += [now] * count
        unfinished = len(self._open) + len(requests) - len(place)
        # Without settling: what a warm-up turn has allocated is there for the next one.
        self._come_to_rest()
        tokens = sum(len(found) for found in times)
        return {
            "seconds": now,
            "output_tokens": tokens,
            "output_tokens_per_s": tokens / now,
            "ttft_s": [found[0] - request[0] for found, request in zip(times, requests, strict=True) if found],
            "itl_s": [gap for found in times for gap in gaps(found)],
            "unfinished": unfinished,
            "counters": self._counted(before),
        }

    def _add(self, prompt: list[int], max_tokens: int, temperature: float = 0.0) -> str:
        self._count += 1
        request_id = f"bench-{self._count}"
        self._stepper.add(request_id, prompt, max_tokens, temperature)
        self._open[request_id] = max_tokens
        return request_id

    def _come_to_rest(self) -> None:
        ended, self._open = list(self._open), {}
        if ended:
            self._stepper.abort(ended)
        while self._stepper.busy():
            self._stepper.step()

    def _decode_step(self) -> list[tuple[str, int]]:
        """A step that gives no sequence more than a token. Raises RuntimeError, as _step does, where one gets more."""
        found = self._step()
        most = max((count for _, count in found), default=0)
        if most > 1:
            raise RuntimeError(
                f"a step gave a sequence {most} tokens, which decode cases don't measure: run them without a drafter; "
                "what drafts are worth is for `make bench-drafts`"
            )
        return found

    def _step(self) -> list[tuple[str, int]]:
        """A step, with the finished requests taken out. Raises RuntimeError where the engine stops too soon."""
        if not self._stepper.busy():
            raise RuntimeError(f"the engine is idle, but {len(self._open)} requests have not got all their tokens")
        found = [(request_id, count) for request_id, count in self._stepper.step() if count]
        for request_id, count in found:
            if request_id not in self._open:
                raise RuntimeError(f"a token of the request {request_id}, which has got all its tokens")
            self._open[request_id] -= count
            if self._open[request_id] <= 0:
                del self._open[request_id]
        return found

    def _counted(self, before: dict[str, int]) -> dict[str, int]:
        after = self._stepper.counters()
        return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
