"""The `quire` command. `quire serve` sets what Ray reads from the environment, then becomes the driver; `quire report`
makes a page of benchmark results.

Imports neither Ray nor MLX: Ray reads its environment while it is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from deployments import haproxy
from loadtest.report import options as report_options

DEFAULT_CONFIG = "configs/local.yaml"
_DRIVER = "deployments.driver"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, or doesn't return when it becomes the driver."""
    options = _parser().parse_args(argv)
    if options.command == "serve":
        return _serve(options)
    if options.command == "report":
        return _report(options)
    raise AssertionError(options.command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire", description="An LLM serving engine on MLX with plugin policies.")
    parser.add_argument("--version", action="version", version=f"quire {metadata.version('mlx-quire')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve the models of a config file",
        description="Serves a Ray Serve config file until Ctrl-C. Starts a private Ray unless RAY_ADDRESS is set. "
        "Any of Ray's own environment variables that is set already stays as it is.",
    )
    serve.add_argument("config", nargs="?", default=DEFAULT_CONFIG, help=f"config file (default: {DEFAULT_CONFIG})")
    serve.add_argument("--no-haproxy", action="store_true", help="use Serve's own HTTP proxy, also where HAProxy works")
    serve.add_argument("--dashboard", action="store_true", help="start Ray's dashboard, which `serve status` needs")
    serve.add_argument("--num-cpus", type=int, default=None, metavar="N", help="CPUs in Ray's books (default: 2)")
    serve.add_argument("--verbose", action="store_true", help="show the log of Ray Serve's own processes too")
    report = commands.add_parser("report", help=report_options.HELP, description=report_options.DESCRIPTION)
    report_options.add_arguments(report)
    return parser


def _report(options: argparse.Namespace) -> int:
    # plotly takes long to import, and no other command needs it.
    from loadtest.report.cli import report

    return report(options)


def _serve(options: argparse.Namespace) -> int:  # noqa: RET503 (os.execve doesn't return)
    path = find_config(options.config)
    if path is None:
        what = "is a folder, and a config file is wanted" if Path(options.config).is_dir() else "is not there"
        print(f"quire: the config file {options.config} {what}", file=sys.stderr)
        return 2
    environment = {**os.environ, **serve_environment(os.environ)}
    if not options.verbose:
        environment.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    command = [sys.executable, "-m", _DRIVER, str(path)]
    if not options.no_haproxy:
        added, scratch = haproxy.prepare(environment)
        environment |= added
        if scratch is not None:
            command += ["--scratch", str(scratch)]
    if options.dashboard:
        command.append("--dashboard")
    if options.num_cpus is not None:
        command += ["--num-cpus", str(options.num_cpus)]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def find_config(name: str) -> Path | None:
    """The config file: as given, or in the source tree that this package belongs to; "mac" is configs/mac.yaml."""
    root = Path(__file__).resolve().parent.parent
    candidates = [Path(name), root / name]
    if Path(name).name == name and not name.endswith((".yaml", ".yml")):
        candidates += [Path("configs") / f"{name}.yaml", root / "configs" / f"{name}.yaml"]
    return next((path for path in candidates if path.is_file()), None)


def serve_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for Ray. What the user has set stays as it is."""
    wanted = {
        # Ray would copy a `uv run` to its workers: pack the folder, and build a second environment, at each start.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Lines of ours carry their own mark; Ray's would be longer than they are.
        "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
        # Ray would leave OpenBLAS one thread; set here, the engine's process needs no environment of its own.
        "OPENBLAS_NUM_THREADS": str(num_cores()),
        # Serve looks for work every 0.1 s, at the cost of an engine that uses all cores.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    }
    return {name: value for name, value in wanted.items() if name not in environment}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
