"""The tokenizer of a model's folder: text to ids and back, and the chat template. Imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from transformers import AutoTokenizer

from mlx_engine.errors import ModelLoadError, RequestError


class Tokenizer:
    """A Hugging Face tokenizer, read from a folder only, never from the hub.

    Threads may share one: encoding and decoding don't change it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError if the folder has no tokenizer that the tokenizers library can run."""
        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        # What is missing or damaged decides what transformers raises.
        except Exception as error:
            raise ModelLoadError(f"{folder} has no usable tokenizer: {error}") from error
        backend = getattr(self._hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ModelLoadError(f"{folder}: {type(self._hf).__name__} can't run on the tokenizers library")
        # Used directly: transformers sets truncation on the shared object at each call, which threads trip over.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend

    @property
    def vocab_size(self) -> int:
        """Ids that stand for something, added tokens included. The model's vocabulary may be padded beyond it."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of sequence; `end_token_ids` knows all of the model's."""
        value = self._hf.eos_token_id
        return None if value is None else int(value)

    @property
    def bos_token_id(self) -> int | None:
        """The beginning of sequence, whether or not `encode` adds it."""
        value = self._hf.bos_token_id
        return None if value is None else int(value)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that decoding skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered at all."""
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The template's source, to see what it knows about; the default one if the model has several."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()), None)
        return template or None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of text, with what the tokenizer's config adds around it (often BOS, often nothing).

        A special token written out in the text becomes that token.
        """
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for each text, in parallel."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encoded]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token_ids; ids beyond the vocabulary stand for nothing."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, or None."""
        token = self.backend.id_to_token(token_id)
        return None if token is None else str(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text for a chat. kwargs reach the template as variables.

        With continue_final_message the last message is left open, so that the model goes on with it.
        Raises RequestError with the template's own words if it refuses the messages, fails on them, or is missing.
        """
        if not self.has_chat_template:
            raise RequestError(
                "The model has no chat template: use /v1/completions with a prompt of your own.",
                param="messages",
                code="no_chat_template",
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message goes on with the last message and add_generation_prompt starts a new one: "
                "set one of them to false.",
                param="continue_final_message",
            )
        try:
            rendered = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except jinja2.TemplateSyntaxError as error:
            raise _template_error(f"has a syntax error: {error.message} (line {error.lineno})") from error
        except jinja2.TemplateError as error:
            raise _template_error(f"refused the messages: {error}") from error
        # A template is a program of the model's author: anything may come out of it.
        except Exception as error:
            raise _template_error(f"failed on the messages: {error}") from error
        return str(rendered)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt's ids for a chat: `render_chat`, encoded without adding what the template writes itself.

        Raises RequestError as `render_chat` does, and when the template renders nothing.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )
        token_ids = self.encode(text, add_special_tokens=False)
        if not token_ids:
            raise _template_error("rendered nothing from the messages")
        return token_ids


def _template_error(reason: str) -> RequestError:
    return RequestError(f"The model's chat template {reason}", param="messages", code="chat_template_error")
