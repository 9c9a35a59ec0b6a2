"""Starts `quire serve` for a benchmark, on a port of its own, and always ends it."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from tqdm import tqdm

from loadtest import processes

_LOG_LINES = 30
_PORTS = range(18000, 28000)
# Ports that Ray Serve takes besides the one of the API. `quire serve` leaves those alone that are set.
_OTHER_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)


class ServeError(RuntimeError):
    """The server did not start, or ended."""


def free_ports(count: int) -> list[int]:
    """TCP ports that are free now, and that no outgoing connection will be given before the server has them.

    Systems deal those from 32768 or 49152 up, and the server binds its ports only after many seconds.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ServeError(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free")


def read_config(path: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """A Serve config file, its first application's engine keys replaced by `engine`. Raises ValueError without one."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        application = config["applications"][0]
        args = application["args"] = dict(application.get("args") or {})
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"{path} is no Serve config: it has no applications") from None
    args["engine"] = {**(args.get("engine") or {}), **engine}
    result: dict[str, Any] = config
    return result


class ServeProcess:
    """A running server. As a context manager it is ready inside and gone, with all its processes, outside."""

    def __init__(
        self, config: dict[str, Any], folder: Path, ready_timeout_s: float = 300.0, flags: Sequence[str] = ()
    ) -> None:
        """config: what `read_config` gave. Its copy with a free port, and the server's log, go into `folder`.

        flags: of `quire serve`, besides the config.
        """
        self._ports = free_ports(1 + len(_OTHER_PORTS))
        http = {**(config.get("http_options") or {}), "host": "127.0.0.1", "port": self._ports[0]}
        self._path = folder / "serve.yaml"
        self._path.write_text(yaml.safe_dump({**config, "http_options": http}))
        self._log = folder / "serve.log"
        self._ready_timeout_s = ready_timeout_s
        self._flags = list(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = f"http://127.0.0.1:{self._ports[0]}"
        self.ready_s: float | None = None  # from start to the first good /health

    def __enter__(self) -> ServeProcess:
        # Another Ray on this machine is none of our business, and would be ended with ours.
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        # Another server that starts at the same time would take the same ones.
        environment |= {name: str(port) for name, port in zip(_OTHER_PORTS, self._ports[1:], strict=True)}
        started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", "serve", str(self._path), *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=Path(__file__).parent.parent,
                # Ctrl-C goes to the benchmark only, which then ends the server in order.
                start_new_session=True,
            )
        try:
            self._wait_ready(started)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server in order, then kills what is left of it after half a minute; safe to call again."""
        server = self._process
        if server is None:
            return
        self._process = None
        # Ray's own processes end by themselves when they see the driver gone.
        for process in processes.stop(server, grace_s=0.5):
            print(f"killed what the server left: {process.pid} {process.command[:80]}", file=sys.stderr)

    def health(self) -> dict[str, Any] | None:
        """What /health says, whatever its status; None if nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            content = error.read()
        except OSError:
            return None
        try:
            found = json.loads(content)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def model_id(self) -> str:
        """The id that the server serves."""
        with urllib.request.urlopen(f"{self.base_url}/v1/models", timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory of the engine's process and of the server replica. Raises ServeError if one is not there."""
        assert self._process is not None
        health = self.health() or {}
        below = self._descendants(self._process.pid)
        engine = next((process for process in below if process.pid == health.get("engine_pid")), None)
        replica = next((process for process in below if process.command.startswith("ray::ServeReplica")), None)
        if engine is None or replica is None:
            raise ServeError(f"no engine or replica among the server's processes: {[p.command[:60] for p in below]}")
        return {"engine": engine.rss_bytes, "replica": replica.rss_bytes}

    def _descendants(self, pid: int) -> list[processes.Process]:
        return processes.descendants(processes.snapshot(), pid)

    def _wait_ready(self, started: float) -> None:
        assert self._process is not None
        with tqdm(bar_format="{desc} [{elapsed}]", file=sys.stderr) as bar:
            while time.monotonic() - started < self._ready_timeout_s:
                if self._process.poll() is not None:
                    raise ServeError(f"the server ended with {self._process.returncode}:\n{self._last_words()}")
                health = self.health() or {}
                if health.get("status") == "ok":
                    return
                bar.set_description_str(f"server: {health.get('status', 'starting')} {health.get('stage', '')}")
                time.sleep(0.3)
        raise ServeError(f"the server was not ready after {self._ready_timeout_s:.0f} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
