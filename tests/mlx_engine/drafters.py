"""Drafters for engines over simulated K/V: one that is mostly right, one that is as bad as it can be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from mlx_engine.interfaces import Drafter
from plugins.drafters.ngram import NgramDrafter
from plugins.simulator import reference_tokens

Domain = Callable[[str], str]


class Oracle(Drafter):
    """Knows how every request goes on, and says it up to a random token; wrong ones may follow."""

    def __init__(self, vocab_size: int, domain: Domain, seed: int) -> None:
        self._vocab_size, self._domain, self._rng = vocab_size, domain, random.Random(seed)

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        length = self._rng.choice([0, 1, 2, max_tokens, max_tokens])
        guess = reference_tokens(token_ids, min(length, max_tokens), self._vocab_size, self._domain(request_id))
        if guess and self._rng.random() < 0.3:
            wrong = self._rng.randrange(len(guess))
            guess[wrong] = (guess[wrong] + 1) % self._vocab_size
        return guess


class Malicious(Drafter):
    """Guesses whatever a step must not run, wrong tokens, and right ones among them."""

    def __init__(self, vocab_size: int, domain: Domain, seed: int) -> None:
        self._vocab_size, self._domain, self._rng = vocab_size, domain, random.Random(seed)

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Any:
        right = reference_tokens(token_ids, max_tokens, self._vocab_size, self._domain(request_id))
        # One more fits where many more would find no blocks.
        too_many = [*right, 1]
        beyond, below = [*right[:-1], self._vocab_size], [*right[:-1], -1]
        others = [None, 7, "abc", [1.0], [None], iter(right), {1: 1}, [[1]]]
        wrong = [self._rng.randrange(self._vocab_size) for _ in range(max_tokens)]
        if self._rng.random() < 0.1:
            raise KeyError(request_id)
        return self._rng.choice([too_many, too_many, beyond, below, wrong, right, [], *others])

    def on_request_finished(self, request_id: str) -> None:
        raise KeyError(request_id)


def make_drafter(name: str, vocab_size: int, domain: Domain, seed: int = 0) -> Drafter | None:
    """The drafter of this name; None for `none`."""
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter(min_ngram=1)
    return {"oracle": Oracle, "malicious": Malicious}[name](vocab_size, domain, seed)
