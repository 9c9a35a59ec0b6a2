"""The blocking client of Locust's users, against the same servers as the asynchronous one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from loadtest.load.sse import BlockingClient
from loadtest.stream import RequestResult
from tests.loadtest.responses import BROKEN, answer, stall
from tests.loadtest.sse_server import Exchange, Respond, SSEServer


@contextlib.contextmanager
def serving(respond: Respond) -> Iterator[SSEServer]:
    """A server on a loop and thread of its own, for clients that block."""
    loop, server, ready = asyncio.new_event_loop(), SSEServer(respond), threading.Event()

    async def run() -> None:
        async with server:
            ready.set()
            await stopped.wait()

    async def make_event() -> asyncio.Event:
        return asyncio.Event()

    stopped = loop.run_until_complete(make_event())
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(60)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _stream(respond: Respond, timeout_s: float = 60.0) -> RequestResult:
    with serving(respond) as server:
        client = BlockingClient(server.url, timeout_s=timeout_s)
        try:
            return client.stream("/v1/completions", {"prompt": "hello", "max_tokens": 4})
        finally:
            client.close()


def test_an_answer_is_read_to_its_end_with_its_usage_and_text() -> None:
    result = _stream(answer)
    assert result.ok
    assert result.status == 200
    assert result.texts == ["x"] * 4
    assert len(result.content_times) == 4
    assert (result.prompt_tokens, result.completion_tokens) == (3, 4)
    assert result.finish_reason == "length"
    assert result.ended is not None
    assert result.started <= result.content_times[0] <= result.content_times[-1] <= result.ended


def test_a_token_is_seen_when_it_comes_and_not_when_more_have() -> None:
    seen, watched = threading.Event(), []

    async def respond(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await exchange.text("a")
        # The second token waits until the client has noted the first.
        await asyncio.to_thread(seen.wait, 60)
        await exchange.text("b", "stop")
        await exchange.usage(1, 2, 0)
        await exchange.event("[DONE]")
        await exchange.finish()

    def watch() -> None:
        while not (watched and watched[0].content_times) and not seen.wait(0.001):
            pass
        seen.set()

    with serving(respond) as server:
        watcher = threading.Thread(target=watch)
        watcher.start()
        client = BlockingClient(server.url, timeout_s=60)
        result = client.stream("/v1/completions", {}, on_start=watched.append)
        watcher.join(60)
        client.close()
    assert result is watched[0]
    assert result.texts == ["a", "b"]


@pytest.mark.parametrize(("respond", "reason"), [case for case in BROKEN if "Protocol" not in case[1]])
def test_whatever_breaks_a_stream_is_a_failure(respond: Respond, reason: str) -> None:
    result = _stream(respond)
    assert not result.ok
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(result.error)


def test_a_connection_that_breaks_off_is_a_failure() -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.text("x")
        raise ConnectionError

    result = _stream(respond)
    assert result.error is not None
    assert result.content_times


def test_a_silent_server_is_a_failure_after_the_time_limit() -> None:
    result = _stream(stall, timeout_s=0.3)
    assert "Timeout" in (result.error or "")


def test_a_server_that_goes_on_for_too_long_is_a_failure() -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(1000):
            await exchange.text("x")
            await asyncio.sleep(0.02)

    assert "not done after" in (_stream(respond, timeout_s=0.3).error or "")


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with serving(answer) as server:
        url = server.url
    result = BlockingClient(url, timeout_s=5).stream("/v1/completions", {})
    assert result.status is None
    assert "ConnectionRefused" in (result.error or "")


def test_one_connection_serves_many_requests_and_is_opened_again_when_the_server_has_closed_it() -> None:
    connections = set()

    async def respond(exchange: Exchange) -> None:
        connections.add(exchange.peer)
        await answer(exchange)

    with serving(respond) as server:
        client = BlockingClient(server.url, timeout_s=60)
        body = {"max_tokens": 1}
        assert all(client.stream("/v1/completions", body).ok for _ in range(5))
        assert len(connections) == 1
        server.close_connections()
        result = client.stream("/v1/completions", body)
        client.close()
    assert result.ok
    assert result.retries == 0  # that is the server's right, not a failure of it
    assert len(connections) == 2


def test_connections_that_are_reset_are_tried_again_and_counted() -> None:
    count = 0

    async def respond(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        if count <= 2:
            raise ConnectionError
        await answer(exchange)

    result = _stream(respond)
    assert result.ok
    assert result.retries == 2


def test_tries_have_an_end() -> None:
    async def respond(exchange: Exchange) -> None:
        raise ConnectionError

    with serving(respond) as server:
        result = BlockingClient(server.url, timeout_s=60, tries=3).stream("/v1/completions", {})
        assert len(server.requests) == 3
    assert result.error is not None
    assert result.retries == 3


def test_an_answer_whose_connection_stays_open_ends_with_its_last_event() -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.text("x", "stop")
        await exchange.usage(1, 1, 0)
        await exchange.event("[DONE]")
        await exchange.gone()

    result = _stream(respond)
    assert result.ok
    assert result.ended == result.content_times[-1] or (result.ended or 0) - result.content_times[-1] < 0.4


class _KilledError(BaseException):
    pass


def test_a_request_that_is_stopped_from_outside_is_neither_success_nor_failure() -> None:
    watched: list[RequestResult] = []

    def start(result: RequestResult) -> None:
        watched.append(result)
        raise _KilledError

    with serving(answer) as server, pytest.raises(_KilledError):
        BlockingClient(server.url, timeout_s=60).stream("/v1/completions", {}, on_start=start)
    assert watched[0].error is None


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://"])
def test_a_host_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be a URL"):
        BlockingClient(url)


def test_a_base_url_that_ends_in_v1_names_the_same_server() -> None:
    with serving(answer) as server:
        client = BlockingClient(server.url + "/v1", timeout_s=60, api_key="k")
        assert client.stream("/v1/completions", {"max_tokens": 1}).ok
        assert client.get("/nothing")[0] == 404
        client.close()
    assert server.requests[0]["stream_options"] == {"include_usage": True}
    assert "authorization: bearer k" in server.heads[0]
