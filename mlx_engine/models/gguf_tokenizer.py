"""Rebuilds a Hugging Face tokenizer from a GGUF's metadata: tokenizer.json and tokenizer_config.json.

Byte-level BPE (`tokenizer.ggml.model` gpt2) only needs vocabulary, merges and the name of the text splitter. The files
name the splitter in `tokenizer.ggml.pre`; the rules themselves are the published ones of each model family.
SentencePiece BPE (`llama`) is in gguf_spm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.gguf_reader import GGUFFile
from mlx_engine.models.gguf_spm import sentencepiece_bpe

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How text is cut into words before BPE."""

    pattern: str | None = None  # None is GPT-2's own
    digits: bool = False  # each digit alone, first
    nfc: bool = False  # Unicode normal form C
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # if the file doesn't say


_SPLITTERS = {
    "gpt-2": _Splitter(),
    "gpt2": _Splitter(),
    "smollm": _Splitter(digits=True),
    "starcoder": _Splitter(digits=True),
    "llama-bpe": _Splitter(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama3": _Splitter(_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": _Splitter(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Splitter(_QWEN2, nfc=True),
    "tekken": _Splitter(_TEKKEN, ignore_merges=True, add_bos=True),
}

_SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises ModelLoadError, naming the key or the name at fault, if the metadata is missing or not understood.
    """
    tokens = [str(token) for token in file.require("tokenizer.ggml.tokens")]
    kind = file.require("tokenizer.ggml.model")
    token_types = _token_types(file, tokens)
    if kind == "gpt2":
        add_bos, tokenizer = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        add_bos, tokenizer = True, sentencepiece_bpe(file, tokens, token_types)
    else:
        raise ModelLoadError(
            f"{file.path} has a tokenizer of model {kind!r}; byte-level BPE ('gpt2') and SentencePiece BPE ('llama') "
            "can be rebuilt. Use the model's Hugging Face or MLX folder instead"
        )
    add_bos = bool(file.get("tokenizer.ggml.add_bos_token", add_bos))
    special = {name: tokens[i] for name, i in _special_ids(file, len(tokens)).items()}
    tokenizer.add_tokens(_added_tokens(tokens, token_types))
    if add_bos and "bos_token" in special:
        _prepend_bos(tokenizer, special["bos_token"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "model_max_length": int(file.require(f"{file.require('general.architecture')}.context_length")),
        **special,
    }
    if template := file.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))
    _write_generation_config(file, folder, len(tokens))


def _byte_level_bpe(file: GGUFFile, tokens: list[str]) -> tuple[bool, Tokenizer]:
    """Whether the family adds BOS, and the tokenizer without its special tokens."""
    pre = file.require("tokenizer.ggml.pre")
    if pre not in _SPLITTERS:
        raise ModelLoadError(
            f"{file.path}: text splitter tokenizer.ggml.pre = {pre!r} isn't known; these are: "
            f"{', '.join(sorted(_SPLITTERS))}. Use the model's Hugging Face or MLX folder instead"
        )
    splitter = _SPLITTERS[pre]
    merges = [_merge(file, line) for line in file.require("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitter.ignore_merges)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.tokens and .merges don't fit together: {error}") from error
    tokenizer = Tokenizer(bpe)
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitter.digits else []
    if splitter.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitter.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return splitter.add_bos, tokenizer


def _merge(file: GGUFFile, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.merges has the malformed entry {line!r}")
    return left, right


def _token_types(file: GGUFFile, tokens: list[str]) -> list[int]:
    types = [int(kind) for kind in file.get("tokenizer.ggml.token_type") or [gguf.TokenType.NORMAL] * len(tokens)]
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return types


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Control and user-defined tokens: matched whole in the text, before it is split."""
    special = {gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN}
    whole = special | {gguf.TokenType.USER_DEFINED}
    return [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in whole
    ]


def _prepend_bos(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{bos}:0", "$A:0"],
        pair=[f"{bos}:0", "$A:0", f"{bos}:1", "$B:1"],
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def _special_ids(file: GGUFFile, vocab_size: int) -> dict[str, int]:
    found = {}
    for name, key in _SPECIAL_IDS.items():
        value = file.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not 0 <= int(value) < vocab_size:
            raise ModelLoadError(f"{file.path}: tokenizer.ggml.{key}_token_id = {value} is outside the vocabulary")
        found[name] = int(value)
    return found


def _write_generation_config(file: GGUFFile, folder: Path, vocab_size: int) -> None:
    # Some models end a turn (eot) or a message to a tool (eom) with a token of its own.
    ends = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": sorted({int(end) for end in ends if end is not None})}
    if not config["eos_token_id"]:
        raise ModelLoadError(f"{file.path} has no metadata key 'tokenizer.ggml.eos_token_id'")
    if "bos_token" in (ids := _special_ids(file, vocab_size)):
        config["bos_token_id"] = ids["bos_token"]
    (folder / "generation_config.json").write_text(json.dumps(config, indent=1))
