from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.load.make_trace import small_trace
from loadtest.load.traces import SMALL_TRACE, TraceError, TraceRequest, block_size_of, read_trace, to_call


def _write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def _line(**fields: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1, 2], **fields}


def test_the_trace_that_ships_is_what_its_maker_writes() -> None:
    assert [json.loads(line) for line in SMALL_TRACE.read_text().splitlines()] == small_trace()
    requests = read_trace(SMALL_TRACE)
    assert block_size_of(requests) == 64
    assert requests[0].arrival_s == 0
    shared = sum(request.hash_ids[:3] == (0, 1, 2) for request in requests)
    assert shared == len(requests) > 20


def test_requests_come_by_time_from_zero(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", _line(timestamp=9000), "", _line(timestamp=1500), _line(timestamp=3000))
    assert [request.arrival_s for request in read_trace(path)] == [0, 1.5, 7.5]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{broken", "line 2"),
        ("[1]", "not a JSON object"),
        ({"timestamp": 1}, "lacks 'input_length'"),
        (_line(input_length=0), "input_length is 0"),
        (_line(output_length="5"), "output_length is '5'"),
        (_line(timestamp=-1), "timestamp is -1"),
        (_line(hash_ids=["a"]), "hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, what: str) -> None:
    with pytest.raises(TraceError, match=what):
        read_trace(_write(tmp_path / "t.jsonl", _line(), line))


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no request"):
        read_trace(_write(tmp_path / "t.jsonl", ""))


def test_the_block_size_follows_from_the_lines() -> None:
    mooncake = [TraceRequest(0, 6955, 52, tuple(range(14))), TraceRequest(0, 512, 1, (0,))]
    assert block_size_of(mooncake) == 512
    with pytest.raises(TraceError, match="block size"):
        block_size_of([TraceRequest(0, 100, 1, (1,)), TraceRequest(0, 100, 1, (1, 2))])


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_equal_ids_give_equal_text_and_lengths_hold(scale: float) -> None:
    first = to_call(TraceRequest(0, 150, 10, (4, 5, 6)), 64, scale)
    second = to_call(TraceRequest(0, 180, 10, (4, 5, 9)), 64, scale)
    words, others = (first.prompt or "").split(), (second.prompt or "").split()
    shared = int(128 * scale)
    assert len(words) == 150 * scale
    assert words[:shared] == others[:shared]
    assert words[shared:] != others[shared : len(words)]
    assert first.max_tokens == 10 * scale
