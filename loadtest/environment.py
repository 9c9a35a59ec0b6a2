"""What a result must say about where it was measured, and the file it goes into."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-13", "mlx-lm", "numpy", "ray", "cmeel-openblas", "mlx-quire")
_REPOSITORY = Path(__file__).parent.parent


def describe() -> dict[str, Any]:
    """Commit, date (UTC), machine and versions, as they are now. Never raises: what can't be found out is None."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu_model(),
            "cores": len(usable_cores()),
            "memory_bytes": _memory_bytes(),
            # Other programs' load before the benchmark: figures from a busy machine are worth little.
            "load_average_1min": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def usable_cores() -> list[int]:
    """The cores that this process may use, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the result, making the folder first; a half-written file never stands under the name, nor beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def headline(environment: Mapping[str, Any]) -> str:
    """The environment in one line, for above a table."""
    machine, versions = environment["machine"], environment["versions"]
    memory = machine["memory_bytes"]
    return (
        f"{environment['date']}, commit {(environment['commit'] or 'unknown')[:12]}"
        f"{' with uncommitted changes' if environment['uncommitted_changes'] else ''}; {machine['cpu']}, "
        f"{machine['cores']} cores, {'unknown' if memory is None else f'{memory / 2**30:.0f} GiB'} of memory, load "
        f"{machine['load_average_1min']:.1f} before; mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}"
    )


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    try:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
