from __future__ import annotations

import math

import pytest

from loadtest.load.sweep import REQUESTS_PER_SECOND, USERS, LevelPlan, Sweep


def _by_requests(*values: float, per_user: int = 2, timeout_s: float = 100.0) -> LevelPlan:
    return LevelPlan(values, USERS, per_user, 0.0, 0.0, timeout_s)


def test_a_level_is_measured_between_the_ends_of_requests_and_not_between_looks() -> None:
    sweep = Sweep(_by_requests(2), now=10.0)
    sweep.advance(11.0, [10.5])
    assert sweep.current.measured_from is None
    sweep.advance(12.0, [10.5, 10.75, 11.5])
    assert sweep.current.measured_from == 10.75
    assert not sweep.done
    sweep.advance(15.0, [10.5, 10.75, 11.5, 11.6, 13.0, 13.25, 14.0])
    assert sweep.done
    level = sweep.current
    assert (level.ended, level.complete) == (13.25, True)


def test_levels_follow_each_other_and_begin_when_the_next_is_entered() -> None:
    sweep = Sweep(_by_requests(1, 4), now=0.0)
    sweep.advance(5.0, [1.0, 2.0, 3.0])
    assert [level.value for level in sweep.levels] == [1, 4]
    assert sweep.current.entered == 5.0
    assert not sweep.done


def test_a_level_that_takes_too_long_is_cut_and_ends_the_sweep() -> None:
    sweep = Sweep(_by_requests(1, 4, timeout_s=30.0), now=0.0)
    sweep.advance(29.0, [20.0])
    assert not sweep.done
    sweep.advance(31.0, [20.0])
    assert sweep.done
    assert len(sweep.levels) == 1
    assert (sweep.current.measured_from, sweep.current.ended, sweep.current.complete) == (20.0, 31.0, False)


def test_levels_by_time_drop_their_warmup() -> None:
    sweep = Sweep(LevelPlan((0.5, 2.0), REQUESTS_PER_SECOND, 0, 10.0, 3.0, math.inf), now=100.0)
    sweep.advance(102.0, [])
    assert sweep.current.measured_from is None
    sweep.advance(104.0, [])
    assert sweep.current.measured_from == 103.0
    sweep.advance(113.5, [])
    assert sweep.levels[0].ended == 113.0
    assert sweep.levels[0].complete
    assert sweep.current.value == 2.0


@pytest.mark.parametrize("complete", [True, False])
def test_a_run_that_is_stopped_keeps_what_was_measured(complete: bool) -> None:
    sweep = Sweep(LevelPlan((5,), USERS, 0, math.inf, 2.0, math.inf), now=0.0)
    sweep.advance(3.0, [])
    sweep.stop(7.0, complete)
    assert (sweep.current.measured_from, sweep.current.ended, sweep.current.complete) == (2.0, 7.0, complete)
    sweep.advance(9.0, [])
    sweep.stop(9.0, True)
    assert sweep.current.ended == 7.0


@pytest.mark.parametrize("values", [(), (0,), (2, -1)])
def test_levels_must_be_above_zero(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        _by_requests(*values)


def test_a_level_needs_an_end() -> None:
    with pytest.raises(ValueError, match="requests or of seconds"):
        LevelPlan((1,), USERS, 0, 0.0, 0.0, 10.0)
