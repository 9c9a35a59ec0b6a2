"""The page's sections: figures and tables of all runs of a kind, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.report.charts import (
    decode_figures,
    drafts_figures,
    engine_figures,
    kernel_figures,
    memory_figures,
    serve_figures,
    spread,
)
from loadtest.report.charts_experiment import arms_table, experiment_figures
from loadtest.report.charts_load import NamedCurve, levels_table, load_figures, named_curves, server_metrics_table
from loadtest.report.comparison import compare, facts_of, load_facts
from loadtest.report.figures import Figure, Table, ranged, seconds
from loadtest.report.model import Experiment, Load, Results, Run, Summary
from loadtest.stats import summary


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what is below it. All text is plain."""

    title: str
    intro: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()  # open ones, above the figures
    folded: tuple[tuple[str, Table], ...] = ()  # below the figures


def sections(results: Results, baseline: Path | None = None) -> list[Section]:
    """All sections that there are runs for. baseline: the file of one of the runs; the first of each kind otherwise."""
    kinds: list[tuple[str, str, Callable[[Any], list[Figure]], str]] = [
        ("engine", "Engine against mlx-lm", engine_figures, "In process: same weights, type, BLAS and prompts."),
        ("serve", "The server against its own engine", serve_figures, ""),
        ("memory", "Memory", memory_figures, ""),
        ("decode", "Decode steps on a GPU", decode_figures, "In process, on random weights."),
        ("kernels", "Attention kernels", kernel_figures, ""),
        ("drafts", "Drafts", drafts_figures, "In process: the same engine with a drafter and without."),
    ]
    found = [_load(results.runs, baseline)]
    for kind, title, figures, intro in kinds:
        runs = [run for run in results.runs if run.kind == kind]
        named = {run.file: run.content for run in runs}
        tables = _comparison(facts_of(named), _position([run.path for run in runs], baseline))
        shown = tuple(figures({short: named[name] for name, short in short_names(list(named)).items()}))
        found.append(Section(title, (intro,) if intro else (), shown, tables) if runs else None)
    found += _experiments(results.runs, baseline)
    return [section for section in found if section is not None]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names without .json, for legends, where that leaves them different."""
    short = {name: name.removesuffix(".json") for name in names}
    return short if len(set(short.values())) == len(names) else {name: name for name in names}


def _position(files: Sequence[Path], baseline: Path | None) -> int:
    """Where the baseline is among files; the first where it isn't."""
    if baseline is None:
        return 0
    wanted = baseline.resolve()
    return next((index for index, file in enumerate(files) if file.resolve() == wanted), 0)


def _comparison(subjects: Sequence[tuple[str, Any]], position: int) -> tuple[tuple[str, Table], ...]:
    table = compare(subjects, position)
    return ((f"Ratios to {subjects[position][0]}", table),) if table else ()


def _load(runs: Sequence[Run], baseline: Path | None) -> Section | None:
    curves = named_curves(runs)
    if not curves:
        return None
    measured = [named for named in curves if named.curve.levels]
    position = _position([named.run.path for named in measured], baseline)
    tables = _comparison([(named.name, load_facts(named)) for named in measured], position)
    folded = [("Levels: requests and what became of them", levels_table(measured))] if measured else []
    metrics = server_metrics_table(measured)
    if metrics:
        folded.append(("The servers' own metrics", metrics))
    intro = ["Servers under load over HTTP, every run over each other."]
    models = sorted({named.run.model for named in measured if named.run.model})
    machines = {named.run.machine.split(", load ")[0] for named in measured}
    if len(models) > 1:
        intro.append(f"Careful: not the same model everywhere ({', '.join(models)}).")
    if len({named.run.content.scenario for named in measured if isinstance(named.run.content, Load)}) > 1:
        intro.append("Careful: several scenarios; ratios between them compare different work.")
    if len(machines) > 1:
        intro.append("Careful: not the same machine everywhere; the table of runs says which.")
    servers = _servers(curves)
    return Section(
        "Load over HTTP",
        tuple(intro),
        tuple(load_figures(measured)),
        (*((("Servers", servers),) if servers else ()), *tables),
        tuple(folded),
    )


def _servers(curves: Sequence[NamedCurve]) -> Table | None:
    rows = []
    for named in curves:
        details = named.curve.details
        if details:
            cells = (details.get(key, "") for key in ("status", "reason", "version", "dtype"))
            ready = ranged(spread(_summary(named.curve.ready_s)), seconds)
            more = (details.get(key, "") for key in ("command", "environment", "remarks"))
            rows.append((named.name, *cells, ready, *more))
    header = ("server", "status", "reason", "version", "type", "ready after", "command", "environment", "remarks")
    return Table(header, tuple(rows), words=True) if rows else None


def _summary(samples: Sequence[float]) -> Summary:
    figures = summary(samples)
    return Summary(count=len(samples), median=figures["median"], min=figures["min"], max=figures["max"])


def _experiments(runs: Sequence[Run], baseline: Path | None) -> list[Section]:
    by_name: dict[str, list[tuple[Run, Experiment]]] = {}
    for run in runs:
        if isinstance(run.content, Experiment):
            by_name.setdefault(run.content.name, []).append((run, run.content))
    found = []
    for same in by_name.values():
        contents: Mapping[str, Experiment] = {run.file: content for run, content in same}
        tables = _comparison(facts_of(contents), _position([run.path for run, _ in same], baseline))
        for index, (run, content) in enumerate(same):
            title = f"Experiment: {content.title}" + (f" ({run.file})" if len(same) > 1 else "")
            arms = arms_table(content)
            checks = tuple((name, "yes" if passed else "NO", detail) for name, passed, detail in content.checks)
            above = list(tables) if index == 0 else []
            if checks:
                above.append(("What must hold", Table(("check", "held", "detail"), checks, words=True)))
            folded = (("Configuration of the arms", arms),) if arms else ()
            intro = (*([content.question] if content.question else []), *content.notes)
            found.append(Section(title, intro, tuple(experiment_figures(content)), tuple(above), folded))
    return found
