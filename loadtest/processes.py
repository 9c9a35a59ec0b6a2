"""Processes by id: who belongs to whom, and how much memory each holds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as it was when it was looked at."""

    pid: int
    parent: int
    rss_bytes: int
    command: str


def snapshot() -> dict[int, Process]:
    """All processes that can be seen, by id."""
    if (_PROC / "self/statm").exists():
        found = (_from_proc(int(folder.name)) for folder in _PROC.iterdir() if folder.name.isdigit())
        return {process.pid: process for process in found if process is not None}
    command = ["ps", "-A", "-o", "pid=,ppid=,rss=,command="]
    return parse_ps(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)


def parse_ps(text: str) -> dict[int, Process]:
    """The output of `ps -o pid=,ppid=,rss=,command=`; its sizes are KiB."""
    found = {}
    for line in text.splitlines():
        pid, parent, rss, *command = line.split(None, 3)
        found[int(pid)] = Process(int(pid), int(parent), int(rss) * 1024, command[0] if command else "")
    return found


def descendants(processes: Mapping[int, Process], root: int) -> list[Process]:
    """The processes below root, parents first; root itself is not among them."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += [process.pid for process in below]
    return found


def stop(process: subprocess.Popen[bytes], timeout_s: float = 30.0, grace_s: float = 0.0) -> list[Process]:
    """Ends a process in order, then kills what is left of it and of its children; returns those children.

    timeout_s: for the process itself. grace_s: for children that end by themselves once it has. Safe to call again.
    """
    ours = descendants(snapshot(), process.pid) if process.poll() is None else []
    if process.poll() is None:
        # Not SIGINT: whoever started us in the background of a script made us, and so our children, ignore it.
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        ours += descendants(snapshot(), process.pid)
        process.kill()
        process.wait()
    time.sleep(grace_s)
    return end(ours)


def end(remembered: Iterable[Process]) -> list[Process]:
    """Kills those of the processes that are still there with the same command; returns them."""
    now = snapshot()
    left = [process for process in remembered if _is_same(now.get(process.pid), process)]
    for process in left:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return left


def _is_same(now: Process | None, then: Process) -> bool:
    # An id may have been given to another process since; a zombie has no command left.
    return now is not None and bool(now.command) and now.command == then.command


def _from_proc(pid: int) -> Process | None:
    folder = _PROC / str(pid)
    try:
        # After the name, which is in parentheses and may hold anything: state, parent, …
        parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        pages = int((folder / "statm").read_text().split()[1])
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").strip().decode(errors="replace")
    except (OSError, ValueError, IndexError):
        return None  # it has ended meanwhile
    return Process(pid, parent, pages * os.sysconf("SC_PAGE_SIZE"), command)
