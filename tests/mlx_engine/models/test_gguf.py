from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text, llama

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.gguf import convert_gguf
from mlx_engine.models.load import load_model
from mlx_engine.models.safetensors_writer import SafetensorsWriter
from tests.mlx_engine.models.tiny import TinyGGUF, parameters

Q = gguf.GGMLQuantizationType
PROMPT = mx.array([[5, 99, 200, 31, 7, 7, 150]])


def _logits(path: Path) -> np.ndarray:
    model = load_model(convert_gguf(path)).model
    return np.array(model(PROMPT)[0])


@pytest.mark.parametrize("qtype", [Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.F16, Q.F32, Q.BF16], ids=lambda q: q.name)
@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_weights_are_exactly_the_stored_ones(
    tmp_path: Path, quire_cache: Path, arch: str, tied: bool, qtype: gguf.GGMLQuantizationType
) -> None:
    tiny = TinyGGUF(arch=arch, tied=tied, qtype=qtype)
    tiny.write(tmp_path / "t.gguf")
    loaded = load_model(convert_gguf(tmp_path / "t.gguf"), "float32")
    actual = parameters(loaded.model)
    expected = tiny.stored_weights()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(np.array(actual[name]), value), name


@pytest.mark.parametrize("qtype", [Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda q: q.name)
def test_types_that_mlx_can_hold_stay_quantized_on_disk(
    tmp_path: Path, quire_cache: Path, qtype: gguf.GGMLQuantizationType
) -> None:
    TinyGGUF(qtype=qtype).write(tmp_path / "t.gguf")
    folder = convert_gguf(tmp_path / "t.gguf")
    stored = mx.load(str(folder / "model.safetensors"))
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype == mx.uint32
    assert stored["model.embed_tokens.scales"].dtype == mx.float16
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    bits = 8 if qtype == Q.Q8_0 else 4
    assert (quantization["bits"], quantization["group_size"]) == (bits, 32)
    if bits == 4:
        assert quantization["model.embed_tokens"]["bits"] == 8


def test_scale_too_large_for_a_float16_bias_is_kept_dense(tmp_path: Path, quire_cache: Path) -> None:
    tiny = TinyGGUF(qtype=Q.Q8_0)
    weights = tiny.hf_weights()
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e6  # d > 511, so 128 d overflows
    tiny.hf_weights = lambda: weights  # type: ignore[method-assign]
    tiny.write(tmp_path / "t.gguf")
    actual = parameters(load_model(convert_gguf(tmp_path / "t.gguf"), "float32").model)
    name = "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(np.array(actual[name]), tiny.stored_weights()[name])


def _write_random(path: Path, qtype: gguf.GGMLQuantizationType, name: str) -> np.ndarray:
    """A tiny model whose tensor `name` has random bytes of the type, for types that the gguf package can only read.

    Returns the tensor's values.
    """
    plain = path.with_name("plain.gguf")
    TinyGGUF(hidden=256, ff=256, head_dim=64, qtype=Q.F16).write(plain)
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    data = np.random.default_rng(3).integers(0, 256, (256, 256 // block, size), dtype=np.uint8)
    data[..., [*range(4), *range(-4, 0)]] &= 0x3F  # float16 scales are at either end: small numbers, no infinities
    data = data.reshape(256, -1)
    for tensor in reader.tensors:
        chosen = tensor.name == name
        writer.add_tensor(
            tensor.name, data if chosen else tensor.data, raw_dtype=qtype if chosen else tensor.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = gguf.dequantize(data, qtype)
    assert np.isfinite(values).all()
    assert values.std() > 0
    return values


@pytest.mark.parametrize("qtype", [Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K], ids=lambda q: q.name)
def test_types_of_five_bits_and_of_two_levels_are_exact_and_quantized_too(
    tmp_path: Path, quire_cache: Path, qtype: gguf.GGMLQuantizationType
) -> None:
    expected = _write_random(tmp_path / "t.gguf", qtype, "blk.1.ffn_down.weight")
    folder = convert_gguf(tmp_path / "t.gguf")
    name = "model.layers.1.mlp.down_proj"
    assert mx.load(str(folder / "model.safetensors"))[f"{name}.weight"].dtype == mx.uint32
    weight = load_model(folder, "float32").model.model.layers[1].mlp.down_proj.weight
    assert np.array_equal(np.array(weight), expected)


@pytest.mark.parametrize("qtype", [Q.Q2_K, Q.Q3_K, Q.Q6_K, Q.IQ4_XS, Q.IQ4_NL, Q.TQ2_0], ids=lambda q: q.name)
def test_other_types_are_dequantized_within_float16(
    tmp_path: Path, quire_cache: Path, qtype: gguf.GGMLQuantizationType
) -> None:
    expected = _write_random(tmp_path / "t.gguf", qtype, "blk.1.ffn_down.weight")
    weight = load_model(convert_gguf(tmp_path / "t.gguf"), "float32").model.model.layers[1].mlp.down_proj.weight
    np.testing.assert_allclose(np.array(weight), expected, rtol=2**-10, atol=2**-24)


def test_row_permutation_gives_the_logits_of_the_original(tmp_path: Path, quire_cache: Path) -> None:
    tiny = TinyGGUF(bias=True)
    tiny.write(tmp_path / "t.gguf")
    loaded = load_model(convert_gguf(tmp_path / "t.gguf"), "float32")
    original = llama.Model(llama.ModelArgs.from_dict(loaded.config))
    original.load_weights([(name, mx.array(value)) for name, value in tiny.stored_weights().items()])
    assert np.array_equal(np.array(loaded.model(PROMPT)), np.array(original(PROMPT)))


@pytest.mark.parametrize("layers", [7, 62])
def test_gemma3_keeps_its_windows_scale_and_norms(tmp_path: Path, quire_cache: Path, layers: int) -> None:
    tiny = TinyGGUF(arch="gemma3", layers=layers, head_dim=32, qtype=Q.F32, embedding_qtype=Q.F32)
    tiny.extra_keys = {"attention.sliding_window": 8.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    tiny.write(tmp_path / "t.gguf")
    loaded = load_model(convert_gguf(tmp_path / "t.gguf"), "float32")
    config = loaded.config
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (8, 6)
    assert config["query_pre_attn_scalar"] == (16 if layers == 62 else 32)
    assert config["torch_dtype"] == "bfloat16"
    original = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))
    original.sanitize({})
    original.load_weights([(name, mx.array(value)) for name, value in tiny.stored_weights().items()])
    prompt = mx.arange(20)[None]
    np.testing.assert_allclose(np.array(loaded.model(prompt)), np.array(original(prompt)), atol=1e-3)


def test_split_file_equals_the_whole_one_from_any_part(tmp_path: Path, quire_cache: Path) -> None:
    TinyGGUF().write(tmp_path / "whole.gguf")
    parts = TinyGGUF(split_tensors=8).write(tmp_path / "x.gguf")
    assert len(parts) == 3
    assert convert_gguf(parts[0]) == convert_gguf(parts[2])
    assert np.array_equal(_logits(parts[1]), _logits(tmp_path / "whole.gguf"))


def test_llama3_rope_scaling_is_recognised(tmp_path: Path, quire_cache: Path) -> None:
    config = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    base = 10000.0 ** (np.arange(0, 64, 2) / 64)
    scaled = np.array(llama.initialize_rope(64, 10000.0, False, {"rope_type": "llama3", **config})._freqs)
    TinyGGUF(head_dim=64, rope_freqs=(scaled / base).astype(np.float32)).write(tmp_path / "t.gguf")
    stored = json.loads((convert_gguf(tmp_path / "t.gguf") / "config.json").read_text())
    assert stored["rope_scaling"] == {"rope_type": "llama3", **config}
    TinyGGUF(head_dim=64, rope_freqs=np.linspace(1, 32, 32, dtype=np.float32)).write(tmp_path / "u.gguf")
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        convert_gguf(tmp_path / "u.gguf")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", {"type": "linear", "factor": 4.0}),
        ("yarn", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}),
    ],
)
def test_rope_scaling_by_key(tmp_path: Path, quire_cache: Path, kind: str, expected: dict[str, object]) -> None:
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    TinyGGUF(arch="qwen2", extra_keys=keys).write(tmp_path / "t.gguf")
    folder = convert_gguf(tmp_path / "t.gguf")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == expected
    assert np.isfinite(np.array(load_model(folder).model(PROMPT))).all()


def test_second_conversion_is_a_look_up_and_a_changed_file_a_new_one(tmp_path: Path, quire_cache: Path) -> None:
    path = tmp_path / "t.gguf"
    TinyGGUF().write(path)
    first = convert_gguf(path)
    stages: list[str] = []
    assert convert_gguf(path, lambda stage, _: stages.append(stage)) == first
    assert stages == []
    path.unlink()
    TinyGGUF(seed=1).write(path)
    second = convert_gguf(path, lambda stage, _: stages.append(stage))
    assert second != first
    assert stages[0] == "read"
    assert stages[-1] == "convert"


def test_failed_conversion_leaves_nothing_that_looks_whole(tmp_path: Path, quire_cache: Path) -> None:
    TinyGGUF(extra_tensor="blk.0.ffn_gate_inp.weight").write(tmp_path / "t.gguf")
    with pytest.raises(ModelLoadError, match="ffn_gate_inp"):
        convert_gguf(tmp_path / "t.gguf")
    assert [p.name for p in (quire_cache / "gguf").iterdir() if p.is_dir()] == []


def test_processes_that_start_together_convert_once(tmp_path: Path, quire_cache: Path) -> None:
    path = tmp_path / "t.gguf"
    TinyGGUF().write(path)
    code = (
        "import sys; from pathlib import Path; from mlx_engine.models.gguf import convert_gguf; stages = [];"
        "print(convert_gguf(Path(sys.argv[1]), lambda stage, _: stages.append(stage)), len(stages))"
    )
    env = {**os.environ, "QUIRE_CACHE_DIR": str(quire_cache)}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=60)[0].split() for process in started]
    assert len({folder for folder, _ in answers}) == 1
    assert sorted(count != "0" for _, count in answers) == [False, False, True]
    assert np.isfinite(np.array(load_model(Path(answers[0][0])).model(PROMPT))).all()


def test_unwritable_cache_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TinyGGUF().write(tmp_path / "t.gguf")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="QUIRE_CACHE_DIR"):
        convert_gguf(tmp_path / "t.gguf")


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, max_shard_bytes=1000)
    arrays = {f"t{i}": np.full((8, 16), i, np.float32) for i in range(5)}
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(set(index["weight_map"].values())) == 5
    for name, file in index["weight_map"].items():
        assert np.array_equal(np.array(mx.load(str(tmp_path / file))[name]), arrays[name])
