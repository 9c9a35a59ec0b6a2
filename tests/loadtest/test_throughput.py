from __future__ import annotations

import pytest

from loadtest.throughput import BatchRun, agreement


def test_rates_of_a_run_worked_out_by_hand() -> None:
    # Two sequences of 10 and 30 prompt tokens; the second starts late, and the first ends early.
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    run = BatchRun([10, 30], [[1] * 4, [2] * 4], times)
    assert run.prefill_rate == 40 / 2.0
    # Both decode from 2.0 to 4.0: two tokens each.
    assert run.decode_rate == 4 / 2.0
    assert run.end_to_end_rate == 8 / 5.0


def test_without_a_time_when_all_decode_there_is_no_decode_rate() -> None:
    run = BatchRun([1, 1], [[1, 1], [1, 1]], [[1.0, 2.0], [3.0, 4.0]])
    assert run.decode_rate is None


@pytest.mark.parametrize(
    ("tokens", "times"),
    [([[1, 2]], [[0.1, 0.2]]), ([[1, 2], [1]], [[0.1, 0.2], [0.1]]), ([[1, 2], [1, 2]], [[0.1, 0.2], [0.1]])],
)
def test_missing_tokens_are_noticed(tokens: list[list[int]], times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="expected 2 tokens of 2 sequences"):
        BatchRun([5, 5], tokens, times).check(2)


def test_agreement_counts_whole_sequences_and_common_starts() -> None:
    assert agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == {"sequences": 0.5, "tokens": 4 / 6}
    assert agreement([], []) == {"sequences": 1.0, "tokens": 1.0}
    with pytest.raises(ValueError, match=r".+"):
        agreement([[1]], [])
