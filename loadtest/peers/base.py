"""What a peer is: how it is had, how it is started, and what a result says about it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from loadtest import processes
from loadtest.peers import commands
from loadtest.peers.commands import StepError, without_paths
from loadtest.serve_process import free_ports

MODEL_NAME = "SmolLM2-135M-Instruct"
# Every server may run this many sequences at once, as ours does: its largest batch is part of what is compared.
MAX_SEQUENCES = 64
MAX_MODEL_LEN = 2048
PORT = "PORT"  # stands for the port in a launch's command
PROBE_PROMPT = "The capital of France is"
PROBE_TOKENS = 16
_PROBE_TIMEOUT_S = 120.0


class PeerUnavailableError(RuntimeError):
    """This machine can't have the peer; the message says why. No fault of the comparison."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The same model in every format that a peer reads."""

    hf_float32: Path  # Hugging Face folders
    hf_bfloat16: Path
    gguf_shipped: Path
    gguf_bf16: Path
    gguf_f32: Path
    sha256: str  # of the shipped file, from which the others are made


@dataclass(frozen=True, slots=True)
class LevelLimit:
    """The highest level that a peer is asked for, and why."""

    up_to: int
    reason: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a peer without having it."""

    name: str  # on the command line and in results
    title: str  # in tables and figures
    dtype: str  # what its weights are stored in
    ignore_eos: bool = True  # whether it can be made to generate past end-of-sequence
    level_limit: LevelLimit | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a peer is installed, and how long that may take."""

    cache: Path  # the folder of all environments and weights
    logs: Path
    install_timeout_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. PORT stands for the port in the command."""

    command: tuple[str, ...]
    model: str  # what clients send as `model`
    environment: Mapping[str, str] = field(default_factory=dict)  # added to ours
    notes: tuple[str, ...] = ()  # what a reader of the result has to know

    def shown(self) -> dict[str, Any]:
        """The launch for a result: no path of this machine, no port."""
        return {
            "command": [without_paths(argument) for argument in self.command],
            "environment": {name: without_paths(value) for name, value in self.environment.items()},
            "notes": list(self.notes),
        }


class Server(Protocol):
    """A server that a context manager starts, ready inside, and ends with all its processes."""

    base_url: str
    model: str
    ready_s: float | None  # from start to ready, once it is

    def __enter__(self) -> Server: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Peer(Protocol):
    """One server to compare. `install` comes first; the others may be called any number of times after it."""

    @property
    def spec(self) -> Spec:
        """Name, title and what it can do."""
        ...

    def install(self, setup: Setup) -> dict[str, str]:
        """Makes the peer ready to start, once for all runs; versions by package, the peer's own first.

        Raises PeerUnavailableError if it can't be had here, StepError if that took too long.
        """
        ...

    def launch(self, weights: Weights) -> Launch:
        """How it is started on these weights."""
        ...

    def server(self, launch: Launch, log: Path, timeout_s: float) -> Server:
        """The server, not yet started. Entering it raises StepError unless it is ready within timeout_s."""
        ...


class PeerServer:
    """A server that is one command, ready when /health says 200."""

    def __init__(self, launch: Launch, log: Path, timeout_s: float) -> None:
        port = str(free_ports(1)[0])
        self._command = [argument.replace(PORT, port) for argument in launch.command]
        # Another environment's Python must not see ours.
        inherited = {name: value for name, value in os.environ.items()
                     if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}  # fmt: skip
        self._environment = {**inherited, **launch.environment}
        self._log = log
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.model = launch.model
        self.base_url = f"http://127.0.0.1:{port}"
        self.ready_s: float | None = None

    def __enter__(self) -> PeerServer:
        started = time.monotonic()
        try:
            self._process = commands.start(self._command, self._log, self._environment)
        except OSError as error:
            raise StepError(without_paths(f"{self._command[0]} can't be started: {error.strerror}")) from error
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
        """Ends the server in order, then kills what is left; safe to call again."""
        process, self._process = self._process, None
        if process is not None:
            processes.stop(process)

    def _wait_ready(self, started: float) -> None:
        assert self._process is not None
        while time.monotonic() - started < self._timeout_s:
            if self._process.poll() is not None:
                words = commands.last_words(self._log)
                raise StepError(f"the server ended with {self._process.returncode}:\n{words}")
            try:
                with urllib.request.urlopen(f"{self.base_url}/health", timeout=5):
                    return
            except (OSError, ValueError):  # refused, or 503 while it loads
                time.sleep(0.2)
        raise StepError(f"the server was not ready after {self._timeout_s:.0f} s:\n{commands.last_words(self._log)}")


def probe(server: Server, timeout_s: float = _PROBE_TIMEOUT_S) -> str:
    """The greedy text after PROBE_PROMPT: shows that the server really answers, and from the same weights as others.

    Raises StepError if it doesn't.
    """
    body = {"model": server.model, "prompt": PROBE_PROMPT, "max_tokens": PROBE_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return str(json.load(response)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        said = without_paths(error.read().decode(errors="replace"))[:300]
        raise StepError(f"the server answered a first request with {error.code}: {said}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise StepError(f"the server gave no answer to a first request: {error!r}") from error


def known_names(peers: Sequence[Peer]) -> str:
    """The peers' names, for a message."""
    return ", ".join(peer.spec.name for peer in peers)
