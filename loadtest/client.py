"""A streaming client for any server with OpenAI's API, as close to the wire as measuring needs.

Closed loop: each of N clients sends its next request when its last one has ended. Times are taken when bytes arrive,
before they are parsed. Tokens are counted by the server's own usage, never by counting events: an event may carry
several tokens, and some tokens have no text of their own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.stats import gaps

Prompt = str | Sequence[int]


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. Times are seconds of `time.perf_counter()`."""

    started: float  # just before it was sent
    status: int | None = None  # of the HTTP response, None if there was none
    content_times: list[float] = field(default_factory=list)  # arrival of each event that carries text
    ended: float | None = None
    prompt_tokens: int | None = None  # these three by the server's usage
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
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


class Client:
    """Sends streaming completions to one server. An async context manager, bound to its event loop."""

    def __init__(self, base_url: str, model: str, *, timeout_s: float = 600.0, max_connections: int = 256) -> None:
        """timeout_s bounds each wait for the server, and each request as a whole."""
        self._model = model
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        # The environment may name a proxy for everything else.
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        hang_up_after: int | None = None,
        on_start: Callable[[RequestResult], None] | None = None,
        **extra: Any,
    ) -> RequestResult:
        """One greedy streaming completion past end-of-sequence. Never raises for what the server does.

        hang_up_after: close the connection after so many events with text. on_start is given the result while it is
        still growing, for whoever wants to watch it. `extra` goes into the body as it is.
        """
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        content = json.dumps(body).encode()
        result = RequestResult(time.perf_counter())
        if on_start is not None:
            on_start(result)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(content, result, hang_up_after)
        except TimeoutError:
            result.error = f"not done after {self._timeout_s:.0f} s"
        except httpx.HTTPError as error:
            result.error = f"{type(error).__name__}: {error}"
        except StreamError as error:
            result.error = str(error)
        result.ended = time.perf_counter()
        return result

    async def page(self, path: str) -> str:
        """The text at a path. Raises httpx.HTTPError, for an answer other than 2xx too."""
        response = await self._http.get(path)
        return response.raise_for_status().text

    async def _stream(self, content: bytes, result: RequestResult, hang_up_after: int | None) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", "/v1/completions", content=content, headers=headers) as response:
            result.status = response.status_code
            if response.status_code != 200:
                text = (await response.aread())[:300].decode(errors="replace")
                raise StreamError(f"HTTP {response.status_code}: {text}")
            parser = SSEParser()
            async for chunk in response.aiter_raw():
                now = time.perf_counter()
                for data in parser.feed(chunk):
                    if data == b"[DONE]":
                        _check_complete(result)
                        return
                    _take_event(result, data, now)
                if hang_up_after is not None and len(result.content_times) >= hang_up_after:
                    result.hung_up = True
                    return
        raise StreamError("the stream ended without [DONE]")


def _take_event(result: RequestResult, data: bytes, now: float) -> None:
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamError(f"an event is not JSON: {data[:200]!r}") from None
    if not isinstance(event, dict):
        raise StreamError(f"an event is not an object: {data[:200]!r}")
    if event.get("error"):
        raise StreamError(f"an error in the stream: {json.dumps(event['error'])[:300]}")
    for choice in event.get("choices") or []:
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            result.content_times.append(now)
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    usage = event.get("usage")
    if usage:
        result.prompt_tokens = usage.get("prompt_tokens")
        result.completion_tokens = usage.get("completion_tokens")
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _check_complete(result: RequestResult) -> None:
    if result.finish_reason is None:
        raise StreamError("the stream ended without a finish_reason")
    if result.completion_tokens is None:
        raise StreamError("the stream ended without usage, so its tokens can't be counted")


@dataclass(frozen=True, slots=True)
class LoopResult:
    """A closed loop's requests, in the order of its prompts."""

    requests: Sequence[RequestResult]
    started: float  # seconds of `time.perf_counter()`

    @property
    def failures(self) -> list[str]:
        """What went wrong, one line for each request that failed."""
        return [request.error for request in self.requests if request.error is not None]

    @property
    def output_tokens(self) -> int:
        """Of the requests that succeeded."""
        return sum(request.completion_tokens or 0 for request in self.requests if request.ok)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last request."""
        return max((request.ended or self.started for request in self.requests), default=self.started) - self.started

    @property
    def rate(self) -> float | None:
        """Output tokens of the successes per second; None for no requests."""
        return self.output_tokens / self.seconds if self.requests else None


async def closed_loop(client: Client, prompts: Iterable[Prompt], max_tokens: int, clients: int) -> LoopResult:
    """Serves all prompts with `clients` clients at once, each with one request open at any time."""
    pending = deque(enumerate(prompts))
    results: dict[int, RequestResult] = {}

    async def run() -> None:
        while pending:
            index, prompt = pending.popleft()
            results[index] = await client.complete(prompt, max_tokens)

    started = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(clients)))
    return LoopResult([results[index] for index in sorted(results)], started)
