from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_engine.models.end_tokens import end_token_ids


def _folder(path: Path, config: object, generation: object, tokenizer: str | None) -> Path:
    path.mkdir()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
        added = [{"id": 0, "content": "<|endoftext|>"}, {"id": 2, "content": "<|im_end|>"}]
        (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"</s>": 9}}}))
    return path


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": [0, 2]}, None, {0, 2}),
        ({"eos_token_id": 0}, {"eos_token_id": 0}, "<|im_end|>", {0, 2}),
        ({}, None, "</s>", {9}),
        ({"text_config": {"eos_token_id": [5, 6]}}, {"eos_token_id": 7}, None, {5, 6, 7}),
        ({"eos_token_id": None}, {}, None, set()),
    ],
)
def test_every_source_of_end_tokens_counts(
    tmp_path: Path, config: dict[str, object], generation: object, tokenizer: str | None, expected: set[int]
) -> None:
    assert end_token_ids(_folder(tmp_path / "m", config, generation, tokenizer), config) == expected
