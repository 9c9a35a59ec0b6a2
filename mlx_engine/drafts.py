"""Asks the drafter, and lets nothing out of it that a step could not run."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

from mlx_engine.interfaces import Drafter
from mlx_engine.sequence import SequenceState

logger = logging.getLogger(__name__)

# A step checks no more of a request's: the blocks that wrong drafts were given stay with it until it grows into them.
MAX_DRAFT_TOKENS = 16


class DraftSource:
    """Guesses that are checked: token ids of the model's vocabulary, no more than asked for.

    A drafter is a help only: where it raises or guesses what makes no sense, requests go on without drafts.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.num_rejected = 0  # guesses that made no sense

    def drafts(self, state: SequenceState, room: int) -> tuple[int, ...]:
        """Up to `room` (1 or more) guesses of what follows the request's last token, MAX_DRAFT_TOKENS at most.

        That token may itself be on the device still: it is guessed too then, and not run.
        """
        pending = state.num_pending_tokens
        wanted = min(room, MAX_DRAFT_TOKENS) + pending
        try:
            guess = self._drafter.propose(state.request.request_id, state.token_ids, wanted, pending)
            return self._checked(guess, wanted)[pending:]
        except Exception as error:  # whatever a plugin may raise
            self._reject(error)
            return ()

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        try:
            self._drafter.on_request_finished(request_id)
        except Exception as error:  # whatever a plugin may raise
            self._reject(error)

    def _checked(self, guess: Any, wanted: int) -> tuple[int, ...]:
        if not isinstance(guess, Sequence):
            raise TypeError(f"propose gave a {type(guess).__name__}, which is no sequence")
        if len(guess) > wanted:
            raise ValueError(f"propose gave {len(guess)} tokens when asked for {wanted} at most")
        tokens = tuple(map(operator.index, guess))
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(
                f"propose gave token ids from {min(tokens)} to {max(tokens)}: there are {self._vocab_size}"
            )
        return tokens

    def _reject(self, error: Exception) -> None:
        self.num_rejected += 1
        if self.num_rejected == 1:
            logger.warning(
                "the drafter %s failed, and the request goes on without drafts; further times are only counted, in "
                "rejected_proposals",
                type(self._drafter).__name__,
                exc_info=error,
            )
