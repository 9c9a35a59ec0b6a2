"""Figures as plotly's own JSON, built as plain dicts, and the tables that go with them.

Text that comes from files passes `plain` on its way into a figure: plotly reads a subset of HTML there.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.tables import MISSING

# Okabe and Ito's palette, without its yellow and black: told apart with any colour vision, on white and on dark.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon", "hexagram", "triangle-down")
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
DASHES = ("solid", "dash", "dot", "dashdot")
_MAX_TICKS = 12

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header. The first column names the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False  # sentences rather than numbers: aligned left, and lines are broken


@dataclass(frozen=True, slots=True)
class Choice:
    """One entry of a figure's selector: which traces to show, by index."""

    label: str
    visible: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot and its numbers. title, caption and the table are plain text, not HTML."""

    title: str
    traces: list[Trace]
    layout: dict[str, Any]
    table: Table
    caption: str = ""
    choice_name: str = ""  # what the selector selects
    choices: tuple[Choice, ...] = ()
    selected: int = 0  # which of them the page shows first


@dataclass(frozen=True, slots=True)
class Range:
    """A median over rounds with the least and the largest of them; low and high are None for a single round."""

    value: float
    low: float | None = None
    high: float | None = None


def plain(text: str) -> str:
    """The text, so that plotly shows it as it is."""
    return html.escape(text, quote=False)


def seconds(value: float | None) -> str:
    """A duration for people: 57.3 ms, 4.66 s."""
    if value is None:
        return MISSING
    return f"{value * 1000:,.3g} ms" if abs(value) < 1 else f"{value:,.2f} s"


def quantity(value: float | None) -> str:
    """A number with three or four digits that count."""
    if value is None:
        return MISSING
    if value == 0 or (float(value).is_integer() and abs(value) < 1e12):
        return f"{value:,.0f}"
    digits = max(0, 3 - max(0, math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}" if abs(value) >= 0.001 else f"{value:.3g}"


def ranged(found: Range | None, text: Any = quantity) -> str:
    """A median with its range, where there is one."""
    if found is None:
        return MISSING
    if found.low is None or found.high is None:
        return str(text(found.value))
    return f"{text(found.value)} ({text(found.low)} to {text(found.high)})"


def line(
    name: str,
    xs: Sequence[float | str],
    ranges: Sequence[Range],
    style: int,
    *,
    dash: int | None = None,
    hollow: Sequence[bool] = (),
) -> Trace:
    """A line with markers, and error bars where a point has a range. style: index of colour and marker."""
    marker = MARKERS[style % len(MARKERS)]
    symbols: Any = [f"{marker}-open" if is_hollow else marker for is_hollow in hollow] if any(hollow) else marker
    # Past the palette's end colours repeat, and the dash differs.
    pattern = DASHES[(style // len(COLOURS) if dash is None else dash) % len(DASHES)]
    colour = COLOURS[style % len(COLOURS)]
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(name),
        "x": [plain(x) if isinstance(x, str) else x for x in xs],
        "y": [found.value for found in ranges],
        "line": {"color": colour, "dash": pattern, "width": 2},
        "marker": {"color": colour, "symbol": symbols, "size": 9},
    }
    if any(found.low is not None for found in ranges):
        trace["error_y"] = _error_bars(ranges)
    return trace


def bars(name: str, xs: Sequence[str], ranges: Sequence[Range], style: int) -> Trace:
    """Bars of one colour and hatching, with error bars where they have ranges."""
    trace: Trace = {
        "type": "bar",
        "name": plain(name),
        "x": [plain(x) for x in xs],
        "y": [found.value for found in ranges],
        "marker": {
            "color": COLOURS[style % len(COLOURS)],
            "pattern": {"shape": PATTERNS[style % len(PATTERNS)], "fillmode": "overlay", "size": 7},
        },
    }
    if any(found.low is not None for found in ranges):
        trace["error_y"] = _error_bars(ranges)
    return trace


def target_marks(xs: Sequence[float | str], targets: Sequence[float | None], name: str = "target") -> Trace | None:
    """Short horizontal marks at the targets that there are; None where there is none."""
    points = [(plain(x) if isinstance(x, str) else x, y) for x, y in zip(xs, targets, strict=True) if y is not None]
    if not points:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(name),
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        # No colour: the page's script gives it the text's, in both schemes.
        "marker": {"symbol": "line-ew-open", "size": 26, "line": {"width": 3}},
        "meta": "ink",
    }


def layout(x_title: str, y_title: str, *, is_seconds: bool = False, x_seconds: bool = False) -> dict[str, Any]:
    """Axes. Durations stay in seconds in the data; ticks and hover have an SI prefix (57 ms)."""
    x: dict[str, Any] = {"automargin": "bottom"} | ({"title": {"text": plain(x_title)}} if x_title else {})
    # The left margin is fixed: one that fits the labels changes which labels there are, and may never come to rest.
    y: dict[str, Any] = {
        "title": {"text": plain(textwrap.shorten(y_title, 36, placeholder="…"))},
        "rangemode": "tozero",
    }
    for axis, wanted in ((x, x_seconds), (y, is_seconds)):
        if wanted:
            axis |= {"tickformat": "~s", "hoverformat": ".3s", "ticksuffix": "s"}
    return {"xaxis": x, "yaxis": y}


def category_axis(axis: dict[str, Any], names: Sequence[str]) -> None:
    """Makes it an axis of names in the order given; names that look like numbers or dates stay names."""
    order = [plain(name) for name in dict.fromkeys(names)]
    # Long names would take the plot's height, as they are turned.
    wrapped = ["<br>".join(plain(part) for part in textwrap.wrap(name, 12)) for name in dict.fromkeys(names)]
    axis |= {"type": "category", "categoryorder": "array", "categoryarray": order}
    axis |= {"tickmode": "array", "tickvals": order, "ticktext": wrapped}


def level_axis(axis: dict[str, Any], levels: Sequence[float]) -> None:
    """An axis whose ticks are the levels, logarithmic where they span much. Needs at least one level."""
    distinct = sorted(set(levels))
    if distinct[0] > 0 and distinct[-1] / distinct[0] >= 8:
        axis["type"] = "log"
        # Half a step beyond either end, so that markers are whole.
        axis["range"] = [math.log10(distinct[0]) - 0.08, math.log10(distinct[-1]) + 0.08]
    if len(distinct) <= _MAX_TICKS:
        axis |= {"tickmode": "array", "tickvals": distinct, "ticktext": [f"{level:g}" for level in distinct]}


def _error_bars(ranges: Sequence[Range]) -> dict[str, Any]:
    highs = [found.high - found.value if found.high is not None else None for found in ranges]
    lows = [found.value - found.low if found.low is not None else None for found in ranges]
    return {"type": "data", "symmetric": False, "array": highs, "arrayminus": lows, "thickness": 1.5, "width": 5}
