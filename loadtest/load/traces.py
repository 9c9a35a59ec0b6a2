"""Traces of requests in Mooncake's format: one JSON object a line.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}`: milliseconds since the
trace began, lengths in tokens, and an id for each block of the prompt; equal ids at the beginning mean an equal
prefix. Blocks have 512 tokens in Mooncake's own traces (https://github.com/kvcache-ai/Mooncake, FAST25-release).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.load.words import filler
from loadtest.load.workloads import Call, user_random

SMALL_TRACE = Path(__file__).parent / "small_trace.jsonl"
_LONGEST_MS = 366 * 86_400_000
MAX_LENGTH = 1_000_000  # tokens of a prompt or an answer; more is a mistake
_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class TraceError(ValueError):
    """The trace can't be replayed."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float  # since the trace began
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: tuple[int, ...]  # one for each block of the prompt, the last one's block may be partial


def read_trace(path: Path) -> list[TraceRequest]:
    """A trace's requests by time of arrival, the first at 0. Raises TraceError, naming the line."""
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path.name} can't be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_request(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path.name}, line {number}: {what}") from None
    if not found:
        raise TraceError(f"{path.name} holds no request")
    found.sort(key=lambda request: request.arrival_s)
    first = found[0].arrival_s
    return [TraceRequest(r.arrival_s - first, r.input_length, r.output_length, r.hash_ids) for r in found]


def _request(fields: dict[str, object]) -> TraceRequest:
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    numbers = {name: fields[name] for name in ("timestamp", "input_length", "output_length")}
    for name, value in numbers.items():
        least, most = (0, _LONGEST_MS) if name == "timestamp" else (1, MAX_LENGTH)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise ValueError(f"hash_ids is no list of integers: {ids!r}")
    timestamp, num_input, num_output = (float(value) for value in numbers.values())  # type: ignore[arg-type]
    return TraceRequest(timestamp / 1000, int(num_input), int(num_output), tuple(ids))


def block_size_of(requests: Sequence[TraceRequest]) -> int:
    """The tokens of a block, the largest of the usual sizes with which every line has as many ids as blocks.

    Raises TraceError if there is none.
    """
    for size in reversed(_BLOCK_SIZES):
        if all(len(request.hash_ids) == -(-request.input_length // size) for request in requests):
            return size
    raise TraceError("no usual block size fits all lines: each needs as many hash_ids as its prompt has blocks")


def to_call(request: TraceRequest, block_size: int, scale: float = 1.0) -> Call:
    """A request whose prompt has the trace's prefixes: the text of a block comes from its id alone.

    scale shortens all lengths alike, for models and machines smaller than the trace's; prefixes stay in common.
    """
    blocks = []
    remaining = request.input_length
    for hash_id in request.hash_ids:
        length = min(block_size, remaining)
        blocks.append(filler(user_random(hash_id), max(1, round(length * scale))))
        remaining -= length
    return Call("trace", max(1, round(request.output_length * scale)), prompt=" ".join(blocks))
