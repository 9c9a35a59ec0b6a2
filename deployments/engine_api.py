"""What the HTTP side needs of an engine, and nothing about where it runs: tests inject one without Ray or a model."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mlx_engine.engine_thread import RejectedOutput
from mlx_engine.errors import EngineDeadError, RequestError
from mlx_engine.types import EngineInfo, EngineStats, FinishReason, Request, RequestOutput


class HealthStatus(enum.StrEnum):
    """Whether the engine serves. Only OK is a 200 on /health."""

    OK = "ok"
    LOADING = "loading"  # for the first time, or again after it died
    STALLED = "stalled"  # work is pending and no step ends, or the process is silent
    DEAD = "dead"  # about to be started again
    FAILED = "failed"  # can't be started: the configuration or the model is at fault
    STOPPED = "stopped"  # the server is shutting down


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A moment's picture, for /health and check_health."""

    status: HealthStatus
    stage: str = ""  # of loading
    progress: float = 0.0  # of that stage, 0 to 1
    error: str | None = None  # why it is not OK
    num_restarts: int = 0  # since the server started
    pid: int | None = None  # of the engine's process


class Detokenizer(Protocol):
    """One sequence's text; see mlx_engine.detokenizer."""

    @property
    def stopped(self) -> bool: ...
    def push(self, token_ids: Iterable[int]) -> str: ...
    def finish(self) -> str: ...


class TextModel(Protocol):
    """Text to ids and back. Threads may share one; see `deployments.text`."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> list[int]:
        """The ids of a chat. Raises RequestError if the model's template refuses it."""

    def detokenizer(self, stop: Sequence[str]) -> Detokenizer:
        """A fresh one, for one sequence; `stop` holds no empty string."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known once the engine is ready."""

    info: EngineInfo
    text: TextModel


class OutputStream:
    """One request's outputs as an async iterator; ends after the output that has a finish_reason.

    Whoever consumes slowly gets several steps' outputs merged into one. Raises RequestError if the engine refused the
    request, EngineDeadError if the engine died. All methods belong to one event loop's thread.
    """

    def __init__(self, request_id: str, on_close: Callable[[str, bool], None]) -> None:
        """on_close(request_id, finished) is called once, by `close`."""
        self.request_id = request_id
        self._on_close = on_close
        self._outputs: list[RequestOutput] = []
        self._failure: Exception | None = None
        self._finished = False
        self._closed = False
        self._event = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds what a step produced."""
        if output.finish_reason is not None:
            self._finished = True
        if output.finish_reason is FinishReason.ERROR:
            self._failure = _as_exception(output)
        else:
            self._outputs.append(output)
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an exception, after what has come already."""
        if not self._finished:
            self._finished = True
            self._failure = error
            self._event.set()

    def close(self) -> None:
        """Must be called by the consumer, however it ends: a request that has not finished is aborted.

        A pending read ends as if the stream had ended.
        """
        if not self._closed:
            self._closed = True
            self._on_close(self.request_id, self._finished)
            self._finished = True
            self._event.set()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if self._finished:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()
        outputs, self._outputs = self._outputs, []
        return outputs[0] if len(outputs) == 1 else _merge(outputs)


class EngineClient(Protocol):
    """An engine, somewhere."""

    @property
    def model(self) -> ServedModel | None:
        """None until the engine has been ready once."""

    def generate(self, request: Request) -> OutputStream:
        """Hands a request to the engine. Raises EngineDeadError at once if there is none to take it."""

    def health(self) -> EngineHealth:
        """How the engine is, from what is known here; asks nobody."""

    async def stats(self) -> EngineStats | None:
        """The engine's figures, fresh; None if it does not answer within a few seconds."""


def _merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    tokens = tuple(token for output in outputs for token in output.new_token_ids)
    return msgspec.structs.replace(outputs[-1], new_token_ids=tokens)


def _as_exception(output: RequestOutput) -> Exception:
    message = output.error or "the engine gave no reason"
    if isinstance(output, RejectedOutput):
        return RequestError(message, param=output.param, code=output.code)
    return EngineDeadError(message)
