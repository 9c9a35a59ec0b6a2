"""The rebuilt SentencePiece tokenizer, against SentencePiece itself on a model trained here."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.gguf_reader import GGUFFile
from mlx_engine.models.gguf_tokenizer import write_tokenizer
from mlx_engine.models.tokenizer import Tokenizer

WORDS = ["hello", "world", "the", "quick", "brown", "fox", "über", "naïve", "cats", "dogs", "running", "run", "ran"]
WORDS += ["lower", "lowest", "newer", "12", "345", "don't", "x-ray"]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def trained(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, bool]:
    rng = random.Random(0)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(rng.choices(WORDS, k=8)) for _ in range(1000)]),
        model_writer=model,
        vocab_size=420,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), request.param


def _metadata(sp: sentencepiece.SentencePieceProcessor, prefix: bool) -> dict[str, object]:
    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return gguf.TokenType.UNKNOWN
        if sp.is_control(i):
            return gguf.TokenType.CONTROL
        return gguf.TokenType.BYTE if sp.is_byte(i) else gguf.TokenType.NORMAL

    ids = range(sp.get_piece_size())
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _tokenizer(metadata: dict[str, object], folder: Path, model_type: str = "llama") -> Tokenizer:
    write_tokenizer(GGUFFile(folder / "x.gguf", metadata, {}), folder)
    # Some classes that transformers picks by model_type would rebuild the tokenizer their own way.
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return Tokenizer(folder)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_same_ids_and_text_as_sentencepiece(
    tmp_path: Path, trained: tuple[sentencepiece.SentencePieceProcessor, bool], model_type: str
) -> None:
    sp, prefix = trained
    tokenizer = _tokenizer(_metadata(sp, prefix), tmp_path, model_type)
    rng = random.Random(1)
    letters = "helowrdtqu ickbnfxüïvasg  12345'-\n"
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 12))) for _ in range(200)]
    texts += ["".join(rng.choices(letters, k=rng.randrange(1, 30))) for _ in range(400)]
    texts += ["", " ", "   x", "x   ", "你好 \U0001f642", "tab\tand\nline"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sp.encode(text), text
        assert tokenizer.decode(ids) == text


def test_bos_is_added_unless_the_file_says_no(
    tmp_path: Path, trained: tuple[sentencepiece.SentencePieceProcessor, bool]
) -> None:
    metadata = _metadata(*trained)
    tokenizer = _tokenizer(metadata, tmp_path)
    assert tokenizer.encode("hello") == [1, *tokenizer.encode("hello", add_special_tokens=False)]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert _tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False}, tmp_path).encode("hello")[0] != 1


@pytest.mark.parametrize("key", ["scores", "tokens", "eos_token_id"])
def test_missing_or_short_keys_are_named(
    tmp_path: Path, trained: tuple[sentencepiece.SentencePieceProcessor, bool], key: str
) -> None:
    metadata = _metadata(*trained)
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.{key}"):
        _tokenizer(metadata, tmp_path)
    if key == "scores":
        with pytest.raises(ModelLoadError, match=r"scores has 3 entries"):
            _tokenizer(metadata | {"tokenizer.ggml.scores": [0.0] * 3}, tmp_path)


def test_other_kinds_of_tokenizer_are_named(
    tmp_path: Path, trained: tuple[sentencepiece.SentencePieceProcessor, bool]
) -> None:
    with pytest.raises(ModelLoadError, match="bert"):
        _tokenizer(_metadata(*trained) | {"tokenizer.ggml.model": "bert"}, tmp_path)
