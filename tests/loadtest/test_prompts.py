from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.prompts import PromptSource, word_ids


def test_no_two_prompts_begin_with_the_same_token() -> None:
    source = PromptSource(range(100, 150))
    prompts = [source.take(5) for _ in range(50)]
    assert len({prompt[0] for prompt in prompts}) == 50
    assert all(len(prompt) == 5 and set(prompt) <= set(range(100, 150)) for prompt in prompts)
    assert source.remaining == 0
    with pytest.raises(ValueError, match="used up"):
        source.take(5)


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, second, other = (PromptSource(range(1000), seed) for seed in (1, 1, 2))
    assert first.take(20) == second.take(20)
    assert first.take(20) != other.take(20)


def test_a_prompt_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PromptSource(range(10)).take(0)
    assert len(PromptSource(range(10)).take(1)) == 1


@pytest.mark.parametrize("space", ["Ġ", "▁"])
@pytest.mark.parametrize("unigram", [False, True])
def test_only_whole_words_of_the_vocabulary_are_used(tmp_path: Path, space: str, unigram: bool) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [f"{space}{a}{b}e" for a in letters for b in letters]
    tokens = ["<s>", "abc", f"{space}ab", f"{space}Abc", *words]
    vocab = [[token, 0.0] for token in tokens] if unigram else {token: index for index, token in enumerate(tokens)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    assert word_ids(tmp_path) == list(range(4, len(tokens)))


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ValueError, match="whole words"):
        word_ids(tmp_path)
