"""Asks the drafter, and lets nothing out of it that a step could not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_engine.interfaces import Drafter
from mlx_engine.sequence import SequenceState


class DraftSource:
    """Guesses that are checked: token ids of the model's vocabulary, no more than asked for."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.num_rejected = 0  # guesses that made no sense

    def drafts(self, state: SequenceState, room: int) -> Sequence[int]:
        """Up to `room` (1 or more) guesses of what follows the request's last token.

        That token may itself be on the device still: it is guessed too then, and not run.
        """
        unknown = state.num_pending_tokens
        guess = self._drafter.propose(state.request.request_id, state.token_ids, room + unknown)
        if self._makes_sense(guess, room + unknown):
            return tuple(guess[unknown:])
        self.num_rejected += 1
        return ()

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._drafter.on_request_finished(request_id)

    def _makes_sense(self, guess: Any, max_tokens: int) -> bool:
        return (
            isinstance(guess, Sequence)
            and len(guess) <= max_tokens
            and all(isinstance(token, int) and 0 <= token < self._vocab_size for token in guess)
        )
