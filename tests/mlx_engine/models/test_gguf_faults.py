"""Damaged or unsupported GGUF files: each is refused by the name of what is wrong, none is loaded half."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.gguf import convert_gguf
from tests.mlx_engine.models.tiny import TinyGGUF

pytestmark = pytest.mark.usefixtures("quire_cache")


def _refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        convert_gguf(path)
    return str(caught.value)


def _set_type(path: Path, tensor: str, type_id: int) -> None:
    """Overwrites one tensor's type id: it follows name, dimension count and dimensions."""
    reader = gguf.GGUFReader(path)
    offset = next(t for t in reader.tensors if t.name == tensor).field.parts[4].ctypes.data - reader.data.ctypes.data
    del reader
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(content)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "t.gguf"
    TinyGGUF().write(path)
    return path


def test_missing_part_is_named(tmp_path: Path) -> None:
    parts = TinyGGUF(split_tensors=8).write(tmp_path / "x.gguf")
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        assert "x-00002-of-00003.gguf" in _refused(part)


def test_part_of_another_model_is_noticed(tmp_path: Path) -> None:
    parts = TinyGGUF(split_tensors=8).write(tmp_path / "x.gguf")
    parts[0].rename(tmp_path / "alone.gguf")
    assert "3 parts" in _refused(tmp_path / "alone.gguf")


def test_unknown_type_id_names_the_tensor(whole: Path) -> None:
    _set_type(whole, "blk.1.ffn_up.weight", 99)
    message = _refused(whole)
    assert "blk.1.ffn_up.weight" in message
    assert "99" in message


def test_type_without_a_dequantizer_is_named(whole: Path) -> None:
    _set_type(whole, "blk.0.attn_q.weight", gguf.GGMLQuantizationType.Q8_1)
    message = _refused(whole)
    assert "blk.0.attn_q.weight" in message
    assert "Q8_1" in message


def test_row_that_no_block_fits_names_the_tensor(whole: Path) -> None:
    _set_type(whole, "blk.0.attn_q.weight", gguf.GGMLQuantizationType.Q4_K)
    assert "blk.0.attn_q.weight" in _refused(whole)


def test_truncated_by_a_kilobyte_names_the_tensor(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes()[:-1024])
    message = _refused(whole)
    assert "truncated" in message
    assert "blk." in message


def test_truncated_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The header densely, where every field can break, then the data.
    header = gguf.GGUFReader(whole).data_offset
    for size in [*range(0, header, 397), *range(header, len(content) - 32, 20_011)]:
        cut.write_bytes(content[:size])
        assert "cut.gguf" in _refused(cut)


def test_file_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "t.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))
    assert "isn't a readable GGUF file" in _refused(tmp_path / "t.gguf")


def test_missing_file(tmp_path: Path) -> None:
    assert "absent.gguf" in _refused(tmp_path / "absent.gguf")


def test_no_tokenizer_names_the_key(tmp_path: Path) -> None:
    TinyGGUF(tokenizer=False).write(tmp_path / "t.gguf")
    assert "tokenizer.ggml." in _refused(tmp_path / "t.gguf")


def test_unknown_text_splitter_is_named(tmp_path: Path) -> None:
    TinyGGUF(pre="klingon").write(tmp_path / "t.gguf")
    message = _refused(tmp_path / "t.gguf")
    assert "klingon" in message
    assert "smollm" in message


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    TinyGGUF(arch="banana").write(tmp_path / "t.gguf")
    message = _refused(tmp_path / "t.gguf")
    for word in ("banana", "llama", "qwen2", "qwen3"):
        assert word in message


@pytest.mark.parametrize(
    ("key", "name"), [("block_count", "llama.block_count"), ("rms_eps", "llama.attention.layer_norm_rms_epsilon")]
)
def test_missing_metadata_key_is_named(tmp_path: Path, key: str, name: str) -> None:
    TinyGGUF(drop_key=key).write(tmp_path / "t.gguf")
    assert name in _refused(tmp_path / "t.gguf")


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.ffn_gate.weight", "output_norm.weight"])
def test_missing_tensor_is_named(tmp_path: Path, tensor: str) -> None:
    TinyGGUF(drop_tensor=tensor).write(tmp_path / "t.gguf")
    assert tensor in _refused(tmp_path / "t.gguf")


def test_rope_scaling_that_is_not_known_is_named(tmp_path: Path) -> None:
    TinyGGUF(extra_keys={"rope.scaling.type": "longrope"}).write(tmp_path / "t.gguf")
    assert "longrope" in _refused(tmp_path / "t.gguf")


def test_partial_rotary_embeddings_are_refused(tmp_path: Path) -> None:
    tiny = TinyGGUF(head_dim=32)
    tiny.drop_key = "value_length"
    tiny.extra_keys = {"attention.value_length": 16.0}
    tiny.write(tmp_path / "t.gguf")
    assert "values of 16" in _refused(tmp_path / "t.gguf")
