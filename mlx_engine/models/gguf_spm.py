"""Rebuilds SentencePiece BPE tokenizers (`tokenizer.ggml.model` llama: Llama 2, Mistral, Gemma) from scores.

SentencePiece joins, again and again, the two neighbours whose union is the best-scored piece. That is BPE whose merges
are all the ways to cut each piece in two, ordered by the piece's score.
"""

from __future__ import annotations

from typing import Any

import gguf
from tokenizers import Tokenizer, decoders, models, normalizers

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.gguf_reader import GGUFFile

_SPACE = "\u2581"


def sentencepiece_bpe(file: GGUFFile, tokens: list[str], token_types: list[int]) -> Tokenizer:
    """The tokenizer without its special tokens. Raises ModelLoadError naming the key that is missing or wrong."""
    scores = [float(score) for score in file.require("tokenizer.ggml.scores")]
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[int(file.get("tokenizer.ggml.unknown_token_id", 0))]
    merges = _merges(tokens, token_types, scores, vocab)
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(
    tokens: list[str], token_types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    joinable = {gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED}
    ranked = []
    for token, kind, score in zip(tokens, token_types, scores, strict=True):
        if kind not in joinable:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
