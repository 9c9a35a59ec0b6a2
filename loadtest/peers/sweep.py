"""One load sweep against one server, by a process of its own, and the results that are kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import environment
from loadtest.peers import commands
from loadtest.peers.commands import StepError

_REPOSITORY = Path(__file__).parent.parent.parent
_LOCUSTFILE = Path("loadtest/locustfile.py")
# Beyond the levels' own limits: the generator's start, and requests that end late.
_SLACK_S, _SLACK_PER_LEVEL_S = 120.0, 60.0
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is asked of a server: at each level, so many users with so many requests each."""

    levels: tuple[int, ...]
    requests_per_user: int
    input_tokens: int
    output_tokens: int
    seed: int  # of the prompts
    level_timeout_s: int
    ignore_eos: bool

    @property
    def timeout_s(self) -> float:
        """When the whole sweep is given up."""
        return _SLACK_S + len(self.levels) * (self.level_timeout_s + _SLACK_PER_LEVEL_S)

    def key_settings(self) -> dict[str, Any]:
        """What makes two sweeps of one server the same measurement."""
        return {
            "levels": list(self.levels), "requests_per_user": self.requests_per_user, "seed": self.seed,
            "input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "ignore_eos": self.ignore_eos,
            "level_timeout_s": self.level_timeout_s,
        }  # fmt: skip


# The command of a sweep: against this address and model, its result into this file.
SweepCommand = Callable[[Sweep, str, str, Path], Sequence[str]]


def locust_command(sweep: Sweep, base_url: str, model: str, result: Path) -> list[str]:
    """The scenario concurrency_sweep of our locustfile."""
    command = [
        sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--only-summary",
        "--host", base_url, "--model", model, "--scenario", "concurrency_sweep",
        "--levels", ",".join(map(str, sweep.levels)), "--level-requests-per-user", str(sweep.requests_per_user),
        "--input-tokens", str(sweep.input_tokens), "--output-tokens", str(sweep.output_tokens),
        "--seed", str(sweep.seed), "--level-timeout", str(sweep.level_timeout_s), "--result", str(result.resolve()),
    ]  # fmt: skip
    return command if sweep.ignore_eos else [*command, "--no-ignore-eos"]


def run_sweep(command: Sequence[str], timeout_s: float, result: Path, log: Path) -> tuple[int, dict[str, Any]]:
    """Runs the command from the repository; its exit code and what it wrote into `result`.

    Raises StepError if it takes too long or leaves no result.
    """
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    code = commands.run(command, log, timeout_s, cwd=_REPOSITORY)
    try:
        found = json.loads(result.read_text())
        levels = found["levels"]
        if not isinstance(levels, list) or not all("level" in level for level in levels):
            raise ValueError("its levels are no list of levels")
    except FileNotFoundError:
        raise StepError(f"it ended with {code} and left no result:\n{commands.last_words(log)}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StepError(f"its result can't be read: {error!r}") from error
    return code, found


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short hash of JSON-able settings, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class KeptRounds:
    """Results of single sweeps in a folder, each with the key of the settings that it was measured with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Forgets all of them."""
        for path in self._folder.glob("round-*.json"):
            path.unlink()

    def get(self, round_number: int, name: str, key: str) -> dict[str, Any] | None:
        """The entry of that round and peer, if it was measured with the same settings."""
        try:
            found = json.loads(self._path(round_number, name).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("entry"), dict):
            return None
        entry: dict[str, Any] = found["entry"]
        return entry

    def put(self, round_number: int, name: str, key: str, entry: Mapping[str, Any]) -> None:
        """Keeps an entry, in place of an older one."""
        environment.write_json(self._path(round_number, name), {"key": key, "entry": entry})

    def _path(self, round_number: int, name: str) -> Path:
        return self._folder / f"round-{round_number}-{name}.json"


def machine_load() -> dict[str, float | None]:
    """The load average, and the share of all cores that others use for a second from now (None where unknown)."""
    before = _cpu_times()
    busy = None
    if before is not None:
        time.sleep(1.0)
        after = _cpu_times()
        if after is not None and after[1] > before[1]:
            busy = (after[0] - before[0]) / (after[1] - before[1])
    return {"load_average_1min": os.getloadavg()[0], "cpu_busy_fraction": None if busy is None else round(busy, 3)}


def _cpu_times() -> tuple[int, int] | None:
    """Ticks that all cores have been busy, and ticks in all."""
    try:
        values = [int(value) for value in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = values[3] + values[4]  # waiting for a disk is idle too
    return sum(values) - idle, sum(values)
