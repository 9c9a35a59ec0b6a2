"""An engine client without an engine, and a real HTTP server over it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import uvicorn

from deployments.engine_api import EngineHealth, HealthStatus, OutputStream, ServedModel, TextModel
from deployments.metrics import Metrics
from deployments.openai_routes import create_app
from deployments.service import OpenAIService
from deployments.settings import load_settings
from mlx_engine.errors import EngineDeadError, RequestError
from mlx_engine.types import EngineInfo, EngineStats, FinishReason, KVCacheUsage, Request, RequestOutput

DEADLINE_S = 20.0
MODEL = "SmolLM2-135M-Instruct"
INFO = EngineInfo(MODEL, 8192, 49152, frozenset({2}), 8192, 512, 16, "cpu", "float32", "int8", {"scheduler": "fcfs"})
ANSWER = "The alphabet: A B C D E F G H I J K L M N O P, \U0001f642\U0001f980 and so on, in good order. "


class FakeEngine:
    """Says `answer` over and over, one token every `step_s`, and then ends the sequence if `ends` is set."""

    def __init__(self, text: TextModel, info: EngineInfo = INFO) -> None:
        self.served = ServedModel(info, text)
        self.answer = ANSWER
        self.ends = False
        self.step_s = 0.0
        self.hold_first = 0.0  # seconds of "queue and prefill"
        self.status = HealthStatus.OK
        self.error: str | None = None
        self.reject: RequestError | None = None
        self.die_after: int | None = None  # tokens
        self.cached = 0
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.open: dict[str, tuple[OutputStream, asyncio.Task[None]]] = {}

    # EngineClient

    @property
    def model(self) -> ServedModel | None:
        return None if self.status is HealthStatus.LOADING else self.served

    def health(self) -> EngineHealth:
        loading = self.status is HealthStatus.LOADING
        return EngineHealth(self.status, "load" if loading else "", 0.5 if loading else 1.0, self.error, 0, 4711)

    async def stats(self) -> EngineStats | None:
        kv = KVCacheUsage(512, 16, 400, 12, 100, 90, 0.1, 0.2)
        return EngineStats(
            7, len(self.open), 3, kv, 4, 5, len(self.aborted), 60, 20, 70, 80, 1, 0, 0, {"gather": 9}, 50, 30
        )

    def generate(self, request: Request) -> OutputStream:
        if self.status is not HealthStatus.OK:
            raise EngineDeadError("not running")
        self.requests.append(request)
        stream = OutputStream(request.request_id, self._on_close)
        self.open[request.request_id] = (stream, asyncio.ensure_future(self._run(request, stream)))
        return stream

    def _on_close(self, request_id: str, finished: bool) -> None:
        _, task = self.open.pop(request_id)
        task.cancel()
        if not finished:
            self.aborted.append(request_id)

    async def _run(self, request: Request, stream: OutputStream) -> None:
        output = RequestOutput(
            request.request_id, (), None, len(request.prompt_token_ids), self.cached, 0, time.monotonic(), None, None
        )
        if self.hold_first:
            await asyncio.sleep(self.hold_first)
        if self.reject is not None:
            stream.fail(self.reject)
            return
        tokens = self.served.text.encode(self.answer)
        limit = request.sampling.max_tokens
        source = iter(tokens) if self.ends else itertools.cycle(tokens)
        for count, token in enumerate(itertools.islice(source, limit), 1):
            if self.die_after is not None and count > self.die_after:
                stream.fail(EngineDeadError("kernel fault"))
                return
            reason = FinishReason.LENGTH if count == limit else None
            now = time.monotonic()
            stream.put(
                msgspec.structs.replace(
                    output, new_token_ids=(token,), finish_reason=reason, num_output_tokens=count, first_token_time=now
                )
            )
            if reason is not None:
                return
            await asyncio.sleep(self.step_s)
        stream.put(msgspec.structs.replace(output, finish_reason=FinishReason.STOP, num_output_tokens=len(tokens) + 1))


@dataclass
class Server:
    """A server on loopback and the fake behind it."""

    url: str
    engine: FakeEngine
    service: OpenAIService
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, content=content, headers={"content-type": "application/json", **headers})

    def chat(self, messages: Any, **fields: Any) -> httpx.Response:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8, **fields})

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def events(self, path: str, **body: Any) -> list[Any]:
        """The parsed events of a stream, "[DONE]" as it is."""
        with self.client.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            raw = b"".join(response.iter_raw())
        events = []
        for event in raw.decode("utf-8").split("\n\n")[:-1]:
            assert event.startswith("data: "), event
            data = event.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        return events


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice over a stream."""
    parts = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else []:
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(parts)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The envelope of an error answer, checked for its shape and size."""
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 10_000
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@contextmanager
def serving(engine: FakeEngine, args: dict[str, Any] | None = None, cors: tuple[str, ...] = ("*",)) -> Iterator[Server]:
    """Runs the application over the fake with uvicorn on a free port."""
    settings = load_settings({"model_id": MODEL, "model_aliases": ["smollm2"], **(args or {})})
    service = OpenAIService(settings, engine, Metrics(MODEL))
    config = uvicorn.Config(create_app(service, cors), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "a server")
    running = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, service)
    try:
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        server.force_exit = True
        thread.join(DEADLINE_S)
        listener.close()
