"""What a streamed completion looks like on the wire, and what its client notes of it.

Times are taken when bytes arrive, before they are parsed. Tokens are counted by the server's own usage, never by
counting events: an event may carry several tokens, and some tokens have no text of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from loadtest.stats import gaps

# What a model generates, in a chat's delta; a role is not of it.
GENERATED = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. Times are seconds of `time.perf_counter()`."""

    started: float  # just before it was sent
    status: int | None = None  # of the HTTP response, None if there was none
    content_times: list[float] = field(default_factory=list)  # arrival of each event that carries text
    texts: list[str] = field(default_factory=list)  # what each of these events says; empty for a tool call
    ended: float | None = None
    prompt_tokens: int | None = None  # these three by the server's usage
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    retries: int = 0  # connections that failed before anything came back, and were tried again
    hung_up: bool = False  # this client left on purpose
    error: str | None = None  # why it failed

    @property
    def ok(self) -> bool:
        """Whether the whole answer came, its usage included. Neither failures nor hang-ups count."""
        return self.error is None and not self.hung_up

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first text; headers and role chunks don't count."""
        return self.content_times[0] - self.started if self.content_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between neighbouring events that carry text."""
        return gaps(self.content_times)


class SSEParser:
    """Splits a byte stream into the data of its events. Lines may end in LF or CRLF and arrive in any pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that this chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class StreamError(Exception):
    """The stream broke its protocol or carried an error."""


def take_event(result: RequestResult, data: bytes, now: float) -> None:
    """Adds what one event says to the result; now: when its bytes came. Raises StreamError."""
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamError(f"an event is not JSON: {data[:200]!r}") from None
    if not isinstance(event, dict):
        raise StreamError(f"an event is not an object: {data[:200]!r}")
    if event.get("error"):
        raise StreamError(f"an error in the stream: {json.dumps(event['error'])[:300]}")
    try:
        _take(result, event, now)
    except (AttributeError, TypeError, ValueError) as error:
        raise StreamError(f"an event is not of OpenAI's form ({error}): {data[:200]!r}") from None


def _take(result: RequestResult, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in GENERATED):
            text = choice.get("text") or delta.get("content") or ""
            result.content_times.append(now)
            result.texts.append(text if isinstance(text, str) else "")
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    usage = event.get("usage")
    if usage:
        result.prompt_tokens = _count(usage, "prompt_tokens")
        result.completion_tokens = _count(usage, "completion_tokens")
        result.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{name} is {value!r}")
    return value


def check_complete(result: RequestResult) -> None:
    """Raises StreamError unless a stream that said [DONE] has told everything before."""
    if result.finish_reason is None:
        raise StreamError("the stream ended without a finish_reason")
    if result.completion_tokens is None:
        raise StreamError("the stream ended without usage, so its tokens can't be counted")
