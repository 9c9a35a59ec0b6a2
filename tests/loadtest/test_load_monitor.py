from __future__ import annotations

import pytest

from loadtest.load.monitor import GeneratorMonitor


@pytest.mark.parametrize(
    ("shares", "saturated"),
    [([], False), ([100.0], False), ([20, 99, 30, 98], False), ([20, 95, 99, 30], True), ([89, 89, 89], False)],
)
def test_a_generator_is_saturated_when_it_has_no_cpu_left_for_a_while(shares: list[float], saturated: bool) -> None:
    monitor = GeneratorMonitor()
    monitor.add({"cpu_percent": shares, "lag_s": []})
    assert monitor.summary()["saturated"] is saturated


def test_what_was_taken_is_another_processs() -> None:
    monitor, other = GeneratorMonitor(), GeneratorMonitor()
    monitor.add({"cpu_percent": [50.0], "lag_s": [0.002]})
    other.add(monitor.take())
    assert monitor.cpu_percent == []
    assert other.summary() == {
        "cpu_percent_median": 50.0,
        "cpu_percent_max": 50.0,
        "lag_ms_p99": pytest.approx(2.0),
        "saturated": False,
    }
