"""Reproduces a figure of the original experiment: python -m loadtest.experiments NAME

Starts `quire serve` on a free port with each arm's config in turn, round by round, and loads it over HTTP. The client
shares the machine with the server. Prints a table and writes bench-results/experiments/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest import environment
from loadtest.experiments.base import Experiment
from loadtest.experiments.catalog import ALL, EXPERIMENTS
from loadtest.experiments.harness import Plan, Server, run
from loadtest.experiments.report import fill, render
from loadtest.options import engine_overrides, exit_on_sigterm, key_value, merged, positive_int, result_folder
from loadtest.prompts import word_ids
from loadtest.serve_process import ServeProcess
from loadtest.workers import Worker, WorkerError

_START_TIMEOUT_S = 600.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Exits with 2 when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.experiments", description=__doc__)
    known = [*EXPERIMENTS, ALL]
    parser.add_argument("name", nargs="?", choices=known, metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: to see that it works")
    parser.add_argument("--rounds", type=positive_int, help="times that each arm's server is started")
    parser.add_argument("--engine", type=key_value, action="append", metavar="KEY=VALUE", help="for every arm")
    parser.add_argument(
        "--case-timeout", type=positive_int, default=600, help="seconds of an arm's load (default: 600)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and lengths")
    parser.add_argument(
        "--out", type=result_folder, default="bench-results/experiments", help="folder of the JSON files"
    )
    parser.add_argument("--docs", type=Path, help="measure nothing: write the tables into this file")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/benchmarks/experiments"), help="where --docs finds JSON files"
    )
    args = parser.parse_args(argv)
    if (args.name is None) == (args.docs is None):
        parser.error(f"give either NAME ({', '.join(known)}) or --docs FILE")
    return args


def make_plans(args: argparse.Namespace) -> list[Plan]:
    """What the command line asks for, in the catalog's order. Raises ValueError for what would compare nothing."""
    overrides = engine_overrides()
    if overrides:
        raise ValueError(f"unset {', '.join(overrides)}: every arm's server would heed it. Use --engine KEY=VALUE")
    kinds = EXPERIMENTS.values() if args.name == ALL else [EXPERIMENTS[args.name]]
    experiments: list[Experiment] = [kind.quick() if args.quick else kind() for kind in kinds]
    engine = merged(args.engine)
    return [Plan.of(e, quick=args.quick, rounds=args.rounds, engine=engine) for e in experiments]


def prompt_ids(model: str, folder: Path) -> list[int]:
    """What prompts are made of. Only an engine knows where its model lies; it ends before anything is timed."""
    with Worker("loadtest.worker_quire", folder / "worker.log") as worker:
        built = worker.call("build", _START_TIMEOUT_S, config={"model": model, "num_blocks": 64})
    return word_ids(Path(built["folder"]))


@contextmanager
def open_server(config: dict[str, Any]) -> Iterator[Server]:
    """A server with its files in a folder that goes when it does. Raises ServeError."""
    with (
        tempfile.TemporaryDirectory(prefix="quire-experiment-") as folder,
        ServeProcess(config, Path(folder)) as server,
    ):
        yield server


def measure(plan: Plan, args: argparse.Namespace, ids: Sequence[int]) -> dict[str, Any]:
    """One experiment's result, written and printed."""
    found = environment.describe()
    experiment = plan.experiment
    with tqdm(total=plan.num_runs, unit="run", file=sys.stderr) as bar:
        record = run(plan, open_server, ids, seed=args.seed, timeout_s=args.case_timeout,
                     progress=bar.set_description, done=bar.update)  # fmt: skip
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    result = {
        "benchmark": "experiment",
        **found,
        "arguments": {**options, "rounds": plan.rounds, "sizes": experiment.sizes()},
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "arms": plan.described_arms(record),
        "metrics": [metric.to_json() for metric in record.metrics],
        "series": [{"name": s.name, "x": list(s.x), "y": list(s.y), "x_title": s.x_title, "y_title": s.y_title}
                   for s in record.series],
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in record.checks],
        "notes": record.notes,
        "failures": record.failures,
    }  # fmt: skip
    path = args.out / f"{experiment.name}.json"
    print(f"\n# {experiment.title}\n\n{experiment.question}\n\n{render(result)}")
    environment.write_json(path, result)
    print(f"\nRaw samples: {path}", flush=True)
    return result


def succeeded(result: Mapping[str, Any]) -> bool:
    """Whether every check passed and nothing failed."""
    return not result["failures"] and all(check["passed"] for check in result["checks"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables and writes the JSON. 1 when a check or a request failed, 2 for bad arguments."""
    args = parse_args(argv)
    if args.docs is not None:
        try:
            args.docs.write_text(fill(args.docs.read_text(encoding="utf-8"), args.results), encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            print(f"{args.docs}: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        return 0
    exit_on_sigterm()
    try:
        plans = make_plans(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="quire-experiment-") as folder:
        try:
            ids = prompt_ids(plans[0].engine(plans[0].arms[0].name)["model"], Path(folder))
        except (WorkerError, ValueError) as error:
            print(f"no prompts for this model: {error}", file=sys.stderr)
            return 1
    results = [measure(plan, args, ids) for plan in plans]
    return 0 if all(succeeded(result) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
