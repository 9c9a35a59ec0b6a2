"""The replica's side of the engine's process: starts it, routes its outputs, notices its death, starts it again."""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.cli import num_cores
from deployments.engine_actor import DEFAULT_BUILDER, Abort, Command, EngineActor, EngineStatus, Event, unpack
from deployments.engine_api import EngineHealth, HealthStatus, OutputStream, ServedModel, TextModel
from deployments.settings import QuireSettings
from mlx_engine.engine_thread import ThreadState
from mlx_engine.errors import EngineDeadError, ModelLoadError
from mlx_engine.types import EngineStats, Request

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 5.0  # they are taken between two steps
_MAX_BACKOFF_S = 30.0
# An engine that dies sooner after it got ready counts as one that could not be started.
_PROVEN_AFTER_S = 10.0
# Items that the actor may be ahead of us. Beyond, its steps merge: we get fewer, larger items.
_STREAM_AHEAD = 16


class EngineFailed(Exception):
    """The engine can't be started, and trying again would not help."""


class RayEngineClient:
    """An EngineClient over an EngineActor on this node. All methods belong to one event loop's thread.

    Args:
        settings: what to start.
        load_text: reads the tokenizer from the model's folder; called on another thread.
        announce: told about loading and restarts, one line each.
        builder: what builds the engine in its process, see EngineActor.
    """

    def __init__(
        self,
        settings: QuireSettings,
        load_text: Callable[[Path], TextModel],
        announce: Callable[[str], None],
        builder: str = DEFAULT_BUILDER,
    ) -> None:
        self._settings = settings
        self._load_text = load_text
        self._announce = announce
        self._builder = builder
        self._actor: Any = None
        self._status: EngineStatus | None = None  # of the actor that runs now
        self._last_item_time = time.monotonic()
        self._streams: dict[str, OutputStream] = {}
        self._commands: list[Command] = []
        self._commands_wait = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._model: ServedModel | None = None
        self._text_task: asyncio.Task[TextModel] | None = None
        self._error: str | None = None
        self._failed = False  # for good
        self._gave_up = False  # failed, though it may work elsewhere
        self._closing = False
        self._num_restarts = 0
        self._ready_since: float | None = None  # of the actor that runs now
        self._begun = asyncio.Event()
        self._ready = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to start the engine, and keeps it running from then on. Call once, in the event loop."""
        self._supervisor = asyncio.ensure_future(self._supervise())
        self._sender = asyncio.ensure_future(self._send_commands())

    async def begun(self) -> None:
        """Returns once the engine has begun to load its model. Raises EngineFailed if it got no further than that.

        By then the policies have been found and the model's folder too: what a typo would break is all right.
        """
        await self._begun.wait()
        if self._failed:
            raise EngineFailed(self._error)

    async def ready(self) -> None:
        """Returns once the engine serves. Raises EngineFailed if it never will."""
        await self._ready.wait()
        if self._failed:
            raise EngineFailed(self._error)

    async def close(self) -> None:
        """Ends the engine's process. Open streams fail."""
        self._closing = True
        tasks = [task for task in (self._supervisor, self._sender) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_streams("the server is shutting down")

    @property
    def model(self) -> ServedModel | None:
        """None until the engine has been ready once."""
        return self._model

    def generate(self, request: Request) -> OutputStream:
        """Hands a request to the engine. Raises EngineDeadError at once if there is none to take it."""
        if self._actor is None or self._closing:
            raise EngineDeadError(self._error or "it is not running")
        stream = OutputStream(request.request_id, self._on_stream_closed)
        self._streams[request.request_id] = stream
        self._enqueue(request)
        return stream

    def health(self) -> EngineHealth:
        """How the engine is, from the last that was heard of it."""
        status = self._status
        thread = status.thread if status is not None else None
        stage, progress = (thread.stage, thread.progress) if thread is not None else ("start", 0.0)
        state, error = self._health_status()
        pid = status.pid if status is not None else None
        return EngineHealth(state, stage, progress, error, self._num_restarts, pid)

    def _health_status(self) -> tuple[HealthStatus, str | None]:
        if self._closing:
            return HealthStatus.STOPPED, None
        if self._failed:
            return HealthStatus.FAILED, self._error
        if self._status is None:
            return (HealthStatus.LOADING if self._error is None else HealthStatus.DEAD), self._error
        thread = self._status.thread
        if thread.state is ThreadState.DEAD:
            return HealthStatus.DEAD, thread.error
        limits = self._settings.health
        silent = time.monotonic() - self._last_item_time
        if silent > limits.heartbeat_timeout_s:
            return HealthStatus.STALLED, f"nothing was heard of the engine's process for {silent:.0f} s"
        if thread.state is ThreadState.LOADING or not self._ready.is_set():
            return HealthStatus.LOADING, self._error
        if thread.stalled_for > limits.stall_timeout_s:
            return HealthStatus.STALLED, f"no step has ended for {thread.stalled_for:.0f} s though work is pending"
        return HealthStatus.OK, None

    async def stats(self) -> EngineStats | None:
        """The engine's figures, fresh; None if it does not answer in time."""
        actor = self._actor
        if actor is None or self._status is None or self._status.thread.state is not ThreadState.READY:
            return None
        try:
            stats: EngineStats = await asyncio.wait_for(actor.stats.remote(), _STATS_TIMEOUT_S)
        except (TimeoutError, EngineDeadError, ray.exceptions.RayError):
            return None
        return stats

    def check(self) -> None:
        """Raises EngineFailed when a new replica should take this one's place."""
        if self._gave_up:
            raise EngineFailed(self._error)
        ended = [task for task in (self._supervisor, self._sender) if task is not None and task.done()]
        if ended and not self._failed and not self._closing:
            raise EngineFailed("the task that looks after the engine has ended")

    # -- commands --------------------------------------------------------------------------------------------------

    def _on_stream_closed(self, request_id: str, finished: bool) -> None:
        if self._streams.pop(request_id, None) is not None and not finished:
            self._enqueue(Abort(request_id))

    def _enqueue(self, command: Command) -> None:
        """Sends it with all else that comes before the call in hand has been answered."""
        self._commands.append(command)
        self._commands_wait.set()

    async def _send_commands(self) -> None:
        """Sends what is enqueued, for as long as the replica lives.

        From a task of its own: a call made in a request's task is its child in Ray's books, and is cancelled with it
        when the client leaves, the abort included. And one call at a time: Ray runs the calls of an async actor in
        any order, and an abort that overtakes its request would leave the request running for nobody.
        """
        while True:
            await self._commands_wait.wait()
            self._commands_wait.clear()
            commands, self._commands = self._commands, []
            if self._actor is None or not commands:
                continue
            try:
                await self._actor.send.remote(commands)
            except ray.exceptions.RayError:
                continue  # the process is gone, as the end of its stream says too

    # -- the engine's life -----------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failed_starts = 0
        while True:
            self._ready_since = None
            try:
                permanent = await self._run_engine()
            except Exception as error:
                # ray.exceptions.RayActorError when the process died; anything else is as bad.
                permanent = isinstance(error, ModelLoadError)
                self._error = str(error) if permanent else f"the engine's process ended: {_first_line(error)}"
            served_for = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
            failed_starts = 0 if served_for > _PROVEN_AFTER_S else failed_starts + 1
            self._gave_up = failed_starts >= self._settings.health.max_failed_starts
            self._status = None
            self._fail_streams(self._error or "the engine ended")
            if permanent or self._gave_up:
                self._failed = True
                self._announce(f"The engine can't be started: {self._error}")
                self._begun.set()
                self._ready.set()
                return
            self._num_restarts += 1
            self._announce(f"The engine is started again: {self._error}")
            await asyncio.sleep(min(2.0**failed_starts - 1.0, _MAX_BACKOFF_S))

    async def _run_engine(self) -> bool:
        """One life of the engine's process; at its end, whether trying again is pointless."""
        actor = await self._create_actor()
        watchdog = asyncio.ensure_future(self._watch(actor))
        try:
            self._last_item_time = time.monotonic()
            self._commands = []  # what was meant for its predecessor
            self._actor = actor
            async for reference in actor.events.options(_generator_backpressure_num_objects=_STREAM_AHEAD).remote():
                event: Event = await reference
                await self._take(event)
            thread = self._status.thread if self._status is not None else None
            self._error = (thread.error if thread is not None else None) or "its stream ended"
            return thread is not None and thread.is_permanent
        finally:
            self._actor = None
            watchdog.cancel()
            ray.kill(actor)

    async def _take(self, event: Event) -> None:
        outputs, status = event
        self._last_item_time = time.monotonic()
        for fields in outputs:
            stream = self._streams.get(fields[0])
            if stream is not None:
                stream.put(unpack(fields))
        if status is not None:
            await self._take_status(status)

    async def _take_status(self, status: EngineStatus) -> None:
        before, self._status = self._status, status
        thread = status.thread
        if status.model_path is not None and self._text_task is None:
            self._text_task = asyncio.ensure_future(asyncio.to_thread(self._load_text, status.model_path))
        if thread.stage:
            self._begun.set()
            if before is None or before.thread.stage != thread.stage:
                self._announce(_describe_stage(thread.stage))
        if thread.state is ThreadState.READY and (before is None or before.thread.state is not ThreadState.READY):
            assert status.info is not None
            assert self._text_task is not None
            self._model = ServedModel(status.info, await self._text_task)
            self._error = None
            self._ready_since = time.monotonic()
            self._begun.set()
            self._ready.set()

    async def _watch(self, actor: Any) -> None:
        """Kills a process that has been silent or stalled for so long that it won't come back by itself."""
        limit = self._settings.health.restart_after_s
        while True:
            await asyncio.sleep(1.0)
            status = self._status
            silent = time.monotonic() - self._last_item_time if status is not None else 0.0
            stalled = status.thread.stalled_for if status is not None else 0.0
            if max(silent, stalled) > limit:
                logger.error("the engine has been stuck for %.0f s: its process is killed", max(silent, stalled))
                ray.kill(actor)
                return

    async def _create_actor(self) -> Any:
        node_id = ray.get_runtime_context().get_node_id()
        options = self._settings.engine_actor
        num_gpus = options.num_gpus
        if num_gpus == "auto":
            num_gpus = await asyncio.to_thread(_auto_gpus, node_id)
        return (
            ray.remote(EngineActor)
            .options(
                num_cpus=options.num_cpus,
                num_gpus=num_gpus,
                resources=options.resources or None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                max_restarts=0,
                max_concurrency=1000,
                runtime_env=_runtime_env(options.num_threads),
            )
            .remote(self._settings.engine, self._builder)
        )

    def _fail_streams(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(reason))


def _auto_gpus(node_id: str) -> float:
    """1 where this node has an NVIDIA device that Ray knows of. Looks at device files: MLX stays out of here."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return 0.0
    on_node = [node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id]
    return 1.0 if any(resources.get("GPU", 0) >= 1 for resources in on_node) else 0.0


def _runtime_env(num_threads: int | None) -> dict[str, Any]:
    # Ray sets OMP_NUM_THREADS to the actor's num_cpus, which would leave OpenBLAS a single thread.
    wanted = str(num_threads or num_cores())
    if os.environ.get("OPENBLAS_NUM_THREADS") == wanted:
        return {}
    return {"env_vars": {"OPENBLAS_NUM_THREADS": wanted}}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_STAGES = {
    "read": "Reading the GGUF file",
    "convert": "Converting the GGUF file (once; the result is kept)",
    "download": "Downloading the model",
    "load": "Loading the weights",
    "compile": "Compiling the native CPU library (once; the result is kept)",
    "check": "Trying the model out",
    "warm_up": "Compiling decode steps of every size",
    "allocate": "Allocating the KV pool",
}


def _describe_stage(stage: str) -> str:
    return f"{_STAGES.get(stage, stage)} …"
