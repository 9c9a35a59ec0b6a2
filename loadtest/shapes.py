"""Llama models of well-known shapes, as their config.json would have them. Imports nothing of any engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    # Runs anywhere, to see that a benchmark works.
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
}


def llama_config(shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Llama of this shape, for mlx-lm and for transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | shape


def num_parameters(shape: Mapping[str, Any]) -> int:
    """Parameters of a Llama of this shape; embeddings that are the LM head too count once."""
    hidden: int = shape["hidden_size"]
    heads = (
        2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    )  # of queries and output, keys and values
    layer: int = hidden * (heads * shape["head_dim"] + 3 * shape["intermediate_size"] + 2)  # and two norms
    embeddings: int = shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)
    layers: int = shape["num_hidden_layers"]
    return layers * layer + embeddings + hidden  # and the last norm


def kv_bytes_per_token(shape: dict[str, Any]) -> int:
    """Bytes of K and V that all layers store for a token, in 16-bit numbers."""
    per_layer: int = shape["num_key_value_heads"] * shape["head_dim"] * 2 * 2
    layers: int = shape["num_hidden_layers"]
    return per_layer * layers
