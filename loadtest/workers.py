"""Each arm of a benchmark in a process of its own, so that neither's memory or module patches reach the other."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_LOG_LINES = 15


class WorkerError(RuntimeError):
    """The worker answered with an error, or ended."""


class WorkerTimeout(WorkerError):
    """The worker did not answer in time; it has been stopped."""


class Worker:
    """A Python module run as a child that answers calls, one at a time, and idles without using the CPU between them.

    Its standard error goes to the file `log`, and it runs in this program's Python unless `python` names another. Use
    it as a context manager, or call `close`.
    """

    def __init__(
        self, module: str, log: Path, env: Mapping[str, str] | None = None, python: str = sys.executable
    ) -> None:
        self._name = module
        self._log = log
        self._replies: queue.Queue[str | None] = queue.Queue()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                text=True,
                cwd=Path(__file__).parent.parent,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, timeout_s: float, **params: Any) -> Any:
        """The method's result. Raises WorkerTimeout (and stops the worker) or WorkerError."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise WorkerError(f"{self._name} has been stopped")
        try:
            self._process.stdin.write(json.dumps({"method": method, "params": params}) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            self.close()
            raise WorkerTimeout(f"{self._name} did not answer {method!r} within {timeout_s:.0f} s") from None
        except BrokenPipeError:
            line = None
        if line is None:
            self.close()  # its output is at its end, and it will be in a moment
            raise WorkerError(f"{self._name} ended:\n{self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self._name}: {reply['error']}")
        return reply["result"]

    @property
    def alive(self) -> bool:
        """Whether it can still answer: it has neither ended nor been stopped."""
        stdin = self._process.stdin
        return stdin is not None and not stdin.closed and self._process.poll() is None

    def close(self) -> None:
        """Ends the process, killing it if it does not end by itself; safe to call again."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])
