"""Guesses by looking up: what followed the last tokens where they stood before in the same request.

Costs no model. Pays where an answer repeats its prompt or itself: edits, summaries, code, extraction, quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mlx_engine.drafts import MAX_DRAFT_TOKENS
from mlx_engine.errors import ConfigError
from mlx_engine.interfaces import Drafter

# A request's memory, and the time for each of its tokens, grow with the sizes that are looked up.
_LONGEST_NGRAM = 16


@dataclass(slots=True)
class _History:
    """What is kept of one request: with n-grams of 2 to 4 some 450 bytes for each token, a hundredth of its K/V."""

    limit: int  # tokens to guess
    # The place after each n-gram's last occurrence, of those that something follows: lengths share the dictionary.
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0  # tokens that n-grams in `ends` are followed by, all those before them included
    asked_at: int = 0  # tokens known at the last guess
    guess: Sequence[int] = ()


class NgramDrafter(Drafter):
    """The longest n-gram, of `max_ngram` to `min_ngram` tokens, that ends the text and stands in it before.

    Of several places the latest counts. A guess is `num_tokens` long, shorter after wrong ones.
    """

    interface_version: ClassVar[int] = 1

    def __init__(self, *, num_tokens: int = 8, min_ngram: int = 2, max_ngram: int = 4) -> None:
        for name, value, most in (
            ("num_tokens", num_tokens, MAX_DRAFT_TOKENS),
            ("max_ngram", max_ngram, _LONGEST_NGRAM),
            ("min_ngram", min_ngram, max_ngram),
        ):
            if type(value) is not int or not 1 <= value <= most:
                limit = f"max_ngram, which is {most}" if name == "min_ngram" else most
                raise ConfigError(f"{name} must be a whole number of at least 1 and at most {limit}, not {value!r}.")
        self._num_tokens = num_tokens
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._histories: dict[str, _History] = {}

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        """What followed the latest place like this one; beyond the end of the text it goes on from itself."""
        history = self._histories.get(request_id)
        if history is None:
            history = self._histories[request_id] = _History(self._num_tokens)
        self._learn(history, token_ids)
        self._index(history, token_ids)
        history.asked_at = len(token_ids)
        history.guess = self._look_up(history, token_ids, min(history.limit + num_pending, max_tokens))
        return history.guess

    def on_request_finished(self, request_id: str) -> None:
        """Forgets the request."""
        self._histories.pop(request_id, None)

    def _learn(self, history: _History, token_ids: Sequence[int]) -> None:
        """Adapts the length: one more than was right of the last guess, twice as many if nothing was wrong."""
        came = token_ids[history.asked_at : history.asked_at + len(history.guess)]
        if not came:
            return
        right = next((i for i, (a, b) in enumerate(zip(came, history.guess, strict=False)) if a != b), len(came))
        limit = right + 1 if right < len(came) else 2 * history.limit
        history.limit = min(limit, self._num_tokens)

    def _index(self, history: _History, token_ids: Sequence[int]) -> None:
        """Adds the n-grams that came to have a token after them."""
        num_tokens = len(token_ids)
        for n in range(self._min_ngram, self._max_ngram + 1):
            # The last n-gram of all is left out: nothing follows it.
            for end in range(max(history.num_indexed, n), num_tokens):
                history.ends[tuple(token_ids[end - n : end])] = end
        history.num_indexed = num_tokens

    def _look_up(self, history: _History, token_ids: Sequence[int], count: int) -> list[int]:
        num_tokens = len(token_ids)
        for n in range(min(self._max_ngram, num_tokens), self._min_ngram - 1, -1):
            place = history.ends.get(tuple(token_ids[num_tokens - n :]))
            if place is not None:
                break
        else:
            return []
        guess = list(token_ids[place : place + count])
        while len(guess) < count:
            guess.append(guess[place - num_tokens])
        return guess
