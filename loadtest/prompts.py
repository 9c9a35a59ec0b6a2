"""Prompts of exact length that share no prefix, as token ids.

Ids and not text: a length in tokens is then exact, and every system gets the same ones. They are ordinary lower-case
words of the vocabulary in random order, so that what a model makes of them is text too: a client sees a token only
when it is whole characters.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

_WORD = re.compile(r"^[Ġ▁][a-z]{3,12}$")  # a space and letters, as byte-level BPE and sentencepiece spell it
_FEWEST_WORDS = 500


def word_ids(folder: Path) -> list[int]:
    """The ids of whole words in the vocabulary of a model folder's tokenizer.json, ascending.

    Raises ValueError when there are too few: then the vocabulary is of a kind not known here.
    """
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    # Unigram models list [token, score] pairs.
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
    ids = sorted(index for token, index in pairs if _WORD.match(token))
    if len(ids) < _FEWEST_WORDS:
        raise ValueError(f"the tokenizer in {folder} holds only {len(ids)} whole words; prompts can't be made of it")
    return ids


class PromptSource:
    """Deals prompts; no two of one source begin with the same token, so no prefix cache can help."""

    def __init__(self, ids: Sequence[int], seed: int = 0) -> None:
        self._ids = list(dict.fromkeys(ids))
        self._random = random.Random(seed)
        self._first = list(self._ids)
        self._random.shuffle(self._first)

    @property
    def remaining(self) -> int:
        """How many more prompts there are."""
        return len(self._first)

    def take(self, num_tokens: int) -> list[int]:
        """A prompt of num_tokens (at least 1) ids. Raises ValueError when all first tokens have been used."""
        if num_tokens < 1:
            raise ValueError(f"a prompt needs at least 1 token, not {num_tokens}")
        if not self._first:
            raise ValueError(f"all {len(self._ids)} first tokens are used up: ask for fewer rounds or sequences")
        return [self._first.pop(), *self._random.choices(self._ids, k=num_tokens - 1)]

    def words(self, num_tokens: int) -> list[int]:
        """num_tokens ids with no promise about the first: for what follows a prefix."""
        return self._random.choices(self._ids, k=num_tokens)
