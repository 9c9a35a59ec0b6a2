"""Writes the small trace that ships: `uv run python -m loadtest.load.make_trace`.

A minute of a few assistants at once: each conversation grows by an answer and a new message with every request, so
that its blocks are the beginning of its next prompt; all share a system prompt. Small enough for two cores.
"""

from __future__ import annotations

import json
import random
from typing import Any

from loadtest.load.traces import SMALL_TRACE

BLOCK_SIZE = 64
_SYSTEM_BLOCKS = 3
_CONVERSATIONS = 12
_MINUTE_MS = 60_000


def small_trace(seed: int = 20261130) -> list[dict[str, Any]]:
    """The trace's lines, by time."""
    randomness = random.Random(seed)
    system = list(range(_SYSTEM_BLOCKS))
    next_id = _SYSTEM_BLOCKS
    lines = []
    for _ in range(_CONVERSATIONS):
        moment = randomness.randrange(_MINUTE_MS // 2)
        length = _SYSTEM_BLOCKS * BLOCK_SIZE + randomness.randint(20, 150)
        ids = list(system)
        for _ in range(randomness.randint(1, 5)):
            while len(ids) < -(-length // BLOCK_SIZE):
                ids.append(next_id)
                next_id += 1
            output = randomness.randint(8, 64)
            lines.append({"timestamp": moment, "input_length": length, "output_length": output, "hash_ids": list(ids)})
            # A block that was not full has another content, and so another id, once the prompt has grown.
            ids = ids[: length // BLOCK_SIZE]
            length += output + randomness.randint(20, 120)
            moment += randomness.randint(3_000, 12_000)
    return sorted(lines, key=lambda line: line["timestamp"])


def main() -> None:
    """Writes the file."""
    SMALL_TRACE.write_text("".join(json.dumps(line) + "\n" for line in small_trace()))


if __name__ == "__main__":
    main()
