"""A streaming client for any server with OpenAI's API, as close to the wire as measuring needs.

Closed loop: each of N clients sends its next request when its last one has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from loadtest.stream import RequestResult, SSEParser, StreamError, check_complete, take_event

Prompt = str | Sequence[int]


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
                        check_complete(result)
                        return
                    take_event(result, data, now)
                if hang_up_after is not None and len(result.content_times) >= hang_up_after:
                    result.hung_up = True
                    return
        raise StreamError("the stream ended without [DONE]")


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


async def closed_loop(
    client: Client,
    prompts: Iterable[Prompt],
    max_tokens: int | Sequence[int],
    clients: int,
    *,
    stagger_s: float = 0.0,
) -> LoopResult:
    """Serves all prompts with `clients` clients at once, each with one request open at any time.

    max_tokens: of every request, or of each in turn. Client k starts k * stagger_s late. Which client gets which
    request depends on who is free first.
    """
    listed = list(prompts)
    counts = [max_tokens] * len(listed) if isinstance(max_tokens, int) else max_tokens
    pending = deque(enumerate(zip(listed, counts, strict=True)))
    results: dict[int, RequestResult] = {}

    async def run(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while pending:
            index, (prompt, count) = pending.popleft()
            results[index] = await client.complete(prompt, count)

    started = time.perf_counter()
    await asyncio.gather(*(run(index * stagger_s) for index in range(clients)))
    return LoopResult([results[index] for index in sorted(results)], started)
