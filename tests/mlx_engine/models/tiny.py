"""Tiny models with random weights: as GGUF files, the way llama.cpp writes them, and as mlx-lm folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
Array = np.ndarray[Any, Any]


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) if b in shown else chr(256 + [x for x in range(256) if x not in shown].index(b)) for b in range(256)]


def vocabulary() -> list[str]:
    """Specials, bytes, merged words; padded to a round number."""
    tokens = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), 288)]


@dataclass
class TinyGGUF:
    """What to write. Change a field to seed a fault."""

    arch: str = "llama"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ff: int = 128
    tied: bool = True
    bias: bool = False  # on q, k and v; on llama on the output projection too
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1
    embedding_qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0
    split_tensors: int = 0  # a split file with this many tensors in each part
    rope_freqs: Array | None = None
    tokenizer: bool = True
    pre: str = "smollm"
    drop_tensor: str | None = None
    extra_tensor: str | None = None
    drop_key: str | None = None
    extra_keys: dict[str, Any] = field(default_factory=dict)  # float values
    seed: int = 0

    def hf_weights(self) -> dict[str, Array]:
        """The model's weights before llama.cpp gets at them, by Hugging Face name, float32."""
        rng = np.random.default_rng(self.seed)
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def matrix(*shape: int) -> Array:
            return (rng.standard_normal(shape) * 0.1).astype(np.float32)

        weights = {"model.embed_tokens.weight": matrix(len(vocabulary()), self.hidden)}
        weights["model.norm.weight"] = 1 + matrix(self.hidden)
        if not self.tied:
            weights["lm_head.weight"] = matrix(len(vocabulary()), self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            norms = ["input_layernorm", "post_attention_layernorm"]
            if self.arch == "gemma3":
                norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            weights |= {layer + norm + ".weight": 1 + matrix(self.hidden) for norm in norms}
            weights |= {
                layer + "self_attn.q_proj.weight": matrix(q_rows, self.hidden),
                layer + "self_attn.k_proj.weight": matrix(kv_rows, self.hidden),
                layer + "self_attn.v_proj.weight": matrix(kv_rows, self.hidden),
                layer + "self_attn.o_proj.weight": matrix(self.hidden, q_rows),
                layer + "mlp.gate_proj.weight": matrix(self.ff, self.hidden),
                layer + "mlp.up_proj.weight": matrix(self.ff, self.hidden),
                layer + "mlp.down_proj.weight": matrix(self.hidden, self.ff),
            }
            if self.bias or self.arch == "qwen2":
                weights[layer + "self_attn.q_proj.bias"] = matrix(q_rows)
                weights[layer + "self_attn.k_proj.bias"] = matrix(kv_rows)
                weights[layer + "self_attn.v_proj.bias"] = matrix(kv_rows)
                if self.arch == "llama":
                    weights[layer + "self_attn.o_proj.bias"] = matrix(self.hidden)
            if self.arch in ("qwen3", "gemma3"):
                weights[layer + "self_attn.q_norm.weight"] = 1 + matrix(self.head_dim)
                weights[layer + "self_attn.k_norm.weight"] = 1 + matrix(self.head_dim)
        return weights

    def stored_weights(self) -> dict[str, Array]:
        """`hf_weights` after quantization, dequantized by the gguf package: what a right conversion holds."""
        stored = {}
        for name, value in self.hf_weights().items():
            qtype = self._qtype(name, value)
            stored[name] = gguf.dequantize(gguf.quantize(value, qtype), qtype)
        return stored

    def write(self, path: Path) -> list[Path]:
        """Writes the file, or the parts beside `path`; returns what was written."""
        writer = gguf.GGUFWriter(path, self.arch, split_max_tensors=self.split_tensors)
        self._add_metadata(writer)
        if self.tokenizer:
            self._add_tokenizer(writer)
        for name, value in self.hf_weights().items():
            gguf_name = _gguf_name(name, self.arch)
            if gguf_name == self.drop_tensor:
                continue
            if self.arch == "llama" and ("q_proj" in name or "k_proj" in name):
                value = _permute(value, self.heads if "q_proj" in name else self.kv_heads)
            if self.arch == "gemma3" and "norm" in name:
                value = value + 1
            qtype = self._qtype(name, value)
            writer.add_tensor(gguf_name, gguf.quantize(value, qtype), raw_dtype=qtype)
        if self.rope_freqs is not None:
            writer.add_tensor("rope_freqs.weight", self.rope_freqs)
        if self.extra_tensor is not None:
            writer.add_tensor(self.extra_tensor, np.zeros((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return sorted(path.parent.glob(path.stem + "*.gguf"))

    def _qtype(self, name: str, value: Array) -> gguf.GGMLQuantizationType:
        if value.ndim == 1:
            return gguf.GGMLQuantizationType.F32
        return self.embedding_qtype if "embed" in name or "lm_head" in name else self.qtype

    def _add_metadata(self, writer: gguf.GGUFWriter) -> None:
        add: dict[str, Callable[[], None]] = {
            "block_count": lambda: writer.add_block_count(self.layers),
            "context_length": lambda: writer.add_context_length(256),
            "embedding_length": lambda: writer.add_embedding_length(self.hidden),
            "feed_forward_length": lambda: writer.add_feed_forward_length(self.ff),
            "head_count": lambda: writer.add_head_count(self.heads),
            "head_count_kv": lambda: writer.add_head_count_kv(self.kv_heads),
            "key_length": lambda: writer.add_key_length(self.head_dim),
            "value_length": lambda: writer.add_value_length(self.head_dim),
            "rms_eps": lambda: writer.add_layer_norm_rms_eps(1e-5),
            "freq_base": lambda: writer.add_rope_freq_base(10000.0),
        }
        for key, call in add.items():
            if key != self.drop_key:
                call()
        for key, value in self.extra_keys.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{self.arch}.{key}", value)

    def _add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        tokens = vocabulary()
        kinds = [gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHAT_TEMPLATE)


def _permute(value: Array, heads: int) -> Array:
    """llama.cpp's order of q and k rows: the two halves of each head interleaved."""
    return value.reshape(heads, 2, len(value) // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(name: str, arch: str) -> str:
    names = _GGUF_NAMES | (_GEMMA_NAMES if arch == "gemma3" else {})
    module, suffix = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{suffix}"
    return f"{names[module]}.{suffix}"


def tiny_llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of a llama of 64 dimensions and two layers."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 288,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    } | changes


def tiny_llama(config: dict[str, Any]) -> llama.Model:
    """The model of such a config, with random weights."""
    mx.random.seed(7)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, mx.array], shards: int = 1) -> None:
    """An mlx-lm folder; with several shards, an index too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def parameters(model: Any) -> dict[str, mx.array]:
    """A model's weights by name."""
    return dict(tree_flatten(model.parameters()))
