"""The n-gram drafter: what it finds, how long its guesses are, and that it is quick and forgets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.errors import ConfigError
from plugins.drafters.ngram import NgramDrafter


def propose(tokens: list[int], max_tokens: int = 100, **options: int) -> list[int]:
    return list(NgramDrafter(**options).propose("a", tokens, max_tokens, 0))


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 2, 3], num_tokens=3) == [4, 5, 9]


def test_the_longest_ngram_wins_then_the_latest_place() -> None:
    assert propose([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], num_tokens=1) == [7], "three tokens before two"
    assert propose([2, 3, 7, 0, 2, 3, 8, 0, 2, 3], num_tokens=1, max_ngram=2) == [8], "the latest of two"
    assert propose([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], num_tokens=1, max_ngram=3) == [8], "no longer than said"


def test_short_ngrams_are_not_looked_up() -> None:
    assert propose([1, 2, 3, 4, 2]) == []
    assert propose([1, 2, 3, 4, 2], min_ngram=1, num_tokens=2) == [3, 4]
    assert propose([1]) == []
    assert propose([1, 1]) == []


def test_a_guess_goes_on_from_itself_where_the_text_ends() -> None:
    assert propose([1, 2, 1, 2, 1, 2], num_tokens=5) == [1, 2, 1, 2, 1]
    assert propose([4, 4, 4], num_tokens=4) == [4, 4, 4, 4]


def test_no_more_is_guessed_than_asked_for() -> None:
    assert propose([1, 2, 3, 4, 5, 1, 2], max_tokens=2) == [3, 4]


def test_guesses_are_short_after_wrong_ones_and_long_again_after_right_ones() -> None:
    drafter = NgramDrafter(num_tokens=8)
    tokens = [*range(40), 0, 1]
    assert drafter.propose("a", tokens, 100, 0) == list(range(2, 10))
    tokens += [2, 3, 99, 10, 11]  # two were right
    assert drafter.propose("a", tokens, 100, 0) == [12, 13, 14]
    tokens += [50, 12, 13]  # none was
    assert drafter.propose("a", tokens, 100, 0) == [14]
    lengths = []
    for _ in range(5):
        tokens += drafter.propose("a", tokens, 100, 0)
        lengths.append(len(drafter.propose("a", tokens, 100, 0)))
    assert lengths == [2, 4, 8, 8, 8]


def test_a_request_that_ended_is_forgotten() -> None:
    drafter = NgramDrafter()
    assert drafter.propose("a", [1, 2, 3, 1, 2], 1, 0) == [3]
    drafter.on_request_finished("a")
    drafter.on_request_finished("nobody")
    assert drafter.propose("a", [7, 1, 2], 1, 0) == []
    drafter.on_request_finished("a")
    assert not drafter._histories


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.sets(st.integers(1, 59), max_size=12),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_the_index_finds_what_a_scan_finds_however_tokens_come(
    tokens: list[int], cuts: set[int], min_ngram: int, more: int
) -> None:
    drafter = NgramDrafter(num_tokens=1, min_ngram=min_ngram, max_ngram=min_ngram + more)
    for end in sorted({cut for cut in cuts if cut < len(tokens)} | {len(tokens)}):
        known = tokens[:end]
        assert list(drafter.propose("a", known, 1, 0)) == scan(known, min_ngram, min_ngram + more)


def scan(tokens: list[int], min_ngram: int, max_ngram: int) -> list[int]:
    """The token after the latest earlier place of the longest n-gram at the end."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == tokens[len(tokens) - n :]:
                return [tokens[end]]
    return []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be a whole number of at least 1 and at most 16, not 0"),
        ({"num_tokens": 17}, "not 17"),
        ({"num_tokens": 2.0}, "not 2.0"),
        ({"num_tokens": True}, "not True"),
        ({"num_tokens": "4"}, "not '4'"),
        ({"min_ngram": 0}, "min_ngram must be"),
        ({"min_ngram": 1.5}, "not 1.5"),
        ({"min_ngram": 5, "max_ngram": 4}, "at most max_ngram, which is 4, not 5"),
        ({"max_ngram": 17}, "at most 16, not 17"),
        ({"max_ngram": float("inf")}, "not inf"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)


def test_tokens_on_their_way_are_guessed_too() -> None:
    drafter = NgramDrafter(num_tokens=2)
    assert drafter.propose("a", [1, 2, 3, 4, 5, 6, 1, 2], 100, 1) == [3, 4, 5]
