"""Commands with a time limit and a log, whose processes never outlive us; and text without this machine's paths."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest import processes

_LOG_LINES = 12
_LINE_CHARACTERS = 300
# An absolute path of at least two components; not what follows the host in a URL.
_PATH = re.compile(r"(?<![\w./~-])(?:~|/(?!/))?(?:/?[^\s:/,;'\"()=]+/)+(?P<name>[^\s:/,;'\"()=]*)")


class StepError(RuntimeError):
    """A step of the comparison failed or took too long; the message may go into a result."""


def without_paths(text: str) -> str:
    """The text with each absolute path replaced by its last component, so that it says nothing of this machine."""

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        if not path.startswith(("/", "~")):
            return path
        return match["name"] or path.rstrip("/").rsplit("/", 1)[-1]

    return _PATH.sub(shorten, text)


def last_words(log: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log that aren't empty, paths shortened."""
    try:
        content = log.read_text(errors="replace")
    except OSError:
        return ""
    # Progress bars rewrite their line.
    found = [line.rsplit("\r", 1)[-1].rstrip()[-_LINE_CHARACTERS:] for line in content.split("\n")]
    return without_paths("\n".join([line for line in found if line][-lines:]))


def start(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command whose output goes to the end of `log`. Ctrl-C doesn't reach it: whoever started it ends it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )


def run(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int:
    """Runs a command to its end; returns its exit code.

    Raises StepError if it can't be started, or isn't done in time. It is gone when this returns or raises.
    """
    try:
        process = start(command, log, env, cwd)
    except OSError as error:
        raise StepError(without_paths(f"{command[0]} can't be started: {error.strerror}")) from error
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise StepError(f"not done after {timeout_s:.0f} s:\n{last_words(log)}") from None
    finally:
        processes.stop(process)
