"""A client that goes away, at any stage and in any way, leaves nothing behind in the engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest

from deployments.engine_api import TextModel
from deployments.metrics import Metrics
from deployments.openai_routes import create_app
from deployments.service import OpenAIService
from deployments.settings import load_settings
from deployments.streaming import ClientGone, EventStream, run_until_disconnect
from tests.deployments.fakes import DEADLINE_S, MODEL, FakeEngine, Server, wait_until


def send_request(server: Server, stream: bool, prompts: int = 1) -> socket.socket:
    body = {"model": MODEL, "prompt": ["hello"] * prompts, "max_tokens": 5000, "stream": stream}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["waiting", "generating"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_aborts_its_sequences(server: Server, stream: bool, stage: str, prompts: int) -> None:
    server.engine.hold_first = 3600.0 if stage == "waiting" else 0.0
    server.engine.step_s = 0.01
    client = send_request(server, stream, prompts)
    if stream and stage == "generating":
        assert b"200 OK" in client.recv(4096)
    wait_until(lambda: len(server.engine.open) == prompts, "the engine to be at work")
    client.close()
    wait_until(lambda: not server.engine.open, "the engine to be rid of it")
    assert len(server.engine.aborted) == prompts
    server.engine.hold_first = 0.0
    assert server.complete("x", max_tokens=2).status_code == 200
    ended = server.client.get("/metrics").text
    assert f'request_success_total{{finished_reason="abort",model_name="{MODEL}"}} {prompts}.0' in ended


def test_many_clients_that_leave_give_every_place_back(server: Server) -> None:
    server.engine.step_s = 0.01
    clients = [send_request(server, stream=index % 2 == 0) for index in range(60)]
    wait_until(lambda: len(server.engine.requests) == 60, "all to be admitted")
    for client in clients:
        client.close()
    wait_until(lambda: not server.engine.open, "the engine to be empty")
    assert server.service._num_open == 0


def test_a_client_that_reads_slowly_gets_everything_in_fewer_pieces(server: Server) -> None:
    """Backpressure: nothing is lost, and the engine is not held up."""
    server.engine.step_s = 0.0
    client = send_request(server, stream=True)
    wait_until(lambda: not server.engine.open, "the engine to be done long before the client has read")
    client.settimeout(DEADLINE_S)
    received = b""
    while b"[DONE]" not in received:
        received += client.recv(65536)
    client.close()
    events = [json.loads(part[6:]) for part in received.split(b"\n") if part.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len(events) <= 5000


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_task_aborts_too(text: TextModel, stream: bool) -> None:
    """Ray Serve cancels the task of a request whose client has left."""

    async def scenario() -> None:
        engine = FakeEngine(text)
        engine.step_s = 0.01
        service = OpenAIService(load_settings({"model_id": MODEL}), engine, Metrics(MODEL))
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 5000, "stream": stream}).encode()
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("x", 1),
            "headers": [(b"content-type", b"application/json")], "client": ("x", 2),
        }  # fmt: skip
        task = asyncio.ensure_future(create_app(service, ["*"])(scope, messages.get, send))
        async with asyncio.timeout(DEADLINE_S):
            while len(sent) < 4 if stream else not engine.open:
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.open
        assert len(engine.aborted) == 1
        assert service._num_open == 0
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        if leftover:
            await asyncio.wait(leftover, timeout=DEADLINE_S)
        assert all(t.done() for t in leftover), "no task may outlive the request"

    asyncio.run(scenario())


def test_work_is_cancelled_when_the_client_leaves() -> None:
    async def scenario() -> None:
        cancelled = threading.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await run_until_disconnect(receive, work())  # type: ignore[arg-type]
        assert cancelled.is_set()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_result_is_returned_or_discarded_whenever_the_task_is_cancelled() -> None:
    """An answer that is ready at the moment of the cancellation holds sequences that somebody must end."""

    async def scenario(turns: int) -> None:
        result, go_on = object(), asyncio.Event()
        discarded: list[object] = []

        async def work() -> object:
            await go_on.wait()
            return result

        async def receive() -> Any:
            await asyncio.sleep(3600)

        outer = asyncio.ensure_future(run_until_disconnect(receive, work(), discarded.append))
        await asyncio.sleep(0.01)
        go_on.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        outer.cancel()
        try:
            assert await outer is result
            assert discarded == []
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            # Cancelled in time, or ready and discarded: never ready and lost.
            assert discarded in ([result], [] if turns == 0 else [result])

    for turns in range(12):
        asyncio.run(asyncio.wait_for(scenario(turns), DEADLINE_S))


def test_an_event_stream_closes_its_source_however_it_ends() -> None:
    async def scenario(fail: bool) -> tuple[list[Any], list[str]]:
        log: list[str] = []

        async def events() -> Any:
            try:
                yield b"data: 1\n\n"
                if fail:
                    raise ValueError("inside")
                yield b"data: 2\n\n"
            finally:
                log.append("source closed")

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(3600)

        await EventStream(events(), lambda: log.append("on_close"))({"type": "http"}, receive, send)
        return sent, log

    sent, log = asyncio.run(scenario(fail=False))
    assert [m.get("body") for m in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]
    assert sorted(log) == ["on_close", "source closed"]
    sent, log = asyncio.run(scenario(fail=True))
    assert b'"code": "internal"' in sent[2]["body"]
    assert b"inside" not in sent[2]["body"]
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert sorted(log) == ["on_close", "source closed"]
