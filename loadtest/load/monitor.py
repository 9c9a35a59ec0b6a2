"""Watches the load generator itself: one that has no CPU left measures itself, not the server."""

from __future__ import annotations

import time
from typing import Any

import gevent
import psutil

from loadtest.stats import percentile

INTERVAL_S = 1.0
SATURATED_PERCENT = 90.0  # of one core: a gevent process can use no more
_SATURATED_INTERVALS = 2  # in a row; one alone may be the start of all users
_NAP_S = 0.05


class GeneratorMonitor:
    """Samples this process's CPU share and how late its event loop runs. Start it in the process that sends."""

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
            until = time.perf_counter() + INTERVAL_S
            while (now := time.perf_counter()) < until:
                gevent.sleep(_NAP_S)
                self.lag_s.append(max(0.0, time.perf_counter() - now - _NAP_S))
            self.cpu_percent.append(process.cpu_percent())
