"""What a GGUF's metadata means for mlx-lm: config.json, the tensors' names, the order of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.gguf_reader import GGUFFile

# A layer's weights in llama.cpp's names, under blk.N, and in mlx-lm's, under model.layers.N.
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one GGUF architecture maps to an mlx-lm model."""

    model_type: str
    layer: dict[str, str]  # a layer's weights
    permuted: bool = False  # llama.cpp interleaves the halves of each q and k head
    qkv_bias: bool = False  # always there, with no bias on the output projection
    norm_offset: float = 0.0  # llama.cpp adds it to the weights of norms, and mlx-lm adds it when it runs
    half: str = "float16"  # the 16-bit type whose range suffices for activations


ARCHITECTURES = {
    "gemma3": _Architecture("gemma3_text", _PROJECTIONS | _GEMMA_NORMS | _QK_NORMS, norm_offset=1.0, half="bfloat16"),
    "llama": _Architecture("llama", _PROJECTIONS | _NORMS, permuted=True),  # Mistral's dense models too
    "qwen2": _Architecture("qwen2", _PROJECTIONS | _NORMS, qkv_bias=True),
    "qwen3": _Architecture("qwen3", _PROJECTIONS | _NORMS | _QK_NORMS),
}

# Gemma 3's numbers that a GGUF doesn't carry. Its largest model scales attention by hidden size over heads.
_GEMMA3_PATTERN = 6  # every sixth layer sees all tokens
_GEMMA3_LARGEST_LAYERS = 62

_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class TensorRule:
    """Where one GGUF tensor goes."""

    source: str  # its name in the GGUF
    target: str  # the mlx-lm module's path
    suffix: str  # weight or bias
    heads: int | None = None  # undo llama.cpp's permutation of this many heads
    offset: float = 0.0  # take this off the values


def architecture(file: GGUFFile) -> _Architecture:
    """The file's architecture. Raises ModelLoadError naming it if it isn't one that can be converted."""
    name = file.require("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path} has the architecture {name!r}. GGUF files of these can be converted: "
            f"{', '.join(sorted(ARCHITECTURES))}. Use the model's Hugging Face or MLX folder instead"
        )
    return ARCHITECTURES[name]


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The mlx-lm config.json, without `quantization`. Raises ModelLoadError naming a missing key."""
    arch = architecture(file)
    heads = int(_require(file, "attention.head_count"))
    hidden = int(_require(file, "embedding_length"))
    head_dim = int(_get(file, "attention.key_length", hidden // heads))
    _check_head_dim(file, head_dim, hidden, heads, arch)
    rope_theta = float(_get(file, "rope.freq_base", 10000.0))
    context = int(_require(file, "context_length"))
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": int(_require(file, "block_count")),
        "intermediate_size": int(_require(file, "feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_get(file, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": float(_require(file, "attention.layer_norm_rms_epsilon")),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": context,
        "rope_theta": rope_theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16" if _is_bfloat16(file) else arch.half,
    }
    scaling = _rope_scaling(file, head_dim, rope_theta, context)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if arch.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if arch.model_type == "gemma3_text":
        largest = config["num_hidden_layers"] == _GEMMA3_LARGEST_LAYERS
        config["sliding_window"] = int(_require(file, "attention.sliding_window"))
        config["sliding_window_pattern"] = _GEMMA3_PATTERN
        config["rope_local_base_freq"] = float(_get(file, "rope.freq_base_swa", 10000.0))
        config["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
    return config


def tensor_rules(file: GGUFFile, config: dict[str, Any]) -> list[TensorRule]:
    """A rule for every tensor of the file. Raises ModelLoadError for a tensor too many or too few."""
    rules = list(_expected(file, config))
    for rule in rules:
        if rule.source not in file.tensors:
            raise ModelLoadError(f"{file.path} has no tensor {rule.source!r}: the file is incomplete")
    unknown = sorted(set(file.tensors) - {rule.source for rule in rules} - {_ROPE_FREQS})
    if unknown:
        raise ModelLoadError(
            f"{file.path} has the tensor {unknown[0]!r}, which isn't part of a dense {config['model_type']} model "
            f"({len(unknown)} such tensors)"
        )
    return rules


def row_order(heads: int, rows: int) -> np.ndarray[Any, Any]:
    """The rows of a q or k matrix as llama.cpp stores them, in the order that rotary embeddings by halves want.

    llama.cpp puts row j of a head's first half and row j of its second half side by side.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _expected(file: GGUFFile, config: dict[str, Any]) -> Iterator[TensorRule]:
    arch = architecture(file)
    yield TensorRule("token_embd.weight", "model.embed_tokens", "weight")
    yield TensorRule("output_norm.weight", "model.norm", "weight", offset=arch.norm_offset)
    if not config["tie_word_embeddings"]:
        yield TensorRule("output.weight", "lm_head", "weight")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    biased: set[str] = set()
    if arch.qkv_bias or config.get("attention_bias"):
        biased |= {"attn_q", "attn_k", "attn_v"}
    if config.get("attention_bias"):
        biased.add("attn_output")
    if config.get("mlp_bias"):
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}
    for layer in range(config["num_hidden_layers"]):
        for source, target in arch.layer.items():
            permuted = heads.get(source) if arch.permuted else None
            offset = arch.norm_offset if source.endswith("norm") else 0.0
            for suffix in ("weight", "bias") if source in biased else ("weight",):
                yield TensorRule(
                    f"blk.{layer}.{source}.{suffix}", f"model.layers.{layer}.{target}", suffix, permuted, offset
                )


def _check_head_dim(file: GGUFFile, head_dim: int, hidden: int, heads: int, arch: _Architecture) -> None:
    value_dim = int(_get(file, "attention.value_length", head_dim))
    rotary = int(_get(file, "rope.dimension_count", head_dim))
    if value_dim != head_dim or rotary != head_dim:
        raise ModelLoadError(
            f"{file.path}: keys of {head_dim}, values of {value_dim} and rotary embeddings of {rotary} dimensions "
            f"a head; {arch.model_type} models have one size for the three"
        )
    if arch.model_type == "qwen2" and head_dim * heads != hidden:
        raise ModelLoadError(f"{file.path}: {heads} heads of {head_dim} don't make the hidden size {hidden}")


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float, context: int) -> dict[str, Any] | None:
    kind = _get(file, "rope.scaling.type", "none")
    linear = float(_get(file, "rope.scale_linear", 1.0))
    factors = file.tensors.get(_ROPE_FREQS)
    if factors is not None:
        return _llama3_scaling(file, np.asarray(factors.data, np.float32), head_dim, theta)
    if kind == "none" and linear == 1.0:
        return None
    factor = float(_get(file, "rope.scaling.factor", linear))
    if kind in ("linear", "none"):
        return {"type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(_get(file, "rope.scaling.original_context_length", context))
        return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelLoadError(f"{file.path}: rope scaling {kind!r} can't be converted (linear, yarn and llama3 can)")


def _llama3_scaling(file: GGUFFile, factors: np.ndarray[Any, Any], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, recognised by the frequency factors, which are all that a GGUF keeps of it.

    Raises ModelLoadError if the factors are not what Llama 3's formula with its usual constants gives.
    """
    factor = float(factors.max())
    low, high, original = 1.0, 4.0, 8192
    expected = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            expected.append(1.0)
        elif wavelength > original / low:
            expected.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append(1 / ((1 - smooth) / factor + smooth))
    if factors.shape != (len(expected),) or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelLoadError(f"{file.path}: the frequency factors in {_ROPE_FREQS} are not those of Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no tensor 'token_embd.weight': the file is incomplete")
    return embedding.shape[0]


def _is_bfloat16(file: GGUFFile) -> bool:
    return bool(file.tensors["token_embd.weight"].type.name == "BF16")


def _key(file: GGUFFile, name: str) -> str:
    return f"{file.require('general.architecture')}.{name}"


def _get(file: GGUFFile, name: str, default: Any) -> Any:
    return file.get(_key(file, name), default)


def _require(file: GGUFFile, name: str) -> Any:
    return file.require(_key(file, name))
