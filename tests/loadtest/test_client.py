"""The client measures what it says. Order is forced, not timed: the server waits for the test to have looked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.client import Client, closed_loop
from loadtest.stream import RequestResult, SSEParser
from tests.loadtest.responses import BROKEN, answer, error_event, stall
from tests.loadtest.sse_server import Exchange, Respond, SSEServer


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def _complete(respond: Respond, timeout_s: float = 60, **options: Any) -> RequestResult:
    async def run() -> RequestResult:
        async with SSEServer(respond) as server, Client(server.url, "m", timeout_s=timeout_s) as client:
            return await client.complete("hello", 4, **options)

    return asyncio.run(run())


def test_ttft_ends_at_the_first_text_and_not_at_headers_roles_or_empty_text() -> None:
    async def run() -> None:
        silent, first, second = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def respond(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await exchange.text("")
            silent.set()
            await first.wait()
            await exchange.text("a")
            await second.wait()
            await exchange.event({"choices": [{"index": 0, "delta": {"content": "b"}}]})
            await exchange.text("", "length")
            await exchange.usage(5, 9, 2)
            await exchange.event("[DONE]")
            await exchange.finish()

        watched: list[RequestResult] = []
        async with SSEServer(respond) as server, Client(server.url, "m", timeout_s=60) as client:
            before = time.perf_counter()
            task = asyncio.create_task(client.complete("hello", 4, on_start=watched.append))
            await silent.wait()
            await _until(lambda: watched[0].status == 200)
            await asyncio.sleep(0.02)
            assert watched[0].content_times == []
            first_sent = time.perf_counter()
            first.set()
            await _until(lambda: len(watched[0].content_times) == 1)
            second_sent = time.perf_counter()
            second.set()
            result = await task
            after = time.perf_counter()
        assert result is watched[0]
        assert result.ok
        assert result.ttft is not None
        assert before <= result.started
        assert first_sent <= result.started + result.ttft <= second_sent
        assert second_sent <= result.content_times[1] <= after
        assert result.inter_token_latencies == [result.content_times[1] - result.content_times[0]]
        # Tokens are the server's count, not the two events.
        assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (5, 9, 2)
        assert result.finish_reason == "length"

    asyncio.run(run())


def test_gaps_are_at_least_as_long_as_the_servers_pauses() -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(3):
            await asyncio.sleep(0.05)
            await exchange.text("x")
        await exchange.text("", "stop")
        await exchange.usage(1, 3, 0)
        await exchange.event("[DONE]")
        await exchange.finish()

    result = _complete(respond)
    assert result.ttft is not None
    assert result.ttft >= 0.045
    # A late first event shortens the next gap, so only their sum is certain.
    assert result.content_times[-1] - result.started >= 0.14
    assert len(result.inter_token_latencies) == 2


def test_the_request_asks_for_a_greedy_stream_with_usage() -> None:
    async def run() -> dict[str, Any]:
        async with SSEServer(answer) as server, Client(server.url, "m") as client:
            await client.complete((1, 2), 4, cache_salt="s")
            return server.requests[0]

    assert asyncio.run(run()) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "s",
    }


@pytest.mark.parametrize(("respond", "reason"), BROKEN)
def test_whatever_breaks_a_stream_is_a_failure(respond: Respond, reason: str) -> None:
    result = _complete(respond)
    assert not result.ok
    assert result.error is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(result.error)


def test_a_silent_server_is_a_failure_after_the_time_limit() -> None:
    result = _complete(stall, timeout_s=0.3)
    assert not result.ok
    assert result.error is not None


def test_a_server_that_is_not_there_is_a_failure() -> None:
    async def run() -> RequestResult:
        async with SSEServer(answer) as server:
            url = server.url
        async with Client(url, "m") as client:
            return await client.complete("x", 1)

    result = asyncio.run(run())
    assert result.status is None
    assert "ConnectError" in (result.error or "")


def test_hanging_up_closes_the_connection_and_counts_as_neither_success_nor_failure() -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def respond(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.text("x")
            await exchange.text("y")
            await exchange.gone()
            gone.set()

        async with SSEServer(respond) as server, Client(server.url, "m", timeout_s=60) as client:
            result = await client.complete("hello", 4, hang_up_after=2)
            async with asyncio.timeout(60):
                await gone.wait()
        assert result.hung_up
        assert result.error is None
        assert not result.ok

    asyncio.run(run())


def test_a_closed_loop_keeps_each_client_busy_with_one_request() -> None:
    async def run() -> None:
        async with SSEServer(answer) as server, Client(server.url, "m") as client:
            loop = await closed_loop(client, [[index] for index in range(20)], 3, clients=4)
            assert server.most_open <= 4
            assert sorted(request["prompt"] for request in server.requests) == [[index] for index in range(20)]
        assert len(loop.requests) == 20
        assert loop.failures == []
        assert loop.output_tokens == 60
        assert loop.rate == pytest.approx(60 / loop.seconds)

    asyncio.run(run())


def test_failures_in_a_closed_loop_are_listed_and_their_tokens_not_counted() -> None:
    async def respond(exchange: Exchange) -> None:
        await (answer if exchange.request["prompt"] == "good" else error_event)(exchange)

    async def run() -> None:
        async with SSEServer(respond) as server, Client(server.url, "m") as client:
            loop = await closed_loop(client, ["good", "bad", "good"], 3, clients=1)
        assert len(loop.failures) == 1
        assert loop.output_tokens == 6
        assert [request.ok for request in loop.requests] == [True, False, True]

    asyncio.run(run())


STREAM = (
    b'data: {"a": 1}\n\n: a comment\nevent: x\ndata:{"b": "\xc3\xa9"}\r\n\r\n'
    b"data: one\ndata: two\n\n\n\ndata: [DONE]\n\n"
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_are_the_same_however_the_bytes_arrive(cuts: list[int]) -> None:
    parser = SSEParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [event for a, b in itertools.pairwise(edges) for event in parser.feed(STREAM[a:b])]
    assert found == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"one\ntwo", b"[DONE]"]
