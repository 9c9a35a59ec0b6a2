"""Responses as bytes: whole ones, and the chunks of a stream.

Chunks are put together from prepared pieces: one is written for every token of every client.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from deployments.generation import AnySequence, Delta
from deployments.openai_types import usage

Kind = Literal["chat", "text"]
_OBJECTS = {"chat": ("chat.completion", "chatcmpl-"), "text": ("text_completion", "cmpl-")}


class ResponseFormat:
    """Writes one response. Its id and creation time are the same in every chunk."""

    def __init__(self, kind: Kind, model: str) -> None:
        name, prefix = _OBJECTS[kind]
        self.id = prefix + uuid.uuid4().hex
        self._kind = kind
        self._head = {"id": self.id, "object": name, "created": int(time.time()), "model": model}
        chunk = {**self._head, "object": name + ".chunk"} if kind == "chat" else self._head
        self._chunk_head = json.dumps(chunk)[:-1]
        self._started: set[int] = set()  # choices whose role has been sent

    def whole(self, sequences: Sequence[AnySequence], texts: Sequence[str], reasons: Sequence[str]) -> bytes:
        """The body of a response that is not streamed."""
        choices = [self._choice(*item) for item in enumerate(zip(texts, reasons, strict=True))]
        return _encode({**self._head, "choices": choices, "usage": total_usage(sequences)})

    def _choice(self, index: int, item: tuple[str, str]) -> dict[str, Any]:
        text, reason = item
        if self._kind == "text":
            return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def events(self, delta: Delta) -> bytes:
        """The events that a delta becomes; nothing for one that says nothing."""
        return self._text_events(delta) if self._kind == "text" else self._chat_events(delta)

    def _text_events(self, delta: Delta) -> bytes:
        if not delta.text and delta.finish_reason is None:
            return b""
        text = json.dumps(delta.text, ensure_ascii=False)
        reason = json.dumps(delta.finish_reason)
        return self._event(f'{{"index": {delta.index}, "text": {text}, "logprobs": null, "finish_reason": {reason}}}')

    def _chat_events(self, delta: Delta) -> bytes:
        events = b""
        if delta.index not in self._started:
            self._started.add(delta.index)
            events += self._chat_event(delta.index, '{"role": "assistant", "content": ""}', None)
        if delta.text:
            content = json.dumps(delta.text, ensure_ascii=False)
            events += self._chat_event(delta.index, f'{{"content": {content}}}', None)
        if delta.finish_reason is not None:
            events += self._chat_event(delta.index, "{}", delta.finish_reason)
        return events

    def _chat_event(self, index: int, delta: str, reason: str | None) -> bytes:
        return self._event(f'{{"index": {index}, "delta": {delta}, "finish_reason": {json.dumps(reason)}}}')

    def usage_event(self, sequences: Sequence[AnySequence]) -> bytes:
        """The last event of a stream whose client asked for usage."""
        return f'data: {self._chunk_head}, "choices": [], "usage": {json.dumps(total_usage(sequences))}}}\n\n'.encode()

    def _event(self, choice: str) -> bytes:
        return f'data: {self._chunk_head}, "choices": [{choice}]}}\n\n'.encode()


def total_usage(sequences: Sequence[AnySequence]) -> dict[str, Any]:
    """The `usage` object over all sequences of a response."""
    return usage(
        sum(sequence.num_prompt_tokens for sequence in sequences),
        sum(sequence.num_output_tokens for sequence in sequences),
        sum(sequence.num_cached_tokens for sequence in sequences),
    )


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()
