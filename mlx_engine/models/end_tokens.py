"""Which tokens end a sequence, from everything in a model's folder that says so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def end_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """The union of generation_config.json, config.json (its text_config too) and the tokenizer's eos_token.

    Folders often disagree: a chat model's tokenizer ends a turn where its config only knows the end of a text.
    """
    return frozenset(
        token_id
        for source in (config, config.get("text_config") or {}, _read(folder / "generation_config.json"))
        for token_id in _as_ids(source.get("eos_token_id"))
    ) | frozenset(_tokenizer_ids(folder))


def _as_ids(value: Any) -> Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item


def _tokenizer_ids(folder: Path) -> Iterator[int]:
    config = _read(folder / "tokenizer_config.json")
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == content:
            yield int(token_id)
            return
    tokenizer = _read(folder / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == content:
            yield int(entry["id"])
            return
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict) and content in vocab:
        yield int(vocab[content])


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing if the file is missing or damaged: none of these files is indispensable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
