from __future__ import annotations

from collections import Counter

from loadtest.bench_memory import Outcome, Sample, checkpoints, kind_of, parse_args, render


def test_one_request_in_five_is_dropped_and_one_in_ten_refused() -> None:
    counts = Counter(kind_of(index) for index in range(600))
    assert counts == {"normal": 420, "drop_in_prefill": 60, "drop_in_decode": 60, "refused": 60}


def test_looks_are_taken_after_100_300_and_600_requests() -> None:
    assert checkpoints(parse_args([]).requests) == [100, 300, 600]
    assert checkpoints(1) == [1]


def _sample(requests: int, engine_mib: int, **blocks: float) -> Sample:
    states = {"free": 0.0, "private": 0.0, "cached_in_use": 0.0, "cached_evictable": 0.0} | blocks
    return Sample(requests, {"engine": engine_mib << 20, "replica": 1 << 20}, states, 3.0, 0.1)


def test_blocks_are_back_when_none_is_held_and_as_many_can_be_had() -> None:
    first = _sample(0, 100, free=90, cached_evictable=10)
    back = Outcome([first, _sample(600, 110, free=40, cached_evictable=60)])
    assert back.blocks_are_back
    assert "+10.0" in render(back)
    assert "no block is held" in render(back)
    for last in (
        _sample(600, 100, free=40, cached_evictable=59),
        _sample(600, 100, free=40, cached_evictable=60, private=1),
        _sample(600, 100, free=40, cached_evictable=60, cached_in_use=1),
    ):
        leaked = Outcome([first, last])
        assert not leaked.blocks_are_back
        assert "BLOCKS ARE MISSING" in render(leaked)
