from __future__ import annotations

import json

import pytest

from loadtest.load.recorder import Recorder, Sample, errors, level_figures
from loadtest.load.sweep import USERS, Level
from loadtest.stream import RequestResult


def _sample(
    started: float,
    *offsets: float,
    tokens: int | None = None,
    ended: float | None = None,
    error: str | None = None,
    unfinished: bool = False,
    tag: str = "a",
) -> Sample:
    end = started + (offsets[-1] if offsets else 0.0) if ended is None else ended
    return Sample(tag, started, end, offsets, 10, tokens, 0, 0, error, unfinished)


def _level(start: float, end: float, entered: float = 0.0) -> Level:
    return Level(2, USERS, entered, start, end, True)


def test_only_tokens_that_came_within_the_time_count_wherever_their_request_ended() -> None:
    samples = [
        _sample(1.0, 1.0, 2.0, 3.0, 4.0, tokens=4),  # at 2, 3, 4, 5: two of them within (2, 4]
        _sample(3.0, 0.5, 1.5, 2.5, tokens=6),  # at 3.5, 4.5, 5.5: one event of two tokens
        _sample(3.0, 0.25, unfinished=True, ended=9.0),  # at 3.25, never ended: an average event's tokens
    ]
    figures = level_figures(_level(2.0, 4.0), samples)
    assert figures["output_tokens"] == pytest.approx(2 + 2 + 10 / 7)
    assert figures["output_tokens_per_second"] == pytest.approx((4 + 10 / 7) / 2)
    assert figures["duration_s"] == 2.0


def test_latencies_are_of_the_requests_that_ended_well_within_the_time() -> None:
    samples = [
        _sample(0.5, 0.25, 0.75, tokens=2),  # ended at 1.25: warm-up
        _sample(1.0, 0.5, 1.5, tokens=2),  # ended at 2.5
        _sample(2.0, 0.25, 1.25, tokens=2),  # ended at 3.25
        _sample(2.0, 0.1, ended=2.2, error="broke"),
        _sample(3.0, 0.5, 2.0, tokens=2),  # ends after the level
    ]
    figures = level_figures(_level(2.0, 4.0), samples)
    assert figures["ttft_s"]["samples"] == [0.5, 0.25]
    assert figures["itl_s"]["samples"] == [1.0, 1.0]
    assert figures["e2e_s"]["samples"] == [1.5, 1.25]
    assert (figures["requests"], figures["failures"], figures["unfinished"]) == (3, 1, 1)
    assert figures["requests_per_second"] == 1.0


def test_requests_of_the_level_before_are_not_of_this_one() -> None:
    samples = [_sample(0.0, 5.5, tokens=1), _sample(5.0, 1.0, tokens=1)]
    figures = level_figures(_level(5.2, 8.0, entered=5.0), samples)
    assert figures["requests"] == 1
    assert figures["ttft_s"]["samples"] == [1.0]
    assert figures["output_tokens"] == 2  # but their tokens came while it was measured


def test_a_request_that_ended_the_warmup_is_not_measured() -> None:
    assert level_figures(_level(2.0, 4.0), [_sample(1.0, 1.0, tokens=1)])["requests"] == 0


def test_figures_are_given_by_tag_too() -> None:
    samples = [_sample(1.0, 0.5, tokens=1, tag="victim"), _sample(1.0, 2.5, tokens=1, tag="intruder")]
    by_tag = level_figures(_level(1.0, 4.0), samples)["by_tag"]
    assert by_tag["victim"]["ttft_s"]["median"] == 0.5
    assert by_tag["intruder"]["ttft_s"]["median"] == 2.5


def test_a_level_without_requests_has_no_figures_and_breaks_nothing() -> None:
    figures = level_figures(Level(1, USERS, 5.0), [])
    assert figures["output_tokens_per_second"] is None
    assert figures["ttft_s"]["median"] is None


def test_a_sample_is_what_its_client_saw() -> None:
    result = RequestResult(100.0, 200, [100.5, 101.0], ended=101.25, completion_tokens=3, retries=1)
    sample = Sample.of("x", result, clock_offset=1000.0)
    assert (sample.started, sample.ended, sample.content) == (1100.0, 1101.25, (0.5, 1.0))
    assert sample.ttft == 0.5
    assert sample.ok
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_unsent_samples_are_given_once() -> None:
    recorder = Recorder()
    recorder.add([_sample(0.0, 1.0), _sample(1.0, 1.0)])
    assert len(recorder.take_unsent()) == 2
    recorder.add([_sample(2.0, 1.0)])
    assert [sample.started for sample in recorder.take_unsent()] == [2.0]
    assert recorder.take_unsent() == []


def test_finished_requests_are_those_that_began_since() -> None:
    recorder = Recorder()
    recorder.add([_sample(0.0, 9.0), _sample(4.0, 2.0), _sample(3.0, 1.0), _sample(5.0, 1.0, unfinished=True)])
    assert recorder.finished_since(3.0) == [4.0, 6.0]


def test_failures_are_counted_by_reason() -> None:
    samples = [_sample(0, error="a"), _sample(0, error="b"), _sample(0, error="a"), _sample(0, 1.0)]
    assert errors(samples) == {"a": 2, "b": 1}
