"""The engine thread over a scripted engine: life, death, submissions, aborts, and what it reports meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mlx_engine.engine_thread import EngineThread, Progress, RejectedOutput, ThreadState
from mlx_engine.errors import ConfigError, EngineDeadError, IntegrityError, RequestError
from mlx_engine.types import (
    EngineInfo,
    EngineStats,
    FinishReason,
    KVCacheUsage,
    Request,
    RequestOutput,
    SamplingParams,
)

DEADLINE_S = 20.0
INFO = EngineInfo("m", 64, 100, frozenset({2}), 64, 4, 16, "cpu", "float32", "float32")


def request(request_id: str, max_tokens: int = 3) -> Request:
    return Request(request_id, (5, 6, 7), SamplingParams(max_tokens=max_tokens))


class ScriptedEngine:
    """One token per request and step, until max_tokens. Hooks make it fail or hang."""

    def __init__(self) -> None:
        self.info = INFO
        self.threads: set[int] = set()
        self.num_steps = 0
        self.num_idle_checks = 0
        self.on_step: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None
        self.refuse: RequestError | None = None
        self._running: dict[str, tuple[Request, int]] = {}

    def _seen(self) -> None:
        self.threads.add(threading.get_ident())

    def add_request(self, request: Request) -> None:
        self._seen()
        if self.refuse is not None:
            raise self.refuse
        self._running[request.request_id] = (request, 0)

    def abort_request(self, request_id: str) -> bool:
        self._seen()
        return self._running.pop(request_id, None) is not None

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        self._seen()
        self.num_steps += 1
        self.on_step()
        outputs = []
        for request_id, (item, count) in list(self._running.items()):
            done = count + 1 == item.sampling.max_tokens
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    new_token_ids=(count,),
                    finish_reason=FinishReason.LENGTH if done else None,
                    num_prompt_tokens=len(item.prompt_token_ids),
                    num_cached_tokens=0,
                    num_output_tokens=count + 1,
                    arrival_time=0.0,
                    first_scheduled_time=0.0,
                    first_token_time=0.0,
                )
            )
            self._running[request_id] = (item, count + 1)
            if done:
                del self._running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        self._seen()
        kv = KVCacheUsage(4, 16, 4, 0, 0, 0, 0.0, 0.0)
        return EngineStats(self.num_steps, len(self._running), 0, kv, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def check_idle(self) -> None:
        self._seen()
        self.num_idle_checks += 1
        self.on_idle()


class Collector:
    """Outputs by request, and a way to wait for them."""

    def __init__(self) -> None:
        self.by_id: dict[str, list[RequestOutput]] = {}
        self.changed = threading.Condition()

    def __call__(self, outputs: list[RequestOutput]) -> None:
        with self.changed:
            for output in outputs:
                self.by_id.setdefault(output.request_id, []).append(output)
            self.changed.notify_all()

    def end_of(self, request_id: str) -> RequestOutput:
        def ended() -> bool:
            return bool(self.by_id.get(request_id)) and self.by_id[request_id][-1].finish_reason is not None

        with self.changed:
            assert self.changed.wait_for(ended, DEADLINE_S), f"{request_id} never ended"
            return self.by_id[request_id][-1]


@contextmanager
def running(
    engine: ScriptedEngine, build: Callable[[Progress], ScriptedEngine] | None = None
) -> Iterator[tuple[EngineThread, Collector]]:
    collector = Collector()
    thread = EngineThread(build or (lambda progress: engine), collector)
    thread.start()
    try:
        yield thread, collector
    finally:
        engine.on_step = lambda: None
        assert thread.close(DEADLINE_S)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def test_tokens_arrive_and_one_thread_touches_the_engine() -> None:
    engine = ScriptedEngine()
    built_on: list[int] = []

    def build(progress: Progress) -> ScriptedEngine:
        built_on.append(threading.get_ident())
        return engine

    with running(engine, build) as (thread, collector):
        thread.submit(request("a", 4))
        thread.submit(request("b", 2))
        assert collector.end_of("a").finish_reason is FinishReason.LENGTH
        collector.end_of("b")
        assert [t for output in collector.by_id["a"] for t in output.new_token_ids] == [0, 1, 2, 3]
        assert thread.stats().result(DEADLINE_S).num_running == 0
    assert engine.threads == set(built_on)
    assert threading.get_ident() not in engine.threads


def test_it_sleeps_while_there_is_nothing_to_do_and_checks_integrity_once_before() -> None:
    engine = ScriptedEngine()
    with running(engine) as (thread, collector):
        thread.submit(request("a"))
        collector.end_of("a")
        wait_for(lambda: engine.num_idle_checks == 1, "an integrity check")
        steps = engine.num_steps
        thread.stats().result(DEADLINE_S)  # looking at it is no work
        time.sleep(0.2)
        assert engine.num_steps == steps == 3
        assert engine.num_idle_checks == 1


def test_requests_wait_while_the_engine_loads_and_progress_is_visible() -> None:
    engine = ScriptedEngine()
    go_on = threading.Event()

    def build(progress: Progress) -> ScriptedEngine:
        progress("load", 0.25)
        assert go_on.wait(DEADLINE_S)
        return engine

    with running(engine, build) as (thread, collector):
        wait_for(lambda: thread.status().stage == "load", "progress")
        status = thread.status()
        assert (status.state, status.progress) == (ThreadState.LOADING, 0.25)
        assert thread.info is None
        thread.submit(request("early"))
        assert thread.status().stalled_for == 0.0, "loading is not stalling"
        go_on.set()
        assert collector.end_of("early").finish_reason is FinishReason.LENGTH
        assert thread.status().state is ThreadState.READY
        assert thread.info == INFO


@pytest.mark.parametrize(("error", "permanent"), [(ConfigError("no such scheduler"), True), (OSError("disk"), False)])
def test_a_build_that_fails_is_told_and_ends_what_waits(error: Exception, permanent: bool) -> None:
    go_on = threading.Event()

    def build(progress: Progress) -> ScriptedEngine:
        assert go_on.wait(DEADLINE_S)
        raise error

    with running(ScriptedEngine(), build) as (thread, collector):
        thread.submit(request("early"))
        go_on.set()
        end = collector.end_of("early")
        assert end.finish_reason is FinishReason.ERROR
        assert str(error) in (end.error or "")
        wait_for(lambda: thread.status().state is ThreadState.DEAD, "death")
        assert thread.status().is_permanent is permanent
        with pytest.raises(EngineDeadError, match=str(error)):
            thread.submit(request("late"))


def test_an_exception_in_a_step_ends_the_thread_and_every_open_request_once() -> None:
    engine = ScriptedEngine()

    def explode() -> None:
        if engine.num_steps == 3:
            raise RuntimeError("kernel fault")

    engine.on_step = explode
    with running(engine) as (thread, collector):
        for name in "abc":
            thread.submit(request(name, 50))
        for name in "abc":
            end = collector.end_of(name)
            assert end.finish_reason is FinishReason.ERROR
            assert "kernel fault" in (end.error or "")
        wait_for(lambda: thread.status().state is ThreadState.DEAD, "death")
        steps = engine.num_steps
        time.sleep(0.2)
        assert engine.num_steps == steps, "a dead engine must not be stepped again"
        assert all(sum(o.finish_reason is not None for o in outputs) == 1 for outputs in collector.by_id.values())
        with pytest.raises(EngineDeadError):
            thread.stats().result(DEADLINE_S)
        assert not thread.status().is_permanent


def test_broken_books_end_the_thread() -> None:
    engine = ScriptedEngine()

    def unbalanced() -> None:
        raise IntegrityError("block 3 is free and cached")

    engine.on_idle = unbalanced
    with running(engine) as (thread, collector):
        thread.submit(request("a"))
        assert collector.end_of("a").finish_reason is FinishReason.LENGTH
        wait_for(lambda: thread.status().state is ThreadState.DEAD, "death")
        assert "block 3" in (thread.status().error or "")


def test_a_refused_request_fails_alone_with_its_field() -> None:
    engine = ScriptedEngine()
    gate = threading.Event()
    engine.on_step = lambda: gate.wait(0.01) and None
    with running(engine) as (thread, collector):
        thread.submit(request("good", 20))
        wait_for(lambda: engine.num_steps > 0, "a step")
        engine.refuse = RequestError("too long", param="prompt", code="context_length_exceeded")
        thread.submit(request("bad"))
        end = collector.end_of("bad")
        assert isinstance(end, RejectedOutput)
        assert (end.finish_reason, end.error, end.param, end.code) == (
            FinishReason.ERROR,
            "too long",
            "prompt",
            "context_length_exceeded",
        )
        assert collector.end_of("good").finish_reason is FinishReason.LENGTH


def test_an_abort_frees_the_request_and_nothing_more_comes_of_it() -> None:
    engine = ScriptedEngine()
    with running(engine) as (thread, collector):
        thread.submit(request("gone", 10**6))
        thread.submit(request("stays", 10**6))
        wait_for(lambda: len(collector.by_id.get("gone", [])) > 2, "outputs")
        thread.abort("gone")
        wait_for(lambda: thread.stats().result(DEADLINE_S).num_running == 1, "the slot to be free")
        count = len(collector.by_id["gone"])
        seen = len(collector.by_id["stays"])
        wait_for(lambda: len(collector.by_id["stays"]) > seen + 3, "the other one to go on")
        assert len(collector.by_id["gone"]) == count
        thread.abort("gone")  # again, and unknown ones
        thread.abort("never there")
        thread.abort("stays")
        wait_for(lambda: thread.status().num_open == 0, "an empty engine")


def test_an_abort_in_the_queue_never_starts_the_request() -> None:
    engine = ScriptedEngine()
    hold = threading.Event()

    def build(progress: Progress) -> ScriptedEngine:
        assert hold.wait(DEADLINE_S)
        return engine

    with running(engine, build) as (thread, collector):
        thread.submit(request("a"))
        thread.abort("a")
        hold.set()
        thread.submit(request("b"))
        collector.end_of("b")
        assert "a" not in collector.by_id


def test_an_id_that_is_open_is_refused() -> None:
    engine = ScriptedEngine()
    with running(engine) as (thread, _):
        thread.submit(request("a", 10**6))
        with pytest.raises(RequestError, match="already"):
            thread.submit(request("a"))
        thread.abort("a")
        thread.submit(request("a"))  # free again


def test_a_step_that_hangs_shows_as_stalled_and_a_slow_idle_does_not() -> None:
    engine = ScriptedEngine()
    hang = threading.Event()
    inside = threading.Event()

    def step() -> None:
        inside.set()
        assert hang.wait(DEADLINE_S)

    engine.on_step = step
    with running(engine) as (thread, collector):
        wait_for(lambda: thread.status().state is ThreadState.READY, "ready")
        time.sleep(0.1)
        assert thread.status().stalled_for == 0.0, "idle is healthy"
        thread.submit(request("a", 2))
        assert inside.wait(DEADLINE_S)
        time.sleep(0.15)
        assert thread.status().stalled_for >= 0.15
        assert thread.status().last_step_time is None
        hang.set()
        collector.end_of("a")
        wait_for(lambda: thread.status().stalled_for == 0.0, "healthy again")
        assert thread.status().last_step_time is not None


def test_closing_ends_open_requests_and_refuses_new_ones() -> None:
    engine = ScriptedEngine()
    collector = Collector()
    thread = EngineThread(lambda progress: engine, collector)
    thread.start()
    thread.submit(request("a", 10**6))
    wait_for(lambda: len(collector.by_id.get("a", [])) > 0, "outputs")
    assert thread.close(DEADLINE_S)
    assert collector.end_of("a").finish_reason is FinishReason.ERROR
    with pytest.raises(EngineDeadError):
        thread.submit(request("b"))
