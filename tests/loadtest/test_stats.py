from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.stats import gaps, median, percentile, ratio, summary, three_digits

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@settings(deadline=None)
@given(SAMPLES)
def test_median_agrees_with_the_standard_library(samples: list[float]) -> None:
    assert median(samples) == pytest.approx(statistics.median(samples))


@settings(deadline=None)
@given(SAMPLES, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_with_q_and_stay_between_the_extremes(samples: list[float], a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert min(samples) - 1e-6 <= percentile(samples, low) <= percentile(samples, high) + 1e-6
    assert percentile(samples, high) <= max(samples) + 1e-6


def test_percentile_is_linear_between_ranks_and_ignores_order() -> None:
    assert percentile([40, 10, 30, 20], 50) == 25
    assert percentile([40, 10, 30, 20], 95) == pytest.approx(38.5)
    assert percentile([7], 99) == 7


@pytest.mark.parametrize(("samples", "q"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0, math.nan], 50)])
def test_there_is_no_figure_where_there_are_no_samples(samples: list[float], q: float) -> None:
    with pytest.raises(ValueError, match=r".+"):
        percentile(samples, q)


def test_a_summary_keeps_the_raw_samples_and_invents_nothing() -> None:
    assert summary([2.0, 1.0])["samples"] == [2.0, 1.0]
    empty = summary([])
    assert empty["count"] == 0
    assert empty["median"] is empty["p95"] is empty["min"] is empty["max"] is None


def test_gaps_and_ratios() -> None:
    assert gaps([1.0, 3.0, 6.0]) == [2.0, 3.0]
    assert gaps([1.0]) == []
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(2.0, None) is ratio(2.0, 0) is None


@pytest.mark.parametrize(
    ("value", "rounded"), [(0, 0), (-1, 0), (0.01234, 0.0123), (10.44, 10.4), (999.4, 999), (1234.5, 1230)]
)
def test_three_digits_are_kept(value: float, rounded: float) -> None:
    assert three_digits(value) == pytest.approx(rounded)
