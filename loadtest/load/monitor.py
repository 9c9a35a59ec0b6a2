"""Watches the load generator itself: one that has no CPU left measures itself, not the server.

What counts is the CPU it wanted: the time it ran and, where the system tells (Linux), the time it was ready to run and
others had the cores. On two cores that a server shares, a generator can be at its limit with half a core.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gevent
import psutil

from loadtest.stats import percentile

INTERVAL_S = 1.0
SATURATED_PERCENT = 90.0  # of one core: a gevent process can use no more
_SATURATED_INTERVALS = 2  # in a row; one alone may be the start of all users
_NAP_S = 0.05
_SCHEDSTAT = Path("/proc/self/schedstat")  # of the main thread: ns on a core, ns waiting for one, time slices


class GeneratorMonitor:
    """Samples the CPU that this process wants, in percent of a core, and how late its event loop runs."""

    def __init__(self) -> None:
        self.cpu_percent: list[float] = []
        self.lag_s: list[float] = []
        self._greenlet: gevent.Greenlet | None = None

    def start(self) -> None:
        """Begins anew."""
        self.stop()
        self.cpu_percent, self.lag_s = [], []
        self._greenlet = gevent.spawn(self._watch)

    def stop(self) -> None:
        """Ends the watching; the samples stay."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None

    def add(self, figures: dict[str, list[float]]) -> None:
        """Another process's samples, as its `take` gave them."""
        self.cpu_percent += figures["cpu_percent"]
        self.lag_s += figures["lag_s"]

    def take(self) -> dict[str, list[float]]:
        """The samples since the last call, for another process; they are forgotten here."""
        figures = {"cpu_percent": self.cpu_percent, "lag_s": self.lag_s}
        self.cpu_percent, self.lag_s = [], []
        return figures

    @property
    def saturated(self) -> bool:
        """Whether the process had (almost) no CPU left for two intervals in a row."""
        run = 0
        for share in self.cpu_percent:
            run = run + 1 if share >= SATURATED_PERCENT else 0
            if run >= _SATURATED_INTERVALS:
                return True
        return False

    def summary(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "cpu_percent_median": percentile(self.cpu_percent, 50) if self.cpu_percent else None,
            "cpu_percent_max": max(self.cpu_percent, default=None),
            "lag_ms_p99": 1000 * percentile(self.lag_s, 99) if self.lag_s else None,
            "saturated": self.saturated,
        }

    def _watch(self) -> None:
        process = psutil.Process()
        process.cpu_percent()
        while True:
            waited, began = _waited_s(), time.perf_counter()
            until = began + INTERVAL_S
            while (now := time.perf_counter()) < until:
                gevent.sleep(_NAP_S)
                self.lag_s.append(max(0.0, time.perf_counter() - now - _NAP_S))
            share = 100 * (_waited_s() - waited) / (time.perf_counter() - began)
            self.cpu_percent.append(process.cpu_percent() + share)


def _waited_s() -> float:
    # psutil has the time on a core for every system; the time waiting for one is Linux's alone.
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
