"""What each experiment measures, of a server that pretends, and what it concludes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loadtest.client import Client
from loadtest.experiments.attention import Attention, decode_gaps
from loadtest.experiments.base import Experiment, Record, Session
from loadtest.experiments.batching import Batching
from loadtest.experiments.chunking import Chunking
from loadtest.experiments.load import Ask, closed_loop, mixed_asks, until, watched
from loadtest.experiments.paging import Paging
from loadtest.experiments.preemption import Preemption
from loadtest.experiments.prefix import Prefix, expected_cached
from loadtest.prompts import PromptSource
from loadtest.serve_cases import CaseError
from loadtest.stream import RequestResult
from tests.loadtest.sse_server import Exchange, SSEServer


class FakeEngine:
    """Answers like a server with a prefix cache of whole blocks."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.cached: set[tuple[int, ...]] = set()
        self.steps = 0
        self.lengths: list[int] = []

    async def __call__(self, exchange: Exchange) -> None:
        prompt, count = exchange.request["prompt"], exchange.request["max_tokens"]
        blocks = [tuple(prompt[:end]) for end in range(self.block_size, len(prompt) + 1, self.block_size)]
        found = max((len(b) for b in blocks if b in self.cached and len(b) < len(prompt)), default=0)
        self.cached |= set(blocks)
        self.lengths.append(count)
        await exchange.start()
        for _ in range(count):
            self.steps += 1
            await asyncio.sleep(0.002)
            await exchange.text("x")
        await exchange.text("", "length")
        await exchange.usage(len(prompt), count, found)
        await exchange.event("[DONE]")
        await exchange.finish()


def _on_server(engine: FakeEngine, run: Callable[[Session], Awaitable[Any]]) -> Any:
    async def serve() -> Any:
        async with SSEServer(engine) as server, Client(server.url, "m", timeout_s=60) as client:
            server.count_steps = lambda: engine.steps
            return await run(Session("arm", 0, client, PromptSource(range(1000)), 0, server.url, "m"))

    return asyncio.run(serve())


def _measured(experiment: Experiment, engine: FakeEngine, arm: str) -> Record:
    record = Record()

    async def run(session: Session) -> None:
        session.arm = arm
        await experiment.warm_up(session)
        await experiment.measure(session, record)

    _on_server(engine, run)
    return record


def _failed(experiment: Experiment, record: Record) -> list[str]:
    experiment.conclude(record)
    return [check.name for check in record.checks if not check.passed]


def test_mixed_lengths_are_the_same_for_the_same_seed_and_reach_both_ends() -> None:
    first, again = (mixed_asks(PromptSource(range(1000)), 200, (3, 5), (8, 10), 7) for _ in range(2))
    assert first == again
    assert {len(ask.prompt) for ask in first} == {3, 4, 5}
    assert {ask.max_tokens for ask in first} == {8, 9, 10}


def test_a_loop_gives_each_request_its_own_length_and_keeps_their_order() -> None:
    asks = [Ask([index], 1 + index % 3) for index in range(7)]
    loop = _on_server(FakeEngine(), lambda session: closed_loop(session.client, asks, 3, 0.001))
    assert [result.completion_tokens for result in loop.requests] == [ask.max_tokens for ask in asks]
    assert loop.output_tokens == sum(ask.max_tokens for ask in asks)


def test_metrics_are_watched_until_the_load_ends() -> None:
    async def run(session: Session) -> int:
        async with watched(session.client, 0.005) as pages:
            await until(lambda: len(pages) > 3, "four pages", 30)
        return len(pages)

    assert _on_server(FakeEngine(), run) > 3
    with pytest.raises(CaseError, match="never: not in 0 s"):
        asyncio.run(until(lambda: False, "never", 0))


def test_batching_counts_tokens_per_step() -> None:
    experiment = Batching.quick()
    record = _measured(experiment, FakeEngine(), "continuous")
    assert record.samples("tokens per step", "continuous", "6 clients") == [1.0]
    assert len(record.samples("TTFT", "continuous", "6 clients")) == 12
    assert _failed(experiment, record) == ["continuous batching fills the steps better"]
    record.add("tokens per step", "", "waves", [0.5], better="higher", case="6 clients")
    record.checks.clear()
    assert _failed(experiment, record) == []


@pytest.mark.parametrize(
    ("shared", "prompt", "block_size", "expected"),
    [(15, 35, 16, 0), (16, 36, 16, 16), (16, 16, 16, 0), (17, 17, 16, 16), (33, 53, 32, 32), (256, 276, None, 0)],
)
def test_whole_blocks_are_cached_but_never_the_last_token(
    shared: int, prompt: int, block_size: int | None, expected: int
) -> None:
    assert expected_cached(shared, prompt, block_size) == expected


def test_prefix_compares_each_count_with_the_expected_one() -> None:
    experiment = Prefix.quick()
    record = _measured(experiment, FakeEngine(16), "blocks of 16")
    assert _failed(experiment, record) == ["cached tokens, blocks of 32", "cached tokens, no cache"]
    assert record.samples("TTFT, prefix seen", "blocks of 16", "256 of 276 tokens shared")
    series = next(s for s in record.series if s.name == "cached tokens, blocks of 16")
    assert (list(series.x), list(series.y)) == ([15, 16, 17, 32, 33, 256], [0, 16, 16, 32, 32, 256])
    wrong = _measured(experiment, FakeEngine(32), "blocks of 16")
    assert "cached tokens, blocks of 16" in _failed(experiment, wrong)


def test_chunking_times_the_long_prompt_alone_and_among_streams() -> None:
    experiment = Chunking.quick()
    record = _measured(experiment, FakeEngine(), "64")
    assert len(record.samples("TTFT of the long prompt alone", "64")) == 1
    assert len(record.samples("TTFT of the long prompt among streams", "64")) == 1
    assert len(record.samples("ITL of the streams before", "64")) >= 14
    assert len(record.samples("ITL of the streams meanwhile", "64")) >= 2


def test_chunking_wants_more_steps_of_smaller_ones() -> None:
    record = Record()
    for size, steps in ((64, 9), (512, 3)):
        record.add("steps of the long prompt", "", str(size), [steps], better="lower")
    assert _failed(Chunking(), record) == []
    record.add("steps of the long prompt", "", "1024", [3], better="lower")
    record.checks.clear()
    assert _failed(Chunking(), record) == ["smaller steps are more steps"]


def test_attention_caches_its_prompts_before_it_times_them() -> None:
    class Dispatching(FakeEngine):
        async def __call__(self, exchange: Exchange) -> None:
            prompts.append(exchange.request["prompt"])
            await super().__call__(exchange)

    prompts: list[list[int]] = []
    experiment = Attention(contexts=(32, 96), batches=(1, 2, 4), most_tokens=200, output_tokens=6)
    assert experiment.cases() == [(32, 1), (32, 2), (32, 4), (96, 1), (96, 2)]
    record = _measured(experiment, Dispatching(), "in place")
    asked = prompts[2:]  # after the warm-up
    assert sorted(map(len, asked[:4])) == [32, 32, 96, 96]
    assert [len(prompt) for prompt in asked[4:]] == [32] * 7 + [96] * 3
    known = {tuple(prompt[:31]) for prompt in asked[:4]}
    assert all(tuple(prompt[:31]) in known for prompt in asked[4:])
    assert len(record.samples("time between tokens", "in place", "2 x 96 tokens")) >= 2


def test_tokens_are_timed_only_while_all_sequences_decode() -> None:
    streams = [
        RequestResult(0.0, content_times=[1.0, 2.0, 3.0, 4.0]),
        RequestResult(0.0, content_times=[1.5, 2.5, 3.5]),
    ]
    assert decode_gaps(streams) == [1.0, 1.0, 1.0]  # 2 to 3, 1.5 to 2.5, 2.5 to 3.5
    with pytest.raises(CaseError, match="never decoded"):
        decode_gaps([RequestResult(0.0, content_times=[1.0, 2.0]), RequestResult(0.0, content_times=[3.0, 4.0])])
    with pytest.raises(CaseError, match="no text"):
        decode_gaps([RequestResult(0.0)])


@pytest.mark.parametrize(
    ("in_place", "gathered", "passes"),
    [
        ({"paged_matmul": 9, "chunk_tiled": 3}, {"gather_sdpa": 9, "chunk_sdpa": 3}, True),
        ({"gather_sdpa": 9}, {"gather_sdpa": 9}, False),
        ({"paged_matmul": 9}, {"gather_sdpa": 9, "paged_matmul": 1}, False),
        ({"paged_matmul": 9}, {}, False),
        ({"chunk_sdpa": 9}, {"gather_sdpa": 9}, False),
    ],
)
def test_attention_must_have_taken_two_paths(in_place: dict[str, int], gathered: dict[str, int], passes: bool) -> None:
    record = Record()
    for arm, counts in (("in place", in_place), ("gathered", gathered)):
        for path, count in counts.items():
            record.count(arm, f"attention_dispatch {path}", count)
    assert (_failed(Attention(), record) == []) is passes


def test_paging_must_waste_less_and_admit_more() -> None:
    record = Record()
    for arm, wasted, running in (("paged", 5.0, 12), ("contiguous", 80.0, 4)):
        record.add("reserved slots that hold no token", "%", arm, [wasted], better="lower")
        record.add("sequences at once", "", arm, [running], better="higher")
    assert _failed(Paging(), record) == []
    record.add("reserved slots that hold no token", "%", "paged", [90.0, 90.0], better="lower")
    record.checks.clear()
    assert _failed(Paging(), record) == ["paging reserves less for nothing"]
    assert _failed(Paging(), Record()) == ["both arms were measured"]


def _preempted(**texts: list[str]) -> Record:
    record = Record()
    for arm, count in (("ample", 0), ("tight", 0), ("very tight", 5)):
        record.add("preemptions", "", arm, [count], better="lower")
        record.count(arm, "preemptions during the compared answers", count)
        record.outputs[arm] = texts.get(arm.replace(" ", "_"), ["a", "b"])
    return record


def test_preemption_must_happen_and_change_no_answer() -> None:
    assert _failed(Preemption(), _preempted()) == []
    assert _failed(Preemption(), _preempted(very_tight=["a", "c"])) == ["same answers, very tight"]
    quiet = _preempted()
    quiet.counters.clear()
    assert _failed(Preemption(), quiet) == ["running sequences are preempted when memory is short"]
    busy = _preempted()
    busy.add("preemptions", "", "ample", [1], better="lower")
    assert _failed(Preemption(), busy) == ["nothing is preempted with ample memory"]
