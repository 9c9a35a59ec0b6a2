"""The simulator: exact virtual time, and a shadow of the pool that notices every wrong read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.config import EngineConfig
from mlx_engine.errors import ConfigError, IntegrityError
from mlx_engine.types import Request, SamplingParams, ScheduledSequence, SchedulerOutput
from plugins.simulated_runner import SimulatedRunner
from plugins.simulator import LinearStepTime, VirtualClock, build_simulated_engine, reference_tokens, simulate

SAMPLING = SamplingParams()


def requests(lengths: list[tuple[float, int, int]]) -> list[Request]:
    """Requests of (arrival, prompt tokens, answer tokens)."""
    return [
        Request(str(i), tuple(range(i, i + n)), SamplingParams(max_tokens=count, ignore_eos=True), arrival_time=arrival)
        for i, (arrival, n, count) in enumerate(lengths)
    ]


def config(**options: Any) -> EngineConfig:
    """A roomy engine without sharing."""
    sizes = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return EngineConfig(**{**sizes, "prefix_cache": "none", "overlap": False, **options})


# -- time -----------------------------------------------------------------------------------------------------------


def test_times_follow_from_the_step_time_alone() -> None:
    """One request of 10 tokens and 3 answers: 1 + 10 * 0.1 s, then 1 + 0.1 s a token."""
    report = simulate(config(), requests([(5.0, 10, 3)]), step_time=LinearStepTime(1.0, per_token=0.1))
    times = report.requests["0"]
    assert times.token_times == pytest.approx([7.0, 8.1, 9.2])
    assert times.ttft == pytest.approx(2.0)
    assert times.itls == pytest.approx([1.1, 1.1])
    assert times.e2e == pytest.approx(4.2)
    assert report.duration == pytest.approx(4.2)
    assert report.throughput == pytest.approx(3 / 4.2)


def test_context_costs_what_is_said() -> None:
    step_time = LinearStepTime(0.0, per_context_token=1.0)
    report = simulate(config(), requests([(0.0, 4, 2)]), step_time=step_time)
    assert report.requests["0"].token_times == [4.0, 9.0]


def test_overlapped_steps_take_as_long_on_the_device() -> None:
    """Overlap hides the host's time, of which a simulation has none: the last token comes at the same moment."""
    work = requests([(0.0, 10, 5), (0.5, 20, 5)])
    ends = [
        simulate(config(overlap=overlap), work, step_time=LinearStepTime(1.0)).requests["0"].finish
        for overlap in (False, True)
    ]
    assert ends[0] == ends[1]


def test_the_clock_jumps_over_idle_times() -> None:
    report = simulate(config(), requests([(0.0, 4, 1), (1000.0, 4, 1)]), step_time=LinearStepTime(1.0))
    assert report.requests["1"].token_times == [1001.0]
    assert report.stats.steps == 2


def test_a_simulation_repeats_exactly() -> None:
    work = requests([(i * 0.3, 5 + 7 * i % 30, 1 + i % 9) for i in range(30)])
    first, second = (simulate(config(num_blocks=20), work, step_time=LinearStepTime(0.1, 0.01)) for _ in range(2))
    assert first == second


def test_static_waves_lose_to_continuous_batching_where_they_should() -> None:
    """What the laboratory is for: a short answer waits for the longest one of its wave."""
    work = requests([(0.1 * i, 8, 40 if i % 4 == 0 else 4) for i in range(40)])
    reports = {
        name: simulate(config(scheduler=name), work, step_time=LinearStepTime(0.02, per_token=0.001))
        for name in ("fcfs", "wave")
    }
    assert reports["fcfs"].percentile("ttft", 50) < 0.3 * reports["wave"].percentile("ttft", 50)
    assert reports["fcfs"].throughput > reports["wave"].throughput


def test_requests_that_are_refused_are_reported_with_the_reason() -> None:
    report = simulate(config(num_blocks=2), requests([(0.0, 50, 1), (0.0, 3, 1)]), step_time=LinearStepTime(1.0))
    assert list(report.requests) == ["1"]
    assert "8 tokens" in report.refused["0"]


def test_percentiles_are_measured_values() -> None:
    report = simulate(config(), requests([(0.0, 1, 5)]), step_time=LinearStepTime(1.0))
    assert [report.percentile("itl", p) for p in (1, 50, 100)] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="0 values"):
        dataclasses.replace(report, requests={}).percentile("ttft", 50)


def test_a_config_without_a_pool_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="set num_blocks"):
        build_simulated_engine(EngineConfig())


# -- the shadow pool ------------------------------------------------------------------------------------------------


def part(
    name: str, start: int, tokens: list[int], table: list[int], num_tokens: int | None = None
) -> ScheduledSequence:
    """One sequence's part of a step, which samples."""
    return ScheduledSequence(name, start, num_tokens or len(tokens), tokens, table, True, 0, SAMPLING, 0)


class Pool:
    """A runner with blocks of 2 tokens, stepped by hand."""

    def __init__(self, **options: Any) -> None:
        self.runner = SimulatedRunner(num_blocks=9, block_size=2, vocab_size=1000, **options)

    def run(self, *sequences: ScheduledSequence) -> dict[str, int]:
        handle = self.runner.execute_model(SchedulerOutput(1, sequences))
        handle.launch()
        return dict(handle.wait().sampled_token_ids)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(prompt=st.lists(st.integers(0, 999), min_size=1, max_size=12), cut=st.integers(1, 12))
def test_tokens_are_the_references_in_any_chunks_and_fed_back_from_the_device(prompt: list[int], cut: int) -> None:
    pool, table, want = Pool(), [5, 2, 7, 1, 9, 3, 4, 6], reference_tokens(prompt, 3, 1000)
    if cut < len(prompt):
        pool.run(part("a", 0, prompt[:cut], table))
    else:
        cut = 0
    got = pool.run(part("a", cut, prompt[cut:], table))["a"]
    assert got == want[0]
    for index in (1, 2):
        got = pool.run(part("a", len(prompt) + index - 1, [], table, 1))["a"]
        assert got == want[index]


def test_domains_have_tokens_of_their_own() -> None:
    pool = Pool(domain=lambda name: name)
    assert pool.run(part("x", 0, [1, 2], [1]))["x"] == reference_tokens([1, 2], 1, 1000, "x")[0]
    assert reference_tokens([1, 2], 5, 1000, "x") != reference_tokens([1, 2], 5, 1000, "y")


def test_shared_blocks_with_the_same_content_are_fine() -> None:
    pool = Pool()
    pool.run(part("a", 0, [1, 2, 3], [4, 5]))
    assert pool.run(part("b", 2, [8], [4, 6]))["b"] == reference_tokens([1, 2, 8], 1, 1000)[0]


WRONG_READS: dict[str, ScheduledSequence] = {
    "another sequence's block": part("b", 2, [8], [7, 6]),
    "a block never written": part("b", 2, [8], [3, 6]),
    "the right block at another position": part("b", 4, [8], [5, 4, 6]),
    "a skipped token": part("b", 4, [8], [4, 5, 6]),
}


@pytest.mark.parametrize("wrong", WRONG_READS)
def test_wrong_reads_are_found_at_the_step_that_reads(wrong: str) -> None:
    pool = Pool(domain=lambda name: "c" if name == "c" else "")
    pool.run(part("a", 0, [1, 2, 3], [4, 5]), part("c", 0, [1, 2, 3], [7, 8]))
    with pytest.raises(IntegrityError, match="step reads slot"):
        pool.run(WRONG_READS[wrong])


def test_without_verify_a_wrong_read_shows_in_the_token() -> None:
    pool = Pool(verify=False, domain=lambda name: "c" if name == "c" else "")
    pool.run(part("a", 0, [1, 2], [4]), part("c", 0, [1, 2], [7]))
    right = reference_tokens([1, 2, 8], 1, 1000)[0]
    assert pool.run(part("b", 2, [8], [4, 6]))["b"] == right
    assert pool.run(part("b", 2, [8], [7, 6]))["b"] != right


def test_overwriting_a_block_in_use_is_found() -> None:
    pool = Pool()
    pool.run(part("a", 0, [1, 2, 3], [4, 5]))
    pool.run(part("b", 0, [9, 9], [4]))
    with pytest.raises(IntegrityError, match="step reads slot"):
        pool.run(part("a", 3, [8], [4, 5]))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([part("a", 0, [1], [0])], "no block for token 0"),
        ([part("a", 0, [1], [10])], "no block for token 0"),
        ([part("a", 0, [1, 2, 3], [1])], "no block for token 2"),
        ([part("a", 0, [1], [1]), part("b", 0, [1], [1])], "two sequences write"),
        ([part("a", 0, [], [1], 1)], "did not sample"),
        ([part("a", 0, [1], [1], 2)], "runs 2 tokens, but brings 1"),
    ],
)
def test_steps_that_make_no_sense_are_refused(sequences: list[ScheduledSequence], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        Pool().run(*sequences)


def test_a_step_handle_keeps_the_order_of_the_contract() -> None:
    runner = SimulatedRunner(num_blocks=9, block_size=2, vocab_size=10, clock=VirtualClock())
    first = runner.execute_model(SchedulerOutput(1, (part("a", 0, [1], [1]),)))
    second = runner.execute_model(SchedulerOutput(2, (part("a", 1, [], [1], 1),)))
    with pytest.raises(IntegrityError, match="never launched"):
        first.wait()
    first.launch()
    with pytest.raises(IntegrityError, match="launched twice"):
        first.launch()
    with pytest.raises(IntegrityError, match="while another one runs"):
        second.launch()
    first.wait()
    second.launch()
    assert runner.dispatch_counts() == {"simulated": 2}
