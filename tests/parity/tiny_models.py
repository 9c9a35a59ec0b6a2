"""Small models of several mlx-lm architectures, whose random weights make each token depend on the whole prompt."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

from mlx_engine.models.load import LoadedModel

VOCAB = 512

_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7},
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4}


def _config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**_BASE, "model_type": model_type, **changes}


# Head sizes 64 to 256, MQA, GQA and MHA, sliding windows shorter than the prompts, sinks, experts, and 16-bit types.
TINY: dict[str, dict[str, Any]] = {
    "llama_biases": _config("llama", head_dim=64, attention_bias=True, mlp_bias=True),
    "llama_tied_mha": _config("llama", head_dim=80, num_key_value_heads=4, tie_word_embeddings=True),
    "llama_mqa": _config("llama", head_dim=96, num_key_value_heads=1),
    "llama_bfloat16": _config("llama", head_dim=64, dtype="bfloat16"),
    "qwen2": _config("qwen2", hidden_size=256),
    "qwen3": _config("qwen3", head_dim=128),
    "qwen3_float16": _config("qwen3", head_dim=64, dtype="float16"),
    "gemma3": _config("gemma3_text", head_dim=256, num_key_value_heads=1, sliding_window=16, sliding_window_pattern=3),
    "mistral": _config(
        "mistral",
        head_dim=64,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": _config("mixtral", hidden_size=256, **_MOE),
    "qwen3_moe": _config(
        "qwen3_moe", head_dim=64, **_MOE, decoder_sparse_step=1, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "gpt_oss": _config("gpt_oss", num_hidden_layers=4, head_dim=64, **_MOE, sliding_window=16, layer_types=None),
    "phi3": _config("phi3", hidden_size=256, partial_rotary_factor=0.5),
    "olmo2": _config("olmo2", head_dim=64),
    "deepseek_v2": _config("deepseek_v2", **_MLA),  # keys and values of different sizes
    "internlm2": _config("internlm2", hidden_size=256, bias=True),  # its head is called `output`
    "starcoder2": _config("starcoder2", hidden_size=256, norm_epsilon=1e-5, tie_word_embeddings=False),
}

# Keep state that isn't K/V, or attend in a way of their own: to be refused at start.
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": _config(
        "mamba", state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=8, layers=2
    ),
    "gemma2": _config("gemma2", head_dim=64),
    "deepseek_v3": _config("deepseek_v3", **_MLA, n_routed_experts=None, first_k_dense_replace=3, rope_interleave=True),
    "rwkv7": _config(
        "rwkv7",
        norm_eps=1e-5,
        head_dim=64,
        a_low_rank_dim=16,
        v_low_rank_dim=16,
        gate_low_rank_dim=16,
        decay_low_rank_dim=16,
    ),
}


def build(config: dict[str, Any], seed: int = 3) -> LoadedModel:
    """A model of the config, with the same weights each time. The key `dtype` is ours: float32 if absent."""
    dtype = getattr(mx, config.get("dtype", "float32"))
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    rng = np.random.default_rng(seed)
    model.update(tree_map_with_path(lambda name, value: _random(rng, name, value, dtype), model.parameters()))
    mx.eval(model.parameters())
    return LoadedModel(
        model=model,
        config=config,
        dtype=dtype,
        eos_token_ids=frozenset(),
        max_model_len=int(config["max_position_embeddings"]),
        vocab_size=VOCAB,
        weight_bytes=sum(int(value.nbytes) for _, value in tree_flatten(model.parameters())),
    )


def _random(rng: np.random.Generator, name: str, value: mx.array, dtype: mx.Dtype) -> mx.array:
    """Matrices that keep their input's size, norms about 1, biases and sinks that matter."""
    noise = rng.standard_normal(value.shape).astype(np.float32)
    if "norm" in name and value.ndim == 1 and not name.endswith("bias"):
        noise = value.astype(mx.float32) + 0.2 * mx.array(noise)
    elif value.ndim == 1:
        noise *= 0.5
    elif "embed" not in name:
        noise *= 1.5 / np.sqrt(value.shape[-1])
    return mx.array(noise).astype(dtype)


def prompts(count: int = 64, longest: int = 90, seed: int = 1) -> list[list[int]]:
    """Random token ids: one of each length from 1 on, and lengths around multiples of 16, up to `longest`."""
    rng = np.random.default_rng(seed)
    edges = [n for k in range(16, longest, 16) for n in (k - 1, k, k + 1)]
    lengths = [*edges, *np.linspace(1, longest, count - len(edges)).astype(int).tolist()]
    return [rng.integers(0, VOCAB, size=length).tolist() for length in lengths]


def architecture(model: nn.Module) -> str:
    """The mlx-lm module that a model comes from."""
    return type(model).__module__.rsplit(".", 1)[-1]
