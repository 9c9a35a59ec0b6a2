"""What `bench_serve` measures over HTTP: throughput, TTFT with a cached prefix, and gaps when a long prompt arrives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest import metrics_page
from loadtest.client import Client, closed_loop
from loadtest.prompts import PromptSource
from loadtest.stats import ratio, summary
from loadtest.stream import RequestResult

THROUGHPUT_TARGETS = {32: 0.85}  # clients to the least share of the in-process rate
PREFIX_TARGET = 0.15  # most share of the cold TTFT
GAP_TARGET = 1.5  # most chunk times
_SUFFIX_TOKENS = 20
_VICTIM_HEAD_START = 16  # tokens of each victim before the long prompt is sent


class CaseError(RuntimeError):
    """The measurement would not mean what it says."""


def _require(results: Sequence[RequestResult], max_tokens: int) -> None:
    """Raises CaseError unless all requests succeeded with all their tokens."""
    errors = [result.error or f"{result.completion_tokens} tokens" for result in results
              if not result.ok or result.completion_tokens != max_tokens]  # fmt: skip
    if errors:
        raise CaseError(f"{len(errors)} of {len(results)} requests went wrong, the first: {errors[0]}")


@dataclass(slots=True)
class Throughput:
    """Output tokens per second of the same load, over HTTP and in process, by round."""

    clients: int
    http: list[float] = field(default_factory=list)
    in_process: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)  # seconds, of all requests over HTTP
    itl: list[float] = field(default_factory=list)  # seconds between events with text, likewise
    dispatch: dict[str, int] = field(default_factory=dict)  # the in-process engine's calls by attention path

    def to_json(self) -> dict[str, Any]:
        """Raw samples, medians and ratios."""
        http, inside = summary(self.http), summary(self.in_process)
        return {
            "clients": self.clients,
            "http_tokens_per_second": http,
            "in_process_tokens_per_second": inside,
            "ratio_of_medians": ratio(http["median"], inside["median"]),
            "ratios_by_round": [a / b for a, b in zip(self.http, self.in_process, strict=False)],
            "target": THROUGHPUT_TARGETS.get(self.clients),
            "ttft_s": summary(self.ttft),
            "itl_s": summary(self.itl),
            "dispatch": self.dispatch,
        }


async def throughput_round(
    found: Throughput,
    client: Client,
    in_process: Callable[[list[list[int]], int, int], dict[str, Any]],
    prompts: list[list[int]],
    max_tokens: int,
) -> None:
    """One round: in process while the server idles, then over HTTP while the worker idles. Raises CaseError."""
    reply = await asyncio.to_thread(in_process, prompts, max_tokens, found.clients)
    if {len(tokens) for tokens in reply["tokens"]} != {max_tokens} or reply["cached_tokens"]:
        raise CaseError("the in-process engine did not give every token, or took some from its cache")
    rate = len(prompts) * max_tokens / max(times[-1] for times in reply["times"])
    loop = await closed_loop(client, prompts, max_tokens, found.clients)
    _require(loop.requests, max_tokens)
    if any(request.cached_tokens for request in loop.requests):
        raise CaseError("prompt tokens came from the prefix cache, though no two prompts begin alike")
    assert loop.rate is not None
    found.in_process.append(rate)
    found.http.append(loop.rate)
    for path, count in reply["dispatch"].items():
        found.dispatch[path] = found.dispatch.get(path, 0) + count
    for request in loop.requests:
        found.itl += request.inter_token_latencies
        if request.ttft is not None:
            found.ttft.append(request.ttft)


@dataclass(slots=True)
class PrefixTTFT:
    """TTFT in seconds of prompts that share a prefix: first seen, and seen before. One pair for each prefix."""

    prefix_tokens: int
    cold: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)  # by the server's usage, of the second requests

    def to_json(self) -> dict[str, Any]:
        """Raw samples, medians and ratios."""
        cold, cached = summary(self.cold), summary(self.cached)
        return {
            "prefix_tokens": self.prefix_tokens,
            "suffix_tokens": _SUFFIX_TOKENS,
            "cold_ttft_s": cold,
            "cached_ttft_s": cached,
            "cached_tokens": self.cached_tokens,
            "ratio_of_medians": ratio(cached["median"], cold["median"]),
            "ratios_by_prefix": [a / b for a, b in zip(self.cached, self.cold, strict=True)],
            "target": PREFIX_TARGET,
        }


async def prefix_pair(found: PrefixTTFT, client: Client, prompts: PromptSource) -> None:
    """Asks twice with one new prefix and two different ends, one after the other. Raises CaseError."""
    prefix = prompts.take(found.prefix_tokens)
    results = [await client.complete(prefix + prompts.words(_SUFFIX_TOKENS), 4) for _ in range(2)]
    _require(results, 4)
    cold, cached = results
    if cold.cached_tokens:
        raise CaseError(f"{cold.cached_tokens} tokens of a new prefix were cached already")
    if not cached.cached_tokens:
        raise CaseError("nothing of a prefix seen before came from the prefix cache")
    if cold.ttft is None or cached.ttft is None:
        raise CaseError("no text came, so there is no time to it")
    found.cold.append(cold.ttft)
    found.cached.append(cached.ttft)
    found.cached_tokens.append(cached.cached_tokens)


@dataclass(slots=True)
class Gaps:
    """What a long prompt does to the streams that are decoding when it arrives. Seconds."""

    streams: int
    prompt_tokens: int
    steps: list[int] = field(default_factory=list)  # of the engine, for such a prompt on an idle server
    alone: list[float] = field(default_factory=list)  # TTFT of such a prompt on an idle server
    before: list[float] = field(default_factory=list)  # the streams' gaps before it was sent
    during: list[list[float]] = field(default_factory=list)  # gaps between its sending and its first token, by trial

    @property
    def num_chunks(self) -> int:
        """Steps that the prompt takes."""
        return max(self.steps, default=0)

    def to_json(self) -> dict[str, Any]:
        """Raw samples, the chunk time, and the largest gap in chunk times."""
        alone = summary(self.alone)
        chunk = ratio(alone["median"], self.num_chunks or None)
        largest = max((gap for trial in self.during for gap in trial), default=None)
        return {
            "streams": self.streams,
            "prompt_tokens": self.prompt_tokens,
            "num_chunks": self.num_chunks,
            "alone_ttft_s": alone,
            "chunk_s": chunk,
            "gap_before_s": summary(self.before),
            "gap_during_s": summary([gap for trial in self.during for gap in trial]),
            "largest_gap_by_trial_s": [max(trial) for trial in self.during],
            "largest_gap_s": largest,
            "largest_gap_in_chunks": ratio(largest, chunk),
            "target": GAP_TARGET,
        }


async def gap_trial(found: Gaps, client: Client, prompts: PromptSource, stream_prompt_tokens: int) -> None:
    """Times one long prompt alone, then sends another into `streams` decoding streams. Raises CaseError."""
    steps = await _engine_steps(client)
    alone = await client.complete(prompts.take(found.prompt_tokens), 1)
    _require([alone], 1)
    found.steps.append(await _engine_steps(client) - steps)
    if alone.ttft is None:
        raise CaseError("the long prompt's only token had no text, so there is no time to it")
    found.alone.append(alone.ttft)
    # Long enough that all of them still decode when the long prompt has its first token.
    max_tokens = 2 * _VICTIM_HEAD_START + 3 * found.num_chunks + 32
    watched: list[RequestResult] = []
    streams = [
        asyncio.create_task(
            client.complete(prompts.take(stream_prompt_tokens), max_tokens, on_start=watched.append)
        )
        for _ in range(found.streams)
    ]  # fmt: skip
    try:
        while len(watched) < found.streams or any(len(result.content_times) < _VICTIM_HEAD_START for result in watched):
            if any(task.done() for task in streams):
                raise CaseError(f"a stream ended early: {watched[0].error}")
            await asyncio.sleep(0.005)
        intruder = await client.complete(prompts.take(found.prompt_tokens), 1)
        results = await asyncio.gather(*streams)
    finally:
        for task in streams:
            task.cancel()
    _require([intruder], 1)
    _require(results, max_tokens)
    if intruder.ttft is None:
        raise CaseError("the long prompt's only token had no text, so there is no time to it")
    before, during = split_gaps(results, intruder.started, intruder.started + intruder.ttft)
    found.before += before
    found.during.append(during)


async def _engine_steps(client: Client) -> int:
    count = metrics_page.value(await client.page("/metrics"), "quire:engine_steps_total")
    if count is None:
        raise CaseError("the server's /metrics page has no count of the engine's steps")
    return int(count)


def split_gaps(streams: Sequence[RequestResult], start: float, end: float) -> tuple[list[float], list[float]]:
    """The streams' gaps that were over by `start`, and those that overlap start to end. Seconds.

    Raises CaseError when a stream had its last text before `end`: it may have been over, and then saw no gap.
    """
    before: list[float] = []
    during: list[float] = []
    for stream in streams:
        times = stream.content_times
        if not times or times[-1] < end:
            raise CaseError("a stream ended before the long prompt had its first token: nothing to see")
        for earlier, later in itertools.pairwise(times):
            if later <= start:
                before.append(later - earlier)
            elif earlier < end:
                during.append(later - earlier)
    return before, during
