"""Reads figures off a /metrics page in Prometheus's text format."""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """All samples of one name: their labels and values, in the page's order."""
    found = []
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] == name:
            found.append((dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found


def value(page: str, name: str) -> float | None:
    """The sum of a name's samples, None if there are none."""
    found = samples(page, name)
    return sum(number for _, number in found) if found else None


def by_label(page: str, name: str, label: str) -> dict[str, float]:
    """A name's values by one of its labels."""
    return {labels[label]: number for labels, number in samples(page, name) if label in labels}
