"""The weights for all peers, made once by a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.peers import commands
from loadtest.peers.base import Setup, Weights
from loadtest.peers.commands import StepError

_REPOSITORY = Path(__file__).parent.parent.parent
WORKER = (sys.executable, "-m", "loadtest.peers.worker_weights")


def ensure_weights(setup: Setup, timeout_s: float, worker: Sequence[str] = WORKER) -> Weights:
    """Where the weights are, made now unless they are in the cache. Raises StepError with the worker's last lines."""
    log = setup.logs / "weights.log"
    log.unlink(missing_ok=True)
    code = commands.run([*worker, str(setup.cache)], log, timeout_s, cwd=_REPOSITORY)
    if code:
        raise StepError(f"the weights can't be made:\n{commands.last_words(log)}")
    try:
        found = json.loads(log.read_text().strip().splitlines()[-1])
        paths = {name: Path(value) for name, value in found.items() if name != "sha256"}
        return Weights(**paths, sha256=found["sha256"])
    except (OSError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise StepError(f"the weights' worker said something else than where they are: {error!r}") from error
