"""Figures from raw samples. Nothing here is smoothed, binned or weighted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of the samples, linear between the two nearest ranks.

    Raises ValueError for no samples, a NaN among them, or q out of range: there is no such figure.
    """
    return _percentiles(samples, q)[0]


def _percentiles(samples: Sequence[float], *qs: float) -> list[float]:
    if not samples:
        raise ValueError("a percentile of no samples does not exist")
    if any(math.isnan(sample) for sample in samples):
        raise ValueError("there is a NaN among the samples")
    ordered = sorted(samples)
    found = []
    for q in qs:
        if not 0 <= q <= 100:
            raise ValueError(f"q must be between 0 and 100, not {q}")
        rank = (len(ordered) - 1) * q / 100
        low = math.floor(rank)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (rank - low))
    return found


def median(samples: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(samples, 50)


def gaps(times: Sequence[float]) -> list[float]:
    """The differences between neighbours: one fewer than there are times."""
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Count, median, p90, p95, p99, extremes and the raw samples, in the samples' unit; None where there are none."""
    raw = list(samples)
    names = {"median": 50, "p90": 90, "p95": 95, "p99": 99, "min": 0, "max": 100}
    values: Sequence[float | None] = _percentiles(raw, *names.values()) if raw else [None] * len(names)
    figures = dict(zip(names, values, strict=True))
    return {"count": len(raw), **figures, "samples": raw}


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None where one of them was not measured or b is 0."""
    return None if a is None or b is None or b == 0 else a / b


def three_digits(value: float) -> float:
    """A value rounded to three significant digits; 0 for one that is not above 0."""
    return round(value, 2 - math.floor(math.log10(value))) if value > 0 else 0.0
