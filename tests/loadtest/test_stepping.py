from __future__ import annotations

from typing import Any

import pytest

from loadtest import stepping
from loadtest.stepping import StepLoop, random_prompts
from tests.loadtest.fake_gpu_worker import FakeStepper


class Clock:
    """Stands still but for steps, which take a second each, and sleep."""

    def __init__(self, stepper: FakeStepper) -> None:
        self._stepper = stepper
        self.slept = 0.0

    def perf_counter(self) -> float:
        return self._stepper.steps + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


def make(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[FakeStepper, StepLoop, Clock]:
    stepper = FakeStepper(**options)
    clock = Clock(stepper)
    monkeypatch.setattr(stepping, "time", clock)
    return stepper, StepLoop(stepper, 1000), clock


def test_decode_rounds_time_steps_in_which_every_sequence_gets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, loop, _ = make(monkeypatch)
    begun = loop.decode_begin(batch=3, context=10, max_tokens=100, seed=0)
    # One prompt a step, so the third has its first token after 3 s.
    assert begun == {"prefill_tokens_per_s": 10.0}
    first = loop.decode_round(steps=5, skip=2)
    assert first["step_ms"] == 1000.0
    assert first["gaps_ms"] == [1000.0] * 5
    assert first["counters"] == {"steps": 8}, "2 skipped, 1 to begin at, 5 counted"
    assert loop.decode_round(steps=5, skip=2)["counters"] == {"steps": 8}
    loop.end()
    assert not stepper.busy()
    assert stepper.settled == 1


def test_steps_that_leave_sequences_out_are_time_but_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop, _ = make(monkeypatch, partial_every=3)
    loop.decode_begin(batch=2, context=10, max_tokens=100, seed=0)
    found = loop.decode_round(steps=8, skip=0)
    assert sorted(found["gaps_ms"]) == [1000.0] * 4 + [2000.0] * 4
    assert found["step_ms"] == 1500.0


def test_a_case_may_follow_one_that_was_ended_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop, _ = make(monkeypatch, fail_at=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.decode_begin(batch=3, context=10, max_tokens=100, seed=0)
    loop.end()
    assert loop.prefill(batch=4, context=10, seed=0)["seconds"] == 4.0


def test_an_engine_that_can_not_come_to_rest_gives_its_memory_back_and_the_next_case_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepper, loop, _ = make(monkeypatch)
    loop.decode_begin(batch=3, context=10, max_tokens=100, seed=0)
    abort = stepper.abort

    def fails(request_ids: Any) -> None:
        abort(request_ids)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stepper, "abort", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.end()
    assert stepper.settled == 1
    loop.decode_begin(batch=2, context=10, max_tokens=100, seed=0)
    assert len(loop.decode_round(steps=3, skip=0)["gaps_ms"]) == 3


def test_sequences_that_end_too_soon_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop, _ = make(monkeypatch)
    # Admitted one a step, the first of three is two tokens ahead of the last.
    loop.decode_begin(batch=3, context=10, max_tokens=8, seed=0)
    with pytest.raises(RuntimeError, match="1 of 3 sequences ended before the round was over"):
        loop.decode_round(steps=5, skip=0)
    with pytest.raises(RuntimeError, match="1 of 3 sequences ended"):
        loop.decode_round(steps=1, skip=0)
    loop.end()
    loop.decode_begin(batch=3, context=10, max_tokens=2, seed=0)
    with pytest.raises(RuntimeError, match="2 of 3 sequences ended"):
        loop.decode_round(steps=1, skip=0)


def test_sequences_may_end_with_a_rounds_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, loop, _ = make(monkeypatch)
    loop.decode_begin(batch=1, context=10, max_tokens=5, seed=0)
    assert loop.decode_round(steps=3, skip=0)["gaps_ms"] == [1000.0] * 3
    assert not stepper.busy()


@pytest.mark.parametrize("drafts_from", [2, 5])
def test_steps_of_several_tokens_are_refused(drafts_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop, _ = make(monkeypatch, drafts_from=drafts_from)
    with pytest.raises(RuntimeError, match=r"gave a sequence 3 tokens.*make bench-drafts"):  # noqa: PT012
        loop.decode_begin(batch=2, context=10, max_tokens=100, seed=0)
        loop.decode_round(steps=5, skip=0)
    loop.end()
    assert loop.arrivals([(0.0, 5, 6)], temperature=0.0, seed=0, limit_s=10.0)["output_tokens"] == 6


def test_prefill_ends_when_every_prompt_has_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, loop, _ = make(monkeypatch)
    found = loop.prefill(batch=4, context=50, seed=7)
    assert (found["seconds"], found["tokens_per_s"]) == (4.0, 50.0)
    assert [len(prompt) for prompt in stepper.prompts] == [50] * 4


def test_arrivals_are_served_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, loop, clock = make(monkeypatch)
    requests = [(0.0, 5, 3), (0.5, 6, 2), (10.0, 7, 2)]
    found = loop.arrivals(requests, temperature=0.0, seed=0, limit_s=100.0)
    # The first's tokens come at 1, 2 and 3 s; the second is taken in at 1 s, between steps, and has its at 2 and 3.
    # Then nothing runs until the third arrives.
    assert found["ttft_s"] == [1.0, 1.5, 1.0]
    assert found["itl_s"] == [1.0, 1.0, 1.0, 1.0]
    assert (found["seconds"], found["output_tokens"], found["unfinished"]) == (12.0, 7, 0)
    assert found["output_tokens_per_s"] == pytest.approx(7 / 12)
    assert clock.slept == 7.0
    assert [len(prompt) for prompt in stepper.prompts] == [5, 6, 7]


def test_arrivals_that_take_too_long_are_ended_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, loop, _ = make(monkeypatch)
    found = loop.arrivals([(0.0, 5, 3), (0.0, 5, 50), (90.0, 5, 5)], temperature=0.0, seed=0, limit_s=10.0)
    assert found["unfinished"] == 2
    assert found["output_tokens"] == 3 + 10
    assert not stepper.busy()


def test_prompts_are_the_same_for_the_same_seed_and_inside_the_vocabulary() -> None:
    prompts = random_prompts(1, [40, 0, 3], 200)
    assert prompts == random_prompts(1, [40, 0, 3], 200)
    assert prompts != random_prompts(2, [40, 0, 3], 200)
    assert [len(prompt) for prompt in prompts] == [40, 0, 3]
    ids = [token for prompt in random_prompts(3, [5000], 200) for token in prompt]
    assert set(ids) == set(range(10, 200))
    assert max(max(prompt) for prompt in random_prompts(3, [200_000], 128_256)) <= 10 + 0xFFFF
