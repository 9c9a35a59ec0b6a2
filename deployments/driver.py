"""What `quire serve` becomes: `serve run CONFIG`, with the config checked first and an exit code at the end.

`serve run` itself goes on waiting when a deployment fails; a watcher here ends it.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml
from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve import scripts
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.settings import load_settings
from mlx_engine.config import EMBEDDED_MODEL
from mlx_engine.errors import ConfigError, nearest_name

IMPORT_PATH = "deployments.app:build_app"
# Actors reserve fractions of a CPU; more in Ray's books would only make it start workers that nobody uses.
_DEFAULT_NUM_CPUS = 2
_POLL_S = 0.5
# HAProxy's own words, in the middle of what Serve raises.
_BIND_FAILURE = re.compile(
    r"for (proxy|frontend) (?P<what>\S+): cannot bind socket \((?P<why>.+?)\) for \[(?P<where>.+)\]"
)


class RayStartError(Exception):
    """Ray's own processes don't come up."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What is needed of a config file here; Serve reads the rest."""

    apps: tuple[str, ...]  # the names of the applications
    health_url: str | None  # of the first one of ours; None if none is
    address: tuple[str, int]  # where Serve will listen


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C or SIGTERM (0), or until the configuration or the model turns out wrong (1)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("--num-cpus", type=int, default=_DEFAULT_NUM_CPUS)
    parser.add_argument("--scratch", type=Path, default=None, help="a folder to delete in the end")
    options = parser.parse_args(argv)
    try:
        return _serve(options.config, num_cpus=options.num_cpus, dashboard=options.dashboard)
    finally:
        if options.scratch is not None:
            shutil.rmtree(options.scratch, ignore_errors=True)


def _serve(path: Path, *, num_cpus: int, dashboard: bool) -> int:
    try:
        config = read_config(path)
        own_ray = not os.environ.get("RAY_ADDRESS")
        # In a Ray of somebody else's, Serve may be listening already, and takes the config all the same.
        if own_ray:
            _check_address(*config.address)
    except ConfigError as error:
        print(f"quire: {path}: {error}", file=sys.stderr)
        return 1
    _end_on_signals()
    watcher = Watcher(config)
    try:
        if own_ray:
            _start_ray(num_cpus, dashboard)
        _end_on_signals()  # Ray has put its own in their place
        watcher.start()
        scripts.cli(["run", str(path)], standalone_mode=False)
    except (SystemExit, KeyboardInterrupt):
        pass  # how `serve run` ends
    except RayStartError as error:
        watcher.failure = str(error)
    except RuntimeError as error:
        watcher.failure = bind_failure(str(error))
        if watcher.failure is None:
            raise
    finally:
        watcher.stop()
        ray.shutdown()
    if watcher.failure is not None:
        print(f"quire: {watcher.failure}", file=sys.stderr)
        return 1
    return 0


def read_config(path: Path) -> ServeConfig:
    """Reads a Serve config and validates the `args` of our applications. Raises ConfigError naming what is wrong."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("applications"), list):
        raise ConfigError("is no Ray Serve config: it needs a list `applications`")
    if not content["applications"]:
        raise ConfigError("applications: is empty, so there is nothing to serve")
    _check_serve_keys(content)
    prefixes = []
    for index, app in enumerate(content["applications"]):
        where = f"applications.{index}"
        # Serve takes both spellings.
        if app["import_path"] in (IMPORT_PATH, IMPORT_PATH.replace(":", ".")):
            settings = load_settings(app.get("args"))
            _check_model_path(settings.engine.model)
            prefix = app.get("route_prefix", "/")
            if not isinstance(prefix, str) or not prefix.startswith("/"):
                raise ConfigError(f"{where}.route_prefix: must begin with '/', and {prefix!r} does not")
            prefixes.append(prefix.rstrip("/"))
        elif str(app["import_path"]).startswith("deployments"):
            found = app["import_path"]
            raise ConfigError(f"{where}.import_path: {found!r} is not here (did you mean {IMPORT_PATH!r}?)")
    http = content.get("http_options") or {}
    host, port = http.get("host") or "127.0.0.1", http.get("port", 8000)
    if not 1 <= port <= 65535:
        raise ConfigError(f"http_options.port: must be 1 to 65535, not {port}")
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    names = tuple(str(app.get("name", "default")) for app in content["applications"])
    return ServeConfig(names, f"http://{reachable}:{port}{prefixes[0]}/health" if prefixes else None, (host, port))


def _check_address(host: str, port: int) -> None:
    """Raises ConfigError if nobody can listen there; Serve would say so in a traceback half a minute later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections of a server that has just ended don't count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: end what listens there, or set another http_options.port"
            ) from error
        raise ConfigError(f"http_options: can't listen on {host}, port {port}: {error.strerror or error}") from error


def bind_failure(message: str) -> str | None:
    """What to tell if HAProxy couldn't listen, which is seen only once Ray runs; None: the error is another one."""
    found = _BIND_FAILURE.search(message)
    if found is None:
        return None
    return (
        f"HAProxy can't listen on {found['where']} (its {found['what']}): {found['why']}. Start again, which looks for"
        " free ports, or set http_options.port or the RAY_SERVE_HAPROXY_…_PORT that you have set to another one"
    )


def _check_serve_keys(content: dict[str, Any]) -> None:
    """What `serve run` would refuse with a traceback once Ray runs, or ignore altogether."""
    schemas: list[tuple[str, Any, type[BaseModel]]] = [
        ("", content, ServeDeploySchema),
        ("http_options.", content.get("http_options") or {}, HTTPOptionsSchema),
        *((f"applications.{i}.", app, ServeApplicationSchema) for i, app in enumerate(content["applications"])),
    ]
    for where, mapping, schema in schemas:
        for key in mapping if isinstance(mapping, dict) else ():
            if key not in schema.model_fields:
                near = nearest_name(str(key), schema.model_fields)
                raise ConfigError(f"{where}{key}: unknown key" + (f" (did you mean {near!r}?)" if near else ""))
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise ConfigError(
            "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in problems)
        ) from error


def _check_model_path(model: str) -> None:
    """Refuses what is meant as a path and isn't there, before Ray is started for it."""
    meant_as_path = model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf")
    if model != EMBEDDED_MODEL and meant_as_path and not Path(model).expanduser().exists():
        raise ConfigError(f"engine.model: there is no {model}")


def _end_on_signals() -> None:
    """Ctrl-C ends Serve in order, and so does SIGTERM.

    Without a handler of its own, a process that a script has started with `&` ignores SIGINT, and so would end neither
    by it nor by the watcher's.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start_ray(num_cpus: int, dashboard: bool) -> None:
    """A Ray of our own: `serve run` would join whichever one runs on this machine, and end it on Ctrl-C.

    Raises RayStartError after the second attempt: Ray gives its processes 30 s, which a busy machine may need twice.
    """
    for line in ("Starting Ray …", "Ray did not start in time; trying once more …"):
        print(f"[quire] {line}", flush=True)
        try:
            ray.init(
                address="local",
                namespace="serve",
                num_cpus=num_cpus,
                include_dashboard=dashboard,
                logging_level="WARNING",
            )
            return
        except Exception as error:  # Ray raises bare Exception here
            failure = error
            ray.shutdown()
    raise RayStartError(f"Ray can't be started: {failure}") from failure


class Watcher:
    """Watches the applications until they serve; ends the process with SIGINT if they never will."""

    def __init__(self, config: ServeConfig) -> None:
        self.failure: str | None = None
        self._config = config
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stops watching."""
        self._stopped.set()

    @property
    def is_alive(self) -> bool:
        """Whether it still watches."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self.failure = self._deploy_failure()
            health = None if self.failure is not None else self._health()
            if health is not None and health.get("status") == "failed":
                self.failure = str(health.get("error"))
            if self.failure is not None:
                time.sleep(_POLL_S)  # lets the log of the failure through first
                os.kill(os.getpid(), signal.SIGINT)
                return
            if health is not None and health.get("status") == "ok":
                return

    def _deploy_failure(self) -> str | None:
        if not ray.is_initialized():
            return None  # asking would start one
        try:
            applications = serve.status().applications
        except Exception:  # Serve is not up yet, or no more
            return None
        for name, status in applications.items():
            if name in self._config.apps and status.status == "DEPLOY_FAILED":
                messages = [deployment.message for deployment in status.deployments.values()] or [status.message]
                return f"application {name!r} can't be deployed: " + "; ".join(map(_last_line, messages))
        return None

    def _health(self) -> dict[str, Any] | None:
        if self._config.health_url is None:
            return None
        try:
            with urllib.request.urlopen(self._config.health_url, timeout=2) as response:
                content = json.load(response)
        except urllib.error.HTTPError as error:
            try:
                content = json.load(error)
            except ValueError:
                return None
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None


def _last_line(message: str) -> str:
    """The exception at the end of a traceback, which is what Serve's messages are."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Serve gave no reason"


if __name__ == "__main__":
    sys.exit(main())
