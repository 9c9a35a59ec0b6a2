"""The engine's process, without a process: one stream for everything, steps that merge, and how it says that it is
dead."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deployments import engine_actor
from deployments.engine_actor import Abort, EngineActor, EngineStatus, Event, pack, unpack
from mlx_engine.config import EngineConfig
from mlx_engine.engine_thread import Progress, RejectedOutput, ThreadState
from mlx_engine.errors import ConfigError, EngineDeadError
from mlx_engine.types import FinishReason, RequestOutput
from tests.deployments.fakes import DEADLINE_S
from tests.mlx_engine.test_engine_thread import INFO, ScriptedEngine, request

_engines: list[ScriptedEngine] = []


def build(config: EngineConfig, progress: Progress) -> ScriptedEngine:
    """What the actors of these tests build; the engine is then in _engines."""
    if config.seed == 13:
        raise ConfigError("seed 13 is unlucky")
    progress("load", 0.5)
    engine = ScriptedEngine()
    _engines.append(engine)
    return engine


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_actor, "resolve_model", lambda ref: Path("/models") / ref)
    _engines.clear()


def actor(**config: int) -> EngineActor:
    return EngineActor(EngineConfig.model_validate(config), f"{__name__}:build")


async def until(
    events: AsyncIterator[Event], condition: Callable[[EngineStatus | None, list[RequestOutput]], bool]
) -> tuple[EngineStatus | None, list[RequestOutput], int]:
    """Reads events until the condition holds; (the last status, all outputs, the number of events)."""
    status, outputs, count = None, [], 0
    async with asyncio.timeout(DEADLINE_S):
        async for packed, update in events:
            count += 1
            outputs += [unpack(item) for item in packed]
            status = update or status
            if condition(status, outputs):
                break
    return status, outputs, count


def ready(status: EngineStatus | None, outputs: list[RequestOutput]) -> bool:
    return status is not None and status.thread.state is ThreadState.READY


def test_it_reports_loading_then_ready_and_beats_while_idle() -> None:
    async def scenario() -> None:
        events = actor().events()
        status, _, _ = await until(events, ready)
        assert status is not None
        assert (status.info, status.pid, status.model_path) == (INFO, os.getpid(), Path("/models/embedded"))
        again, outputs, _ = await until(events, lambda status, _: status is not None)
        assert again is not None
        assert outputs == []
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_outputs_come_in_order_and_steps_merge_when_the_reader_lags() -> None:
    async def scenario() -> None:
        subject = actor()
        events = subject.events()
        await until(events, ready)
        await subject.send([request("a", 500), request("b", 500)])
        await asyncio.sleep(0.5)  # the reader is busy with something else, the engine is not
        _, outputs, count = await until(
            events, lambda _, outputs: sum(o.finish_reason is not None for o in outputs) == 2
        )
        for name in "ab":
            tokens = [t for o in outputs if o.request_id == name for t in o.new_token_ids]
            assert tokens == list(range(500))
        assert count < 100, "a thousand outputs came in a few items"
        assert (await subject.stats()).num_running == 0
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_an_abort_ends_a_request_and_refusals_come_in_the_stream() -> None:
    async def scenario() -> None:
        subject = actor()
        events = subject.events()
        await until(events, ready)
        await subject.send([request("a", 10**7), request("a", 5)])
        _, outputs, _ = await until(events, lambda _, outputs: any(isinstance(o, RejectedOutput) for o in outputs))
        refused = next(o for o in outputs if isinstance(o, RejectedOutput))
        assert "already" in (refused.error or "")
        await subject.send([Abort("a"), Abort("unknown")])
        async with asyncio.timeout(DEADLINE_S):
            while (await subject.stats()).num_running:
                await asyncio.sleep(0.01)
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_a_step_that_fails_ends_the_stream_after_the_last_outputs() -> None:
    async def scenario() -> None:
        subject = actor()
        events = subject.events()
        await until(events, ready)
        [engine] = _engines

        def explode() -> None:
            if engine.num_steps > 5:
                raise RuntimeError("kernel fault")

        engine.on_step = explode
        await subject.send([request("a", 1000)])
        status, outputs, _ = await until(events, lambda *_: False)  # to its end
        assert status is not None
        assert status.thread.state is ThreadState.DEAD
        assert "kernel fault" in (status.thread.error or "")
        assert outputs[-1].finish_reason is FinishReason.ERROR
        with pytest.raises(EngineDeadError):
            await subject.stats()

    asyncio.run(scenario())


def test_a_build_that_fails_for_good_says_so() -> None:
    async def scenario() -> None:
        status, _, _ = await until(actor(seed=13).events(), lambda *_: False)
        assert status is not None
        assert status.thread.is_permanent
        assert "unlucky" in (status.thread.error or "")

    asyncio.run(scenario())


def test_the_garbage_collector_passes_over_what_starting_up_made() -> None:
    gc.unfreeze()

    async def scenario() -> int:
        events = actor().events()
        await until(events, ready)
        await events.aclose()  # type: ignore[attr-defined]
        return gc.get_freeze_count()

    try:
        assert asyncio.run(scenario()) > 10_000
    finally:
        gc.unfreeze()


def test_outputs_survive_packing() -> None:
    plain = RequestOutput("a", (1, 2), FinishReason.STOP, 3, 1, 2, 0.5, 1.0, 1.5, 2, None)
    going_on = RequestOutput("a", (), None, 3, 1, 0, 0.5, None, None)
    rejected = RejectedOutput(
        "b", (), FinishReason.ERROR, 3, 0, 0, 0.5, None, None, 0, "too long", "prompt", "context_length_exceeded"
    )
    for output in (plain, going_on, rejected):
        again = unpack(pickle.loads(pickle.dumps(pack(output))))
        assert again == output
        assert type(again) is type(output)
