"""The levels of a sweep: how many users or requests per second, from when to when. A state machine without a clock.

A level is entered, warms up, is measured and ends; its figures come from between its last two moments. Those are
the ends of requests, not the moments at which somebody looked, so that looking once a second costs no accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

USERS = "users"
REQUESTS_PER_SECOND = "requests/s"


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """How a sweep goes. Either requests_per_user is above 0 and counts, or seconds does."""

    values: Sequence[float]  # of users or requests per second
    unit: str
    requests_per_user: int  # measured ones, after as many as there are users have warmed the level up
    seconds: float  # measured, after warmup_s
    warmup_s: float
    timeout_s: float  # a level that isn't done by then is cut, and the sweep ends

    def __post_init__(self) -> None:
        if not self.values or any(value <= 0 for value in self.values):
            raise ValueError(f"levels must be numbers above 0, not {list(self.values)}")
        if self.requests_per_user <= 0 and self.seconds <= 0:
            raise ValueError("a level needs a number of requests or of seconds")


@dataclass(slots=True)
class Level:
    """One level as it went. Times are seconds on the caller's clock."""

    value: float
    unit: str
    entered: float
    measured_from: float | None = None  # warm-up is over
    ended: float | None = None
    complete: bool = False  # it was measured to its end


class Sweep:
    """Goes through a plan's levels. Call `advance` about once a second."""

    def __init__(self, plan: LevelPlan, now: float) -> None:
        self._plan = plan
        self.levels = [Level(plan.values[0], plan.unit, now)]
        self.done = False

    @property
    def current(self) -> Level:
        """The level that is running, or the last one."""
        return self.levels[-1]

    def advance(self, now: float, finished: Sequence[float]) -> None:
        """finished: when requests that began in the current level ended, ascending; failures count too."""
        if self.done:
            return
        level = self.current
        self._measure(level, now, finished)
        if level.ended is None and now - level.entered > self._plan.timeout_s:
            self._end(now, complete=False)
        elif level.ended is not None:
            self._next(now)

    def stop(self, now: float, complete: bool) -> None:
        """The run was stopped: what was measured until now counts. complete: it was meant to end so."""
        if not self.done:
            self._end(now, complete)

    def _measure(self, level: Level, now: float, finished: Sequence[float]) -> None:
        plan = self._plan
        if plan.requests_per_user > 0:
            warmup = max(1, int(level.value))
            wanted = warmup + plan.requests_per_user * max(1, int(level.value))
            if level.measured_from is None and len(finished) >= warmup:
                level.measured_from = finished[warmup - 1]
            if len(finished) >= wanted:
                level.ended, level.complete = finished[wanted - 1], True
            return
        if level.measured_from is None and now - level.entered >= plan.warmup_s:
            level.measured_from = level.entered + plan.warmup_s
        if now - level.entered >= plan.warmup_s + plan.seconds:
            level.ended, level.complete = level.entered + plan.warmup_s + plan.seconds, True

    def _end(self, now: float, complete: bool) -> None:
        self.current.ended, self.current.complete = now, complete
        self.done = True

    def _next(self, now: float) -> None:
        if len(self.levels) == len(self._plan.values):
            self.done = True
        else:
            self.levels.append(Level(self._plan.values[len(self.levels)], self._plan.unit, now))
