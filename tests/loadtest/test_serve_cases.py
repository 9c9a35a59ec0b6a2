from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.bench_serve import main, parse_args, render
from loadtest.client import Client
from loadtest.prompts import PromptSource
from loadtest.serve_cases import CaseError, Gaps, PrefixTTFT, Throughput, gap_trial, prefix_pair, split_gaps
from loadtest.serve_cases import throughput_round as one_round
from loadtest.stream import RequestResult
from tests.loadtest.sse_server import Exchange, Respond, SSEServer


def _stream(*times: float) -> RequestResult:
    return RequestResult(0.0, content_times=list(times))


def test_gaps_are_told_apart_by_the_time_that_they_overlap() -> None:
    before, during = split_gaps([_stream(1, 2, 3, 7, 8, 9), _stream(1.5, 2.5, 8.5)], start=2.75, end=8)
    # 3-7 and 7-8 lie inside, 2-3 and 2.5-8.5 reach into it, 8-9 begins when it is over.
    assert before == [1, 1]
    assert during == [1, 4, 1, 6]


@pytest.mark.parametrize("stream", [_stream(), _stream(1, 2, 7)])
def test_a_stream_that_may_have_been_over_shows_nothing(stream: RequestResult) -> None:
    with pytest.raises(CaseError, match="nothing to see"):
        split_gaps([stream], start=3, end=8)


class FakeServer:
    """Answers like a server with a prefix cache; remembers the first 16 tokens of each prompt."""

    def __init__(self, caches: bool = True) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.caches = caches
        self.tokens_missing = 0
        self.steps = 0

    async def __call__(self, exchange: Exchange) -> None:
        prompt = tuple(exchange.request["prompt"])
        cached = 16 if self.caches and prompt[:16] in self.seen else 0
        self.seen.add(prompt[:16])
        count = exchange.request["max_tokens"] - self.tokens_missing
        await exchange.start()
        self.steps += -(-len(prompt) // 16) + count - 1
        for _ in range(count):
            await asyncio.sleep(0.001)
            await exchange.text("x")
        await exchange.text("", "length")
        await exchange.usage(len(prompt), count, cached)
        await exchange.event("[DONE]")
        await exchange.finish()


def _with_client(respond: Respond, measure: Any) -> Any:
    async def run() -> Any:
        async with SSEServer(respond) as server, Client(server.url, "m", timeout_s=60) as client:
            if isinstance(respond, FakeServer):
                server.count_steps = lambda: respond.steps
            return await measure(client)

    return asyncio.run(run())


def test_a_prefix_is_timed_cold_and_then_cached() -> None:
    found = PrefixTTFT(prefix_tokens=32)
    prompts = PromptSource(range(1000))

    async def measure(client: Client) -> None:
        await prefix_pair(found, client, prompts)
        await prefix_pair(found, client, prompts)

    _with_client(FakeServer(), measure)
    result = found.to_json()
    assert result["cold_ttft_s"]["count"] == result["cached_ttft_s"]["count"] == 2
    assert result["cached_tokens"] == [16, 16]
    assert result["ratios_by_prefix"] == [b / a for a, b in zip(found.cold, found.cached, strict=True)]
    with pytest.raises(CaseError, match="nothing of a prefix"):
        _with_client(FakeServer(caches=False), lambda client: prefix_pair(found, client, prompts))
    assert len(found.cold) == 2


def _in_process(prompts: list[list[int]], max_tokens: int, concurrency: int) -> dict[str, Any]:
    times = [[0.1 * (index + 1) for index in range(max_tokens)] for _ in prompts]
    tokens = [[0] * max_tokens for _ in prompts]
    return {"tokens": tokens, "times": times, "cached_tokens": 0, "dispatch": {"path": concurrency}}


def test_a_round_gives_a_rate_of_each_kind() -> None:
    found = Throughput(clients=2)
    prompts = [[index, 1, 2] for index in range(4)]
    _with_client(FakeServer(), lambda client: one_round(found, client, _in_process, prompts, 5))
    assert found.in_process == [pytest.approx(20 / 0.5)]
    assert len(found.http) == 1
    assert len(found.ttft) == 4
    assert len(found.itl) == 16
    assert found.dispatch == {"path": 2}


def test_a_server_that_gives_too_few_tokens_gives_no_sample() -> None:
    server = FakeServer()
    server.tokens_missing = 1
    found = Throughput(clients=2)
    with pytest.raises(CaseError, match="4 tokens"):
        _with_client(server, lambda client: one_round(found, client, _in_process, [[1, 2]], 5))
    assert found.http == found.in_process == []


def test_a_long_prompt_is_timed_alone_and_among_streams() -> None:
    found = Gaps(streams=2, prompt_tokens=40)
    _with_client(FakeServer(), lambda client: gap_trial(found, client, PromptSource(range(1000)), 8))
    result = found.to_json()
    assert result["num_chunks"] == 3
    assert result["chunk_s"] == found.alone[0] / 3
    assert result["gap_before_s"]["count"] > 0
    assert result["largest_gap_s"] == max(found.during[0])
    assert result["largest_gap_in_chunks"] == pytest.approx(max(found.during[0]) / (found.alone[0] / 3))


def test_tables_hold_what_was_measured_and_dashes_for_the_rest() -> None:
    throughput = Throughput(32, http=[90.0, 80.0], in_process=[100.0, 100.0], ttft=[0.5], itl=[0.01, 0.03])
    table = render([throughput, PrefixTTFT(1500), Gaps(8, 6000)])
    row = next(line for line in table.splitlines() if line.startswith("| 32"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "32", "85.0", "100.0", "0.85", "0.80 to 0.90", "0.85", "500", "20.0", "29.0",
    ]  # fmt: skip
    assert "1500 + 20 tokens" in table
    assert "0 x -" in table


def test_the_issues_loads_are_the_defaults() -> None:
    args = parse_args([])
    assert args.clients == [1, 8, 32]
    assert (args.prefix_tokens, args.long_prompt_tokens, args.streams) == (1500, 6000, 8)
    assert args.part == ["throughput", "prefix", "gap"]
    assert parse_args(["--part", "gap", "--quick"]).part == ["gap"]


def test_a_variable_that_only_the_server_heeds_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_ENGINE__MAX_NUM_SEQS", "3")
    assert main(["--quick"]) == 2
    assert "QUIRE_ENGINE__MAX_NUM_SEQS" in capsys.readouterr().err
