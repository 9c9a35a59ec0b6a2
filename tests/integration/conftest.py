"""The real thing, once a session: `quire serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.serve_process import free_ports

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
START_S = 240.0  # generous: CI shares two cores
DEADLINE_S = 60.0


def free_port() -> int:
    """A port that nobody is dealt before the server binds it."""
    return free_ports(1)[0]


def write_config(folder: Path, port: int, **changes: Any) -> Path:
    """configs/local.yaml on another port; `changes` are merged into its args."""
    content = yaml.safe_load((ROOT / "configs" / "local.yaml").read_text())
    content["http_options"]["port"] = port
    args = content["applications"][0]["args"]
    for key, value in changes.items():
        args[key] = {**args[key], **value} if isinstance(value, dict) else value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def wait_for(condition: Callable[[], Any], what: str, timeout: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"never in {timeout:.0f} s: {what}"
        time.sleep(0.05)
    return result


@dataclass
class Served:
    """A running `quire serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    descendants: set[int] = field(default_factory=set)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE_S)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": MODEL, **body}, timeout=DEADLINE_S)

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body; status 0 while nobody answers."""
        try:
            response = httpx.get(self.url + "/health", timeout=2)
            return response.status_code, response.json()
        except (httpx.HTTPError, ValueError):
            return 0, {}

    def metric(self, name: str, **labels: str) -> float | None:
        """The sample of that name whose labels match; None while the engine is too busy to say."""
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(rf"quire:{name}(\{{.*\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                return float(match[2])
        return None

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.process.poll() is not None or self.health()[0] == 200, "ready", START_S)
        assert self.process.poll() is None, self.output()
        self.descendants = tree_of(self.process.pid)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGINT) -> float:
        """Sends the signal; seconds until the process has ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(DEADLINE_S)
        return time.monotonic() - began

    def kill_all(self) -> None:
        """Whatever is left of it, by id."""
        if self.process.poll() is None:
            self.stop()
        for pid in self.descendants:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def start(config: Path | str, log: Path, port: int, arguments: Sequence[str] = (), **environment: str) -> Served:
    """`quire serve` from a folder that is not the source tree's."""
    command = [sys.executable, "-m", "deployments.cli", "serve", str(config), *arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "QUIRE_ENGINE"))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**clean, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
    return Served(process, f"http://127.0.0.1:{port}", log)


def tree_of(pid: int) -> set[int]:
    """The ids of all processes below one, Ray's workers too: they are the raylet's children."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent doesn't."""
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state = listing.stdout.strip()
    return bool(state) and not state.startswith("Z")


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it running."""
    folder = tmp_path_factory.mktemp("serve")
    port = free_port()
    running = start(write_config(folder, port), folder / "log", port)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill_all()
