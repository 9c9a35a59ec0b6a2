from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import mixtral

from mlx_engine.models import load as load_module
from mlx_engine.models.embedded import embedded_gguf
from mlx_engine.models.gguf import convert_gguf
from mlx_engine.models.load import LoadedModel, load_model, resolve_model
from mlx_engine.models.tokenizer import Tokenizer
from tests.mlx_engine.models.tiny import TinyGGUF, parameters, tiny_llama, tiny_llama_config, write_folder


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model(resolve_model("embedded"))


def _complete(loaded: LoadedModel, prompt: str, num_tokens: int) -> str:
    tokenizer = Tokenizer(resolve_model("embedded"))
    steps = generate_step(mx.array(tokenizer.encode(prompt)), loaded.model, max_tokens=num_tokens)
    return tokenizer.decode([int(token) for token, _ in steps])


def test_embedded_model_knows_things(embedded: LoadedModel) -> None:
    assert "Paris" in _complete(embedded, "The capital of France is", 3)
    assert _complete(embedded, "1, 2, 3, 4,", 5).replace(" ", "").startswith("5,6")


def test_embedded_model_is_described(embedded: LoadedModel) -> None:
    assert embedded.eos_token_ids == {2}
    assert (embedded.max_model_len, embedded.vocab_size) == (8192, 49152)
    assert embedded.weight_bytes == sum(array.nbytes for array in parameters(embedded.model).values())


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="weights stay quantized on a GPU")
def test_embedded_weights_equal_the_gguf_packages_own(embedded: LoadedModel) -> None:
    assert embedded.dtype == mx.float32
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_gguf()).tensors}
    layer = embedded.model.model.layers[11]
    for name, weight in {
        "token_embd.weight": embedded.model.model.embed_tokens.weight,
        "blk.11.ffn_down.weight": layer.mlp.down_proj.weight,
        "blk.11.attn_v.weight": layer.self_attn.v_proj.weight,
        "blk.11.attn_norm.weight": layer.input_layernorm.weight,
    }.items():
        expected = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert np.array_equal(np.array(weight), expected), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_explicit_dtype_is_honoured(tmp_path: Path, quire_cache: Path, dtype: str) -> None:
    TinyGGUF().write(tmp_path / "t.gguf")
    loaded = load_model(convert_gguf(tmp_path / "t.gguf"), dtype)
    assert loaded.dtype == getattr(mx, dtype)
    floats = {a.dtype for a in parameters(loaded.model).values() if mx.issubdtype(a.dtype, mx.floating)}
    assert floats == {loaded.dtype}
    assert loaded.model(mx.array([[1, 2, 3]])).dtype == loaded.dtype


def test_gpu_keeps_layers_quantized_and_activations_in_the_models_own_type(
    tmp_path: Path, quire_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "runs_on_cpu", lambda: False)
    TinyGGUF().write(tmp_path / "t.gguf")
    loaded = load_model(convert_gguf(tmp_path / "t.gguf"))
    assert isinstance(loaded.model.model.layers[0].mlp.down_proj, nn.QuantizedLinear)
    # The norms are float32 in the file: left so, they would make everything float32.
    assert loaded.model(mx.array([[1, 2, 3]])).dtype == loaded.dtype == mx.float16

    config = tiny_llama_config()
    weights = {name: value.astype(mx.bfloat16) for name, value in parameters(tiny_llama(config)).items()}
    write_folder(tmp_path / "dense", config, weights)
    assert load_model(tmp_path / "dense").dtype == mx.bfloat16


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="for the CPU only")
def test_quantized_layers_of_every_kind_become_dense_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_llama_config(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    model = mixtral.Model(mixtral.ModelArgs.from_dict(config))
    model.update(nn.utils.tree_map(lambda x: x.astype(mx.float16), model.parameters()))
    nn.quantize(model, 32, 4)
    write_folder(tmp_path, config | {"quantization": {"group_size": 32, "bits": 4}}, parameters(model))
    with caplog.at_level(logging.INFO):
        loaded = load_model(tmp_path)
    assert not [name for name, _ in loaded.model.named_modules() if "Quantized" in type(_).__name__]
    assert "quantized layers made dense" in caplog.text
    experts = model.model.layers[1].block_sparse_moe.switch_mlp.up_proj
    expected = mx.dequantize(
        experts.weight, experts.scales.astype(mx.float32), experts.biases.astype(mx.float32), 32, 4
    )
    assert np.array_equal(np.array(loaded.model.model.layers[1].block_sparse_moe.switch_mlp.up_proj.weight), expected)
    assert np.isfinite(np.array(loaded.model(mx.array([[1, 2, 3]])))).all()


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    config = tiny_llama_config()
    write_folder(tmp_path, config, parameters(tiny_llama(config)))
    seen: list[tuple[str, float]] = []
    load_model(tmp_path, progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert seen[0] == ("load", 0.0)
    assert seen[-1] == ("load", 1.0)
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)


COMPILE = """
import sys
import numpy as np
from mlx_engine.models.load import can_compile_on_cpu
import mlx.core as mx
from mlx_lm.models.activations import swiglu
mx.set_default_device(mx.cpu)
if "--check" in sys.argv: print(can_compile_on_cpu())
try: print(np.array(swiglu(mx.ones((3, 5)), mx.ones((3, 5)))).shape)
except RuntimeError as error: print("RuntimeError")
"""


def _compile(tmp_path: Path, path: str, *arguments: str) -> list[str]:
    # MLX keeps compiled code in the temporary folder: a fresh one, so that it has to compile.
    temporary = tmp_path / "-".join(("tmp", *arguments))
    temporary.mkdir(exist_ok=True)
    env = {**os.environ, "PATH": path, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", COMPILE, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout.split("\n")[:-1]


def test_no_compiler_on_path(tmp_path: Path) -> None:
    assert _compile(tmp_path, str(tmp_path), "--check") == ["False", "(3, 5)"]


def test_broken_compiler_on_path(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no compiler proper >&2\nexit 1\n')
    fake.chmod(0o755)
    assert _compile(tmp_path, str(tmp_path)) == ["RuntimeError"]  # what the check saves from
    assert _compile(tmp_path, str(tmp_path), "--check") == ["False", "(3, 5)"]


def test_temporary_folder_that_cannot_be_used(tmp_path: Path) -> None:
    for name in ("tmp", "tmp---check"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mlx").write_text("another user's, as it were")
    path = os.environ["PATH"]
    assert _compile(tmp_path, path) == ["RuntimeError"]
    assert _compile(tmp_path, path, "--check") == ["False", "(3, 5)"]
