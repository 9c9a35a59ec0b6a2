"""Faults of model folders, refused by the name of the file, tensor, layer or key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import utils as mlx_lm_utils

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.load import load_model
from tests.mlx_engine.models.tiny import parameters, tiny_llama, tiny_llama_config, write_folder

PROMPT = mx.array([[5, 99, 200, 31, 7, 7, 150]])
DOWN = "model.layers.0.mlp.down_proj"
EMBED = "model.embed_tokens"
V = "model.layers.1.self_attn.v_proj"


def _logits(folder: Path) -> np.ndarray:
    return np.array(load_model(folder).model(PROMPT))


def _refused(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    return str(caught.value)


def _write(folder: Path, shards: int = 1, **changes: Any) -> dict[str, mx.array]:
    config = tiny_llama_config(**changes)
    weights = parameters(tiny_llama(config))
    write_folder(folder, config, weights, shards)
    return weights


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    _write(tmp_path / "one")
    _write(tmp_path / "three", shards=3)
    assert np.array_equal(_logits(tmp_path / "one"), _logits(tmp_path / "three"))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    _write(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in _refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "1 of 2 shards" in _refused(tmp_path)


@pytest.mark.parametrize("stray", ["old.safetensors", "model-old.safetensors", "model.safetensors"])
def test_stray_file_that_the_index_does_not_name_is_ignored(tmp_path: Path, stray: str) -> None:
    weights = _write(tmp_path, shards=2)
    before = _logits(tmp_path)
    mx.save_safetensors(str(tmp_path / stray), {name: value + 1 for name, value in weights.items()})
    assert np.array_equal(_logits(tmp_path), before)


def test_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    weights = _write(tmp_path, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    theirs = {name: weights[name] for name, file in index.items() if file == second}
    twice = next(name for name, file in index.items() if file == first)
    mx.save_safetensors(str(tmp_path / second), theirs | {twice: weights[twice] + 1})
    message = _refused(tmp_path)
    for word in (twice, first, second):
        assert word in message


def test_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    weights = _write(tmp_path, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = index["model.norm.weight"]
    rest = {n: weights[n] for n, f in index.items() if f == file and n != "model.norm.weight"}
    mx.save_safetensors(str(tmp_path / file), rest)
    message = _refused(tmp_path)
    assert "model.norm.weight" in message
    assert file in message


def test_redundant_head_of_a_tied_model_changes_nothing(tmp_path: Path) -> None:
    weights = _write(tmp_path)
    before = _logits(tmp_path)
    write_folder(tmp_path, tiny_llama_config(), weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    assert np.array_equal(_logits(tmp_path), before)


def test_missing_head_of_an_untied_model_is_named(tmp_path: Path) -> None:
    weights = _write(tmp_path)
    write_folder(tmp_path, tiny_llama_config(tie_word_embeddings=False), weights)
    assert "lm_head.weight" in _refused(tmp_path)


def test_tensor_of_a_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    weights = _write(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    write_folder(tmp_path, tiny_llama_config(), weights | {name: mx.zeros((127, 64))}, shards=2)
    message = _refused(tmp_path)
    assert name in message
    assert "of-00002.safetensors" in message


def test_config_faults_are_named(tmp_path: Path) -> None:
    weights = _write(tmp_path)
    config = tiny_llama_config()
    for content, words in [
        ({k: v for k, v in config.items() if k != "model_type"}, "model_type"),
        (config | {"model_type": "banana"}, "banana"),
        ({k: v for k, v in config.items() if k != "hidden_size"}, "hidden_size"),
    ]:
        write_folder(tmp_path, content, weights)
        assert words in _refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "config.json" in _refused(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json" in _refused(tmp_path)


def test_cut_or_foreign_weight_files_are_named(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        path.write_bytes(content[:size])
        assert "model.safetensors" in _refused(tmp_path)
    path.write_bytes(b"not safetensors at all, but long enough")
    assert "model.safetensors" in _refused(tmp_path)
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert "safetensors" in _refused(tmp_path)


def _quantized(folder: Path, group_size: int, key: str = "quantization", **overrides: Any) -> dict[str, Any]:
    """A folder with one layer of 8 bits, the embedding of 8 bits, one layer unquantized and the rest of 4 bits."""
    config = tiny_llama_config()
    model = tiny_llama(config)
    wide = {"group_size": group_size, "bits": 8}
    layers: dict[str, Any] = {DOWN: wide, EMBED: wide, V: False}

    def choose(name: str, module: nn.Module) -> Any:
        return layers.get(name, hasattr(module, "to_quantized"))

    nn.quantize(model, group_size, 4, class_predicate=choose)
    config[key] = {"group_size": group_size, "bits": 4, **layers, **overrides}
    write_folder(folder, config, parameters(model))
    return config


@pytest.mark.parametrize("group_size", [32, 64])
def test_overrides_a_layer_give_what_mlx_lm_gives(tmp_path: Path, group_size: int) -> None:
    _quantized(tmp_path, group_size)
    theirs, _ = mlx_lm_utils.load_model(tmp_path)
    np.testing.assert_allclose(_logits(tmp_path), np.array(theirs(PROMPT)), atol=1e-4)
    ours = load_model(tmp_path).model.model.layers[0].mlp.down_proj.weight
    layer = theirs.model.layers[0].mlp.down_proj
    expected = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size, 8)
    assert np.array_equal(np.array(ours), np.array(expected))


def test_quantization_config_alone_is_understood(tmp_path: Path) -> None:
    _quantized(tmp_path / "new", 64)
    _quantized(tmp_path / "legacy", 64, key="quantization_config")
    assert np.array_equal(_logits(tmp_path / "new"), _logits(tmp_path / "legacy"))


@pytest.mark.parametrize(
    ("layer", "override"),
    [
        (DOWN, {"group_size": 64, "bits": 4}),
        (DOWN, {"group_size": 32, "bits": 8}),
        (DOWN, {"group_size": 64, "bits": "8"}),
        ("model.layers.1.mlp.down_proj", {"group_size": 64, "bits": 8}),
        ("model.layers.0.mlp.up_proj", False),
        (V, {"group_size": 64, "bits": 4}),
        (V, True),
    ],
)
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_override_that_contradicts_the_weights_names_the_layer(
    tmp_path: Path, layer: str, override: Any, key: str
) -> None:
    _quantized(tmp_path, 64, key=key, **{layer: override})
    assert layer in _refused(tmp_path)


def test_override_that_agrees_in_itself_but_not_with_the_model_names_the_layer(tmp_path: Path) -> None:
    # 4 bits in groups of 128 fit the stored words and scales, of a layer twice as wide.
    _quantized(tmp_path, 64, **{DOWN: {"group_size": 128, "bits": 4}})
    assert DOWN in _refused(tmp_path)
