"""Environments of peers: made once by uv in the user's cache, and made again when they are broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import filelock
import platformdirs

from loadtest.environment import usable_cores
from loadtest.peers import commands
from loadtest.peers.base import PeerUnavailableError, Setup
from loadtest.peers.commands import StepError

_STAMP = "quire-peer.json"
OUR_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# These belong to the environment that we run in.
_NOT_INHERITED = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "PYTHONPATH", "PYTHONHOME")


def cache_folder() -> Path:
    """Where environments and weights are kept: `peers` in QUIRE_CACHE_DIR or in the user's cache folder."""
    return Path(os.environ.get("QUIRE_CACHE_DIR") or platformdirs.user_cache_dir("quire")) / "peers"


def site_packages(folder: Path) -> Path:
    """The packages' folder of an environment that exists. Raises FileNotFoundError if there is none."""
    for found in sorted((folder / "lib").glob("python3*/site-packages")):
        return found
    raise FileNotFoundError(f"{folder} has no site-packages")


def versions(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the named distributions, in that order; what isn't installed is left out."""
    installed = {
        distribution.metadata["Name"].lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions(path=[str(site_packages(folder))])
    }
    return {name: installed[name] for name in names if name in installed}


@dataclass(frozen=True, slots=True)
class PeerVenv:
    """One environment: what goes into it, and how to see that it is whole."""

    name: str  # of its folder
    attempts: tuple[tuple[str, ...], ...]  # arguments of `uv pip install`, tried in this order
    check: tuple[str, ...]  # a command, its first word in the environment's bin; exit code 0 says that it works
    overrides: tuple[str, ...] = ()  # requirements that replace the same packages' everywhere
    python: str = OUR_PYTHON
    finish: Callable[[Path], None] | None = None  # called with the folder after the installation; may raise OSError

    def ensure(self, setup: Setup) -> Path:
        """The environment's folder, installed now unless it is there and whole.

        Raises PeerUnavailableError with the last lines of the log if it can't be installed, StepError if the time is
        up. Processes that ask at the same time wait for the first one.
        """
        folder = setup.cache / self.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = setup.logs / f"install-{self.name}.log"
        deadline = time.monotonic() + setup.install_timeout_s
        try:
            with filelock.FileLock(folder.with_name(f"{self.name}.lock"), timeout=setup.install_timeout_s):
                if not self._is_done(folder):
                    self._install(folder, log, deadline)
        except filelock.Timeout:
            raise StepError(f"another process has installed {self.name} for too long") from None
        return folder

    def _stamp(self) -> dict[str, object]:
        return {"attempts": [list(a) for a in self.attempts], "overrides": list(self.overrides), "python": self.python}

    def _is_done(self, folder: Path) -> bool:
        try:
            same = json.loads((folder / _STAMP).read_text()) == self._stamp()
        except (OSError, ValueError):
            return False
        return same and self._works(folder)

    def _works(self, folder: Path) -> bool:
        program, *arguments = self.check
        command = [str(folder / "bin" / program), *arguments]
        try:
            found = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return found.returncode == 0

    def _install(self, folder: Path, log: Path, deadline: float) -> None:
        uv = shutil.which("uv")
        if uv is None:
            raise PeerUnavailableError("uv is not on PATH: it makes the peers' environments. Install it, or run this "
                                       "with `make compare`")  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        (folder / _STAMP).unlink(missing_ok=True)
        # What another run began is kept, and only if that doesn't come to work it is made afresh.
        for fresh in (False, True) if folder.exists() else (True,):
            if self._install_once(uv, folder, log, deadline, fresh):
                (folder / _STAMP).write_text(json.dumps(self._stamp()))
                return
        raise PeerUnavailableError(f"can't be installed:\n{commands.last_words(log)}")

    def _install_once(self, uv: str, folder: Path, log: Path, deadline: float, fresh: bool) -> bool:
        env = uv_environment()
        kind = "--clear" if fresh else "--allow-existing"
        if commands.run([uv, "venv", "--python", self.python, kind, str(folder)], log, _left(deadline), env=env):
            return False
        base = [uv, "pip", "install", "--python", str(folder / "bin/python")]
        if self.overrides:
            path = folder / "overrides.txt"
            path.write_text("\n".join(self.overrides) + "\n")
            base += ["--override", str(path)]
        if all(commands.run([*base, *attempt], log, _left(deadline), env=env) for attempt in self.attempts):
            return False
        try:
            if self.finish is not None:
                self.finish(folder)
        except OSError as error:
            raise PeerUnavailableError(commands.without_paths(f"installed, but not as expected: {error}")) from error
        if not self._works(folder):
            with log.open("a") as file:
                file.write(f"{' '.join(self.check)} does not work in the new environment\n")
            return False
        return True


def uv_environment() -> dict[str, str]:
    """Our environment for uv, which doesn't read pip's: folders of wheels that pip is told of are for it too."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # Builds that say `-j` to make start a hundred compilers at once; make heeds the load besides.
    env.setdefault("MAKEFLAGS", f"-l{len(usable_cores()) + 1}")
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", ",".join(env["PIP_FIND_LINKS"].split()))
    return env


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StepError("the time for the installation is up")
    return left
