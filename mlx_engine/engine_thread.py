"""The one thread that owns MLX: builds the engine, steps it while there is work, sleeps while there is none."""

from __future__ import annotations

import enum
import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from mlx_engine.errors import EngineDeadError, QuireError, RequestError
from mlx_engine.types import EngineInfo, EngineStats, FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)


class SteppableEngine(Protocol):
    """What the thread needs of `mlx_engine.engine.Engine`. Called on the engine thread only."""

    info: EngineInfo

    def add_request(self, request: Request) -> None: ...
    def abort_request(self, request_id: str) -> bool: ...
    def has_unfinished_requests(self) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def check_idle(self) -> None: ...


Progress = Callable[[str, float], None]
Build = Callable[[Progress], SteppableEngine]


class ThreadState(enum.StrEnum):
    """What the engine thread is doing with its life."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ThreadStatus:
    """A picture of the thread that any other thread may take at any time, also while a step hangs."""

    state: ThreadState
    stage: str  # of loading; empty before the first report
    progress: float  # of that stage, 0 to 1
    num_open: int  # requests handed over that have not ended
    last_step_time: float | None  # monotonic, end of the last completed step
    stalled_for: float  # seconds that work has been pending without a step completing; 0 when all is well
    error: str | None = None  # why it is dead
    # Whether the engine could not be built because of its configuration or model: trying again would not help.
    is_permanent: bool = False


class RejectedOutput(RequestOutput, frozen=True):
    """The ERROR output of a request that the engine refused: the request's fault, not the engine's."""

    param: str | None = None
    code: str | None = None


class EngineThread:
    """Runs an engine on a thread of its own. Its methods may be called from any thread.

    Args:
        build: makes the engine; called on the engine thread with a function to report (stage, fraction) to.
        on_outputs: takes each step's outputs, on the engine thread; must be quick and must not raise.
        on_status: told that `status()` has something new to say about loading, being ready or being dead,
            on the engine thread; must be quick and must not raise.

    Every request that `submit` takes ends with exactly one output that has a finish_reason, unless it is aborted:
    then nothing more comes. When `step` raises, the thread ends and every open request gets an ERROR output.
    """

    def __init__(
        self,
        build: Build,
        on_outputs: Callable[[list[RequestOutput]], None],
        on_status: Callable[[], None] | None = None,
    ) -> None:
        self._build = build
        self._on_outputs = on_outputs
        self._on_status = on_status or (lambda: None)
        self._condition = threading.Condition()
        # All below is guarded by the condition, except _engine, which only the engine thread touches.
        self._commands: list[Request | str | Future[EngineStats]] = []
        self._open: dict[str, float] = {}  # request id -> when it was submitted
        self._state = ThreadState.LOADING
        self._stage = ""
        self._progress = 0.0
        self._error: str | None = None
        self._is_permanent = False
        self._info: EngineInfo | None = None
        self._last_step_time: float | None = None
        self._busy_since: float | None = None  # when work became pending after an idle time
        self._stopping = False
        self._engine: SteppableEngine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to build the engine. Call once."""
        self._thread.start()

    def close(self, timeout: float | None = 10.0) -> bool:
        """Ends the thread after the step in hand; open requests get an ERROR output. False if it is still busy."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def info(self) -> EngineInfo | None:
        """What was built; None until the state is READY."""
        with self._condition:
            return self._info

    def status(self) -> ThreadStatus:
        """How the thread is now."""
        with self._condition:
            now = time.monotonic()
            since = max((t for t in (self._busy_since, self._last_step_time) if t is not None), default=now)
            pending = self._state is ThreadState.READY and self._busy_since is not None
            return ThreadStatus(
                state=self._state,
                stage=self._stage,
                progress=self._progress,
                num_open=len(self._open),
                last_step_time=self._last_step_time,
                stalled_for=now - since if pending else 0.0,
                error=self._error,
                is_permanent=self._is_permanent,
            )

    def submit(self, request: Request) -> None:
        """Hands a request over; its outputs go to on_outputs. Requests wait while the engine loads.

        Raises EngineDeadError if the thread has ended, RequestError if the id is open already.
        """
        with self._condition:
            if self._state is ThreadState.DEAD or self._stopping:
                raise EngineDeadError(self._error or "the engine has been stopped")
            if request.request_id in self._open:
                raise RequestError(f"A request with the id {request.request_id} is already being served.")
            self._open[request.request_id] = time.monotonic()
            self._push(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is. Unknown ids and dead threads are ignored."""
        with self._condition:
            if self._open.pop(request_id, None) is not None:
                self._push(request_id)

    def stats(self) -> Future[EngineStats]:
        """The engine's figures, taken between two steps. Fails with EngineDeadError when the thread ends first."""
        future: Future[EngineStats] = Future()
        with self._condition:
            if self._state is ThreadState.DEAD or self._stopping:
                future.set_exception(EngineDeadError(self._error or "the engine has been stopped"))
            else:
                self._push(future)
        return future

    def _push(self, command: Request | str | Future[EngineStats]) -> None:
        self._commands.append(command)
        if self._busy_since is None and not isinstance(command, Future):
            self._busy_since = time.monotonic()
        self._condition.notify()

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        try:
            self._engine = engine = self._build(self._report_progress)
        except BaseException as error:
            self._die(error, "The engine could not be built", is_permanent=isinstance(error, QuireError))
            return
        with self._condition:
            self._info = engine.info
            self._state = ThreadState.READY
            self._stage, self._progress = "", 1.0
            # Requests may have waited for minutes: that time is loading, not a stalled step.
            self._busy_since = time.monotonic() if self._commands else None
        self._on_status()
        try:
            while self._take_commands(engine):
                if engine.has_unfinished_requests():
                    self._step(engine)
        except BaseException as error:
            self._die(error, "The engine failed in a step", is_permanent=False)
        else:
            self._die(None, "The engine was stopped", is_permanent=False)

    def _report_progress(self, stage: str, fraction: float) -> None:
        with self._condition:
            self._stage, self._progress = stage, fraction
        self._on_status()

    def _take_commands(self, engine: SteppableEngine) -> bool:
        """Applies what came in, and waits for more when there is nothing to do. False when it is time to end."""
        while True:
            with self._condition:
                idle = not self._commands and not engine.has_unfinished_requests()
                became_idle = idle and self._busy_since is not None
                if became_idle:
                    self._busy_since = None
                elif idle and not self._stopping:
                    self._condition.wait()
                commands, self._commands = self._commands, []
                if self._stopping:
                    self._commands = commands  # _die answers those that wait for one
                    return False
            if became_idle:
                engine.check_idle()  # an IntegrityError is a bug that must not go on serving
            self._apply(engine, commands)
            if engine.has_unfinished_requests():
                return True

    def _apply(self, engine: SteppableEngine, commands: list[Request | str | Future[EngineStats]]) -> None:
        rejected: list[RequestOutput] = []
        for command in commands:
            if isinstance(command, Future):
                _answer(command, engine)
            elif isinstance(command, str):
                engine.abort_request(command)
            else:
                try:
                    engine.add_request(command)
                except RequestError as error:
                    rejected.append(_rejection(command, error))
        self._emit(rejected)

    def _step(self, engine: SteppableEngine) -> None:
        outputs = engine.step()
        with self._condition:
            self._last_step_time = time.monotonic()
        self._emit(outputs)

    def _emit(self, outputs: list[RequestOutput]) -> None:
        """Passes on what belongs to open requests: what an abort overtook is of no interest to anyone."""
        if not outputs:
            return
        with self._condition:
            wanted = [output for output in outputs if output.request_id in self._open]
            for output in wanted:
                if output.finish_reason is not None:
                    del self._open[output.request_id]
        if wanted:
            self._on_outputs(wanted)

    def _die(self, error: BaseException | None, what: str, *, is_permanent: bool) -> None:
        message = what if error is None else f"{what}: {_describe(error)}"
        if error is not None and not is_permanent:
            logger.error("%s\n%s", message, "".join(traceback.format_exception(error)))
        elif error is not None:
            logger.error("%s", message)
        with self._condition:
            self._error = message
            self._stopping = True  # nothing more is taken
            open_requests, self._open = self._open, {}
            commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, Future) and command.set_running_or_notify_cancel():
                command.set_exception(EngineDeadError(message))
        outputs = [_failure(request_id, arrival, message) for request_id, arrival in open_requests.items()]
        if outputs:
            self._on_outputs(outputs)
        # Last: whoever sees a dead thread has been given all its outputs.
        with self._condition:
            self._state = ThreadState.DEAD
            self._is_permanent = is_permanent
            self._busy_since = None
        self._on_status()


def _answer(future: Future[EngineStats], engine: SteppableEngine) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(engine.stats())
    except BaseException as error:
        future.set_exception(EngineDeadError(f"The engine failed: {_describe(error)}"))
        raise


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"


def _failure(request_id: str, arrival_time: float, message: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        new_token_ids=(),
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_output_tokens=0,
        arrival_time=arrival_time,
        first_scheduled_time=None,
        first_token_time=None,
        error=message,
    )


def _rejection(request: Request, error: RequestError) -> RejectedOutput:
    return RejectedOutput(
        request_id=request.request_id,
        new_token_ids=(),
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        arrival_time=request.arrival_time if request.arrival_time is not None else time.monotonic(),
        first_scheduled_time=None,
        first_token_time=None,
        error=str(error),
        param=error.param,
        code=error.code,
    )
