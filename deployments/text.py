"""The model's tokenizer as the HTTP side uses it.

Importing this takes over a second (transformers), so processes that never see text don't: they import `engine_api`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deployments.engine_api import Detokenizer
from mlx_engine.detokenizer import IncrementalDetokenizer
from mlx_engine.models.tokenizer import Tokenizer


class TokenizerText:
    """A `TextModel` over the tokenizer in a model's folder. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError if the folder has no usable tokenizer."""
        self._tokenizer = Tokenizer(folder)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the tokenizer's own config puts around it."""
        return self._tokenizer.encode(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> list[int]:
        """The ids of a chat, through the model's template. Raises RequestError if the template refuses it."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )

    def detokenizer(self, stop: Sequence[str]) -> Detokenizer:
        """A fresh one, for one sequence."""
        return IncrementalDetokenizer(self._tokenizer, stop)
