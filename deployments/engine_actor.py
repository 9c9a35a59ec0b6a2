"""The engine's process: one Ray actor per accelerator, beside the server replica that owns it.

Everything it has to say goes through one stream, `events`: each item holds the outputs of one step, or of several when
the replica lags, and how the engine is. Importing this module imports no MLX; only building the engine does.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mlx_engine.config import EngineConfig
from mlx_engine.engine_thread import EngineThread, Progress, RejectedOutput, SteppableEngine, ThreadState, ThreadStatus
from mlx_engine.errors import EngineDeadError, RequestError
from mlx_engine.models.resolve import resolve_model
from mlx_engine.types import EngineInfo, EngineStats, FinishReason, Request, RequestOutput

DEFAULT_BUILDER = "plugins.build:build_engine"
HEARTBEAT_S = 1.0
_PROGRESS_INTERVAL_S = 0.25
_NUM_COMMON_FIELDS = len(RequestOutput.__struct_fields__)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine's process is. Sent when something changed, and every HEARTBEAT_S."""

    thread: ThreadStatus
    pid: int
    model_path: Path | None  # known once the model has been found, converted or downloaded
    info: EngineInfo | None  # known once the engine is ready


@dataclass(frozen=True, slots=True)
class Abort:
    """The command to drop a request."""

    request_id: str


Command = Request | Abort
# RequestOutput's fields as a plain tuple: half the bytes of the dataclass and a tenth of the time to pickle.
PackedOutput = tuple[Any, ...]
Event = tuple[list[PackedOutput], EngineStatus | None]


class EngineActor:
    """Owns the EngineThread. Made into a Ray actor by `engine_client`."""

    def __init__(self, config: EngineConfig, builder: str = DEFAULT_BUILDER) -> None:
        """builder is "module:function", called as build(config, progress) -> engine on the engine thread."""
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        for package in ("mlx_engine", "plugins", "deployments"):
            logging.getLogger(package).setLevel(logging.INFO)
        self._config = config
        self._builder = builder
        self._model_path: Path | None = None
        self._lock = threading.Lock()
        self._outputs: list[PackedOutput] = []  # guarded by the lock
        self._status_due = True
        self._last_stage: tuple[ThreadState, str] | None = None
        self._last_report = 0.0
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(self._build, self._on_outputs, self._on_status)

    async def events(self) -> AsyncIterator[Event]:
        """Starts the engine and streams what comes of it, until it is dead. Call once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        heartbeat = asyncio.ensure_future(self._beat())
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                # The status first: a dead thread's last outputs are in before it says that it is dead.
                status = self._status() if self._status_due else None
                self._status_due = False
                with self._lock:
                    outputs, self._outputs = self._outputs, []
                if outputs or status is not None:
                    yield outputs, status
                if status is not None and status.thread.state is ThreadState.DEAD:
                    return
        finally:
            heartbeat.cancel()

    async def send(self, commands: Sequence[Command]) -> None:
        """Takes requests and aborts, in order. What is refused is answered in the stream."""
        for command in commands:
            if isinstance(command, Abort):
                self._thread.abort(command.request_id)
                continue
            try:
                self._thread.submit(command)
            except (RequestError, EngineDeadError) as error:
                self._on_outputs([_refusal(command, error)])

    async def stats(self) -> EngineStats:
        """The engine's figures, taken between two steps. Raises EngineDeadError."""
        return await asyncio.wrap_future(self._thread.stats())

    async def _beat(self) -> None:
        while True:
            self._status_due = True
            self._wake.set()
            await asyncio.sleep(HEARTBEAT_S)

    def _status(self) -> EngineStatus:
        return EngineStatus(self._thread.status(), os.getpid(), self._model_path, self._thread.info)

    # Called on the engine thread.

    def _build(self, progress: Progress) -> SteppableEngine:
        def report(stage: str, fraction: float) -> None:
            if stage == "load" and self._model_path is None:
                # Found, converted or downloaded by now, so this is quick; the replica can read the tokenizer meanwhile.
                self._model_path = resolve_model(self._config.model)
            progress(stage, fraction)

        module, _, function = self._builder.partition(":")
        # By name, here: this is what imports MLX, and it must happen in this process and on this thread only.
        engine: SteppableEngine = getattr(importlib.import_module(module), function)(self._config, report)
        if self._model_path is None:
            self._model_path = resolve_model(self._config.model)
        # What start-up made stays. A full pass of the garbage collector over it, 70 ms with MLX and Ray in the process,
        # would stop every stream for as long.
        gc.collect()
        gc.freeze()
        return engine

    def _on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        packed = [pack(output) for output in outputs]
        with self._lock:
            self._outputs += packed
        self._notify()

    def _on_status(self) -> None:
        status = self._thread.status()
        stage, now = (status.state, status.stage), time.monotonic()
        if stage == self._last_stage and now - self._last_report < _PROGRESS_INTERVAL_S:
            return
        self._last_stage, self._last_report = stage, now
        self._status_due = True
        self._notify()

    def _notify(self) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the process is being torn down and its loop is closed
            return


def pack(output: RequestOutput) -> PackedOutput:
    """The output as a tuple of plain values."""
    fields: PackedOutput = msgspec.structs.astuple(output)
    reason = output.finish_reason
    return fields if reason is None else (*fields[:2], reason.value, *fields[3:])


def unpack(fields: PackedOutput) -> RequestOutput:
    """What `pack` packed."""
    request_id, token_ids, reason, *rest = fields
    finish_reason = FinishReason(reason) if reason is not None else None
    if len(rest) == _NUM_COMMON_FIELDS - 3:
        return RequestOutput(request_id, token_ids, finish_reason, *rest)
    return RejectedOutput(request_id, token_ids, finish_reason, *rest)


def _refusal(request: Request, error: RequestError | EngineDeadError) -> RequestOutput:
    base = (request.request_id, (), FinishReason.ERROR, len(request.prompt_token_ids), 0, 0, time.monotonic())
    if isinstance(error, RequestError):
        return RejectedOutput(*base, None, None, 0, str(error), error.param, error.code)
    return RequestOutput(*base, None, None, 0, str(error))
