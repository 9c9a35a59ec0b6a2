"""The page: sections to one HTML document that loads nothing from anywhere."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from loadtest.report.assets import SCRIPT, STYLE
from loadtest.report.figures import Figure, Table
from loadtest.report.model import Results, Run, Unread
from loadtest.report.sections import Section, sections

# Whatever got into the page by mistake, the browser must not load anything for it.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_KEY_VERSIONS = ("python", "mlx", "mlx-lm", "ray", "mlx-quire")
_KIND_TITLES = {
    "engine": "engine", "serve": "serve", "memory": "memory",
    "decode": "decode", "kernels": "kernels", "drafts": "drafts", "load": "load", "compare": "server comparison",
    "experiment": "experiment", "gpu": "engines on a GPU",
}  # fmt: skip
_ROW_CLASSES = {", better": "better", ", worse": "worse"}


def page(results: Results, title: str, baseline: Path | None = None) -> str:
    """The whole document. baseline: the result file that ratios refer to, else the first of each kind."""
    found = sections(results, baseline)
    body = [
        '<a class="skip" href="#main">Skip to the results</a>',
        _header(results, title, found),
        '<main id="main">',
        _runs(results.runs),
        _unread(results.unread),
    ]
    number = 0
    for index, section in enumerate(found):
        body.append(_section(section, index, number))
        number += len(section.figures)
    body.append("</main>")
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_text(title)}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n<body>\n'
    )
    scripts = f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n" if number else ""
    return head + "\n".join(part for part in body if part) + "\n" + scripts + "</body>\n</html>\n"


def script_json(value: object) -> str:
    """JSON that can stand inside a script element: no text in it can end the element or begin a comment."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _text(text: str) -> str:
    return html.escape(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _header(results: Results, title: str, found: Sequence[Section]) -> str:
    kinds = Counter(run.kind for run in results.runs)
    counts = ", ".join(f"{count} {_KIND_TITLES.get(kind, kind)}" for kind, count in kinds.items())
    dates = sorted(run.date[:10] for run in results.runs if run.date)
    span = "" if not dates else f", {dates[0]}" if dates[0] == dates[-1] else f", {dates[0]} to {dates[-1]}"
    commits = {run.commit for run in results.runs if run.commit}
    machines = {run.machine.split(", load ")[0] for run in results.runs}
    where = "one machine" if len(machines) == 1 else f"{len(machines)} machines"
    warned = sum(bool(run.warnings) for run in results.runs)
    flags = f' <span class="mark">{warned} with warnings</span>' if warned else ""
    links = [("runs", "Runs")] + [(f"section-{index}", section.title) for index, section in enumerate(found)]
    items = "".join(f'<li><a href="#{name}">{_text(text)}</a></li>' for name, text in links)
    return (
        f"<header>\n<h1>{_text(title)}</h1>\n<p>{_count(len(results.runs), 'run')} ({_text(counts)}){_text(span)}; "
        f"{_count(len(commits), 'commit')}, {where}.{flags}</p>\n"
        f'<nav aria-label="Sections"><ul>{items}</ul></nav>\n'
        "<noscript><p>Without JavaScript there are no plots; the numbers are in the tables below them.</p></noscript>\n"
        "</header>"
    )


def _runs(runs: Sequence[Run]) -> str:
    header = ("file", "kind", "date (UTC)", "commit", "model", "machine", "versions", "warnings")
    rows = []
    for run in runs:
        versions = ", ".join(f"{name} {run.versions[name]}" for name in _KEY_VERSIONS if name in run.versions)
        warnings = "".join(f"<li>{_text(warning)}</li>" for warning in run.warnings)
        cells = [
            _text(run.file) + _run_details(run),
            _text(_KIND_TITLES.get(run.kind, run.kind)),
            _text((run.date or "unknown")[:16].replace("T", " ")),
            f"<code>{_text((run.commit or 'unknown')[:10])}</code>"
            + (' <span class="mark">uncommitted changes</span>' if run.uncommitted else ""),
            _text(" / ".join(part for part in (run.label, run.model) if part) or "-"),
            _text(run.machine),
            _text(versions or "unknown"),
            f'<ul class="warnings">{warnings}</ul>' if warnings else "none",
        ]
        rows.append(cells)
    return (
        f'<section id="runs">\n<h2>Runs</h2>\n{_markup_table("Runs", header, rows, words=True, tall=True)}\n</section>'
    )


def _run_details(run: Run) -> str:
    pairs = {**run.arguments, **{f"version of {name}": version for name, version in run.versions.items()}}
    if not pairs:
        return ""
    rows = [[f"<code>{_text(name)}</code>", _text(value)] for name, value in pairs.items()]
    table = _markup_table(f"Arguments of {run.file}", ("argument", "value"), rows, words=True)
    return f"<details><summary>arguments and versions</summary>{table}</details>"


def _unread(unread: Sequence[Unread]) -> str:
    if not unread:
        return ""
    rows = tuple((found.file, found.reason) for found in unread)
    table = _table("Files that were left out", Table(("file", "reason"), rows, words=True))
    summary = f"<summary>{_count(len(unread), 'file')} left out</summary>"
    return f'<section id="unread">\n<details open>{summary}{table}</details>\n</section>'


def _section(section: Section, index: int, first: int) -> str:
    parts = [f'<section id="section-{index}">\n<h2>{_text(section.title)}</h2>']
    parts += [f"<p>{_text(line)}</p>" for line in section.intro]
    parts += [f"<h3>{_text(title)}</h3>\n{_table(title, table)}" for title, table in section.tables]
    if section.figures:
        figures = (_figure(figure, f"plot-{first + place}") for place, figure in enumerate(section.figures))
        parts.append('<div class="figures">' + "\n".join(figures) + "</div>")
    parts += [
        f"<details><summary>{_text(title)}</summary>{_table(title, table)}</details>" for title, table in section.folded
    ]
    return "\n".join([*parts, "</section>"])


def _figure(figure: Figure, name: str) -> str:
    data = {
        "traces": figure.traces,
        "layout": figure.layout,
        "choices": [list(choice.visible) for choice in figure.choices],
    }
    selector = ""
    if len(figure.choices) > 1:
        options = "".join(
            f'<option value="{index}"{" selected" if index == figure.selected else ""}>{_text(choice.label)}</option>'
            for index, choice in enumerate(figure.choices)
        )
        # autocomplete: Firefox would keep the last choice over a reload.
        selector = f'<label>{_text(figure.choice_name)} <select autocomplete="off">{options}</select></label>\n'
    caption = f"<figcaption>{_text(figure.caption)}</figcaption>\n" if figure.caption else ""
    label = f"{figure.title}: a plot, its numbers are in the table below it"
    return (
        f'<figure>\n<h3>{_text(figure.title)}</h3>\n{selector}<div class="plot" id="{name}" role="img" '
        f'aria-label="{_text(label)}"></div>\n'
        f'<script type="application/json" id="{name}-data">{script_json(data)}</script>\n'
        f"{caption}<details><summary>Numbers</summary>{_table(figure.title, figure.table)}</details>\n</figure>"
    )


def _table(label: str, table: Table) -> str:
    return _markup_table(label, table.header, [[_cell(cell) for cell in row] for row in table.rows], words=table.words)


def _cell(cell: str) -> str:
    for ending, name in _ROW_CLASSES.items():
        if cell.endswith(ending):
            return f'<span class="{name}">{_text(cell)}</span>'
    return _text(cell)


def _markup_table(
    label: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False, tall: bool = False
) -> str:
    """A table that scrolls by itself, with the keyboard too. Cells are HTML already, the label and header are not."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    lines = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    kind = ' class="words"' if words else ""
    scroll = "scroll tall" if tall else "scroll"
    return (
        f'<div class="{scroll}" tabindex="0" role="region" aria-label="{_text(label)}"><table{kind}>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )
