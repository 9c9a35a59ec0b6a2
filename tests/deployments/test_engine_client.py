"""The replica's side of the engine, over a scripted process: routing, batching, death, restarts, giving up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from deployments.engine_actor import Abort, EngineStatus, Event, pack
from deployments.engine_api import HealthStatus, TextModel
from deployments.engine_client import EngineFailed, RayEngineClient
from deployments.settings import load_settings
from mlx_engine.engine_thread import ThreadState, ThreadStatus
from mlx_engine.errors import EngineDeadError, ModelLoadError
from mlx_engine.types import EngineStats, FinishReason, RequestOutput
from tests.deployments.fakes import DEADLINE_S
from tests.mlx_engine.test_engine_thread import INFO, ScriptedEngine, request


class ScriptedActor:
    """Looks like a Ray actor's handle. The test puts events; None ends the stream, an exception breaks it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.calls: list[list[Any]] = []
        self.senders: set[asyncio.Task[Any] | None] = set()
        self.answer = asyncio.Event()
        self.answer.set()
        self.killed = False
        self.events = _Method(self._events)
        self.send = _Method(self._send)
        self.stats = _Method(self._stats)

    async def _events(self) -> AsyncIterator[Awaitable[Event]]:
        while (item := await self.queue.get()) is not None:
            future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
            if isinstance(item, Exception):
                future.set_exception(item)
            else:
                future.set_result(item)
            yield future

    async def _send(self, commands: list[Any]) -> None:
        self.calls.append(commands)
        self.senders.add(asyncio.current_task())
        await self.answer.wait()

    async def _stats(self) -> EngineStats:
        return ScriptedEngine().stats()

    def put_status(self, state: ThreadState = ThreadState.READY, **changes: Any) -> None:
        fields: dict[str, Any] = {"stage": "", "progress": 1.0, "num_open": 0, "last_step_time": None}
        thread = ThreadStatus(state, **{**fields, "stalled_for": 0.0, **changes})
        info = INFO if state is ThreadState.READY else None
        self.queue.put_nowait(([], EngineStatus(thread, 4711, Path("/model"), info)))

    def put_tokens(self, request_id: str, tokens: tuple[int, ...], reason: FinishReason | None = None) -> None:
        output = RequestOutput(request_id, tokens, reason, 3, 0, len(tokens), 0.0, 0.0, 0.0)
        self.queue.put_nowait(([pack(output)], None))


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function

    def options(self, **_: Any) -> _Method:
        return self


class Client(RayEngineClient):
    """One that starts scripted actors."""

    def __init__(self, load_text: Callable[[Path], TextModel] | None = None, **health: float) -> None:
        self.actors: list[ScriptedActor] = []
        self.lines: list[str] = []
        settings = load_settings({"health": health})
        super().__init__(settings, load_text or (lambda path: cast(TextModel, path)), self.lines.append)

    async def _create_actor(self) -> Any:
        self.actors.append(ScriptedActor())
        return self.actors[-1]

    async def actor(self, number: int = 1) -> ScriptedActor:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.actors) < number:
                await asyncio.sleep(0.005)
        return self.actors[-1]

    async def status(self, wanted: HealthStatus) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.health().status is not wanted:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def started(client: Client) -> AsyncIterator[Client]:
    client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(autouse=True)
def _kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(actor: ScriptedActor) -> None:
        actor.killed = True
        actor.queue.put_nowait(ray.exceptions.RayActorError())

    monkeypatch.setattr(ray, "kill", kill)


def test_it_is_loading_then_ready_with_the_model_and_the_tokenizer() -> None:
    async def scenario() -> None:
        async with started(Client()) as client:
            actor = await client.actor()
            assert client.health().status is HealthStatus.LOADING
            actor.put_status(ThreadState.LOADING, stage="load", progress=0.3)
            await client.begun()
            health = client.health()
            assert (health.status, health.stage, health.progress) == (HealthStatus.LOADING, "load", 0.3)
            assert client.model is None
            actor.put_status()
            await client.ready()
            assert client.health().status is HealthStatus.OK
            assert client.health().pid == 4711
            assert client.model is not None
            assert (client.model.info, client.model.text) == (INFO, Path("/model"))
            assert client.lines == ["Loading the weights …"]
            assert (await client.stats()) is not None

    asyncio.run(scenario())


def test_outputs_go_to_their_streams_and_commands_of_one_turn_go_together() -> None:
    async def scenario() -> None:
        async with started(Client()) as client:
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            streams = [client.generate(request(name)) for name in "abc"]
            await asyncio.sleep(0.01)
            assert [[command.request_id for command in call] for call in actor.calls] == [["a", "b", "c"]]
            actor.put_tokens("b", (1,))
            actor.put_tokens("a", (2,))
            actor.put_tokens("b", (3, 4), FinishReason.LENGTH)
            actor.put_tokens("nobody", (9,))
            assert (await anext(streams[0])).new_token_ids == (2,)
            await asyncio.sleep(0.05)
            merged = await anext(streams[1])
            assert merged.new_token_ids == (1, 3, 4), "what waited comes as one"
            assert merged.finish_reason is FinishReason.LENGTH
            with pytest.raises(StopAsyncIteration):
                await anext(streams[1])
            for stream in streams:
                stream.close()
                stream.close()
            await asyncio.sleep(0.01)
            assert actor.calls[1:] == [[Abort("a"), Abort("c")]], "b had ended, and each abort goes once"

    asyncio.run(scenario())


def test_an_abort_never_overtakes_its_request_nor_ends_with_its_task() -> None:
    async def scenario() -> None:
        async with started(Client()) as client:
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            actor.answer.clear()

            async def serve_one() -> None:
                stream = client.generate(request("a"))
                try:
                    await anext(stream)
                finally:
                    stream.close()

            task = asyncio.ensure_future(serve_one())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            assert [[command.request_id for command in call] for call in actor.calls] == [["a"]], "not answered yet"
            actor.answer.set()
            await asyncio.sleep(0.01)
            assert actor.calls[1:] == [[Abort("a")]]
            # Ray cancels the calls of a cancelled task: these are none of its calls.
            assert task not in actor.senders
            assert len(actor.senders) == 1

    asyncio.run(scenario())


def test_a_process_that_dies_fails_its_streams_and_is_started_again() -> None:
    async def scenario() -> None:
        async with started(Client()) as client:
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            stream = client.generate(request("a"))
            actor.queue.put_nowait(ray.exceptions.RayActorError())
            with pytest.raises(EngineDeadError):
                await anext(stream)
            second = await client.actor(2)
            assert actor.killed
            assert client.health().status is HealthStatus.DEAD
            second.put_status(ThreadState.LOADING, stage="load")
            await client.status(HealthStatus.LOADING)
            second.put_status()
            await client.status(HealthStatus.OK)
            assert client.health().num_restarts == 1
            again = client.generate(request("a"))
            second.put_tokens("a", (7,), FinishReason.STOP)
            assert (await anext(again)).new_token_ids == (7,)
            client.check()

    asyncio.run(scenario())


def test_an_engine_thread_that_dies_in_a_living_process_is_started_again_too() -> None:
    async def scenario() -> None:
        async with started(Client()) as client:
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            actor.put_status(ThreadState.DEAD, error="kernel fault")
            actor.queue.put_nowait(None)
            (await client.actor(2)).put_status()
            await client.status(HealthStatus.OK)
            assert actor.killed
            assert "kernel fault" in client.lines[-1]

    asyncio.run(scenario())


def test_a_wrong_configuration_is_final_and_known_before_anything_is_served() -> None:
    async def scenario() -> None:
        async with started(Client()) as client:
            actor = await client.actor()
            actor.put_status(ThreadState.DEAD, error="no scheduler fcsf", is_permanent=True)
            actor.queue.put_nowait(None)
            with pytest.raises(EngineFailed, match="fcsf"):
                await client.begun()
            assert client.health().status is HealthStatus.FAILED
            with pytest.raises(EngineDeadError):
                client.generate(request("a"))
            await asyncio.sleep(0.05)
            assert len(client.actors) == 1
            client.check()  # a new replica would fail the same way

    asyncio.run(scenario())


def test_a_tokenizer_that_can_not_be_read_is_final() -> None:
    def broken(path: Path) -> TextModel:
        raise ModelLoadError("no tokenizer.json")

    async def scenario() -> None:
        async with started(Client(broken)) as client:
            (await client.actor()).put_status()
            with pytest.raises(EngineFailed, match=r"tokenizer\.json"):
                await client.ready()
            assert client.health().status is HealthStatus.FAILED

    asyncio.run(scenario())


def test_after_too_many_failed_starts_another_replica_may_try() -> None:
    async def scenario() -> None:
        async with started(Client(max_failed_starts=2)) as client:
            for number in (1, 2):
                (await client.actor(number)).queue.put_nowait(ray.exceptions.RayActorError())
            with pytest.raises(EngineFailed):
                await client.ready()
            with pytest.raises(EngineFailed):
                client.check()

    asyncio.run(scenario())


def test_a_stalled_engine_is_unhealthy_and_in_the_end_killed() -> None:
    async def scenario() -> None:
        async with started(Client(stall_timeout_s=5, restart_after_s=50)) as client:
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            actor.put_status(stalled_for=4.0)
            await asyncio.sleep(0.02)
            assert client.health().status is HealthStatus.OK
            actor.put_status(stalled_for=6.0)
            await client.status(HealthStatus.STALLED)
            assert "6 s" in (client.health().error or "")
            actor.put_status()
            await client.status(HealthStatus.OK)
            actor.put_status(stalled_for=51.0)
            await client.actor(2)
            assert actor.killed

    asyncio.run(scenario())


def test_a_process_that_falls_silent_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with started(Client(heartbeat_timeout_s=2)) as client:
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            real = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: real() + 3.0)
            assert client.health().status is HealthStatus.STALLED
            actor.put_status()
            await client.status(HealthStatus.OK)

    asyncio.run(scenario())


def test_closing_ends_the_process_and_the_streams() -> None:
    async def scenario() -> None:
        client = Client()
        async with started(client):
            actor = await client.actor()
            actor.put_status()
            await client.ready()
            stream = client.generate(request("a"))
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(stream)
        assert actor.killed
        assert client.health().status is HealthStatus.STOPPED

    asyncio.run(scenario())
