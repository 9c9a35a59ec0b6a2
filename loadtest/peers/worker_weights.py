"""Makes the peers' weights out of the embedded GGUF, in a process of its own: the one part that needs our converter.

    python -m loadtest.peers.worker_weights FOLDER

prints one line of JSON: the files by format, and the hash of the source. Two Hugging Face folders (float32, bfloat16)
and two GGUF files (bf16, f32), all with the dequantized numbers; rows of q and k in the order that each format wants.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock
import gguf
import numpy as np

from mlx_engine.models.embedded import embedded_gguf
from mlx_engine.models.gguf_config import model_config, row_order, tensor_rules
from mlx_engine.models.gguf_reader import GGUFFile, read_gguf
from mlx_engine.models.gguf_tokenizer import write_tokenizer
from mlx_engine.models.safetensors_writer import SafetensorsWriter

# Part of the folder's name: raise it whenever what is written changes.
_VERSION = 1
_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "f32": gguf.GGMLQuantizationType.F32}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f32": gguf.LlamaFileType.ALL_F32}
Array = np.ndarray[Any, Any]


def make_weights(root: Path, source: Path) -> dict[str, str]:
    """All formats of the source, made now where they are missing, in a folder of `root` named by the source's hash.

    Each file or folder is whole or absent. Raises OSError, or ModelLoadError for a source that can't be converted.
    """
    with source.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = root / f"weights-{sha256[:16]}-{_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[GGUFFile, Path], None]] = {
        "hf-float32": lambda file, path: _write_hf(file, path, "float32"),
        "hf-bfloat16": lambda file, path: _write_hf(file, path, "bfloat16"),
        f"{source.stem}-to-bf16.gguf": lambda file, path: _write_gguf(file, path, "bf16"),
        f"{source.stem}-to-f32.gguf": lambda file, path: _write_gguf(file, path, "f32"),
    }
    with filelock.FileLock(folder / "lock"):
        for name, make in makers.items():
            if not (folder / name).exists():
                _whole_or_absent(folder / name, make, read_gguf(source))
    hf_float32, hf_bfloat16, gguf_bf16, gguf_f32 = (str(folder / name) for name in makers)
    return {"hf_float32": hf_float32, "hf_bfloat16": hf_bfloat16, "gguf_shipped": str(source),
            "gguf_bf16": gguf_bf16, "gguf_f32": gguf_f32, "sha256": sha256}  # fmt: skip


def _whole_or_absent(path: Path, make: Callable[[GGUFFile, Path], None], file: GGUFFile) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="making-", dir=path.parent))
    try:
        make(file, scratch / path.name)
        (scratch / path.name).rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _values(file: GGUFFile, name: str) -> Array:
    tensor = file.tensors[name]
    return np.asarray(gguf.dequantize(tensor.data, tensor.type), np.float32).reshape(tensor.shape)


def _bfloat16_bits(values: Array) -> Array:
    """The nearest bfloat16 of each finite float32, ties to even, as uint16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_hf(file: GGUFFile, folder: Path, dtype: str) -> None:
    folder.mkdir()
    config = model_config(file)
    write_tokenizer(file, folder)
    writer = SafetensorsWriter(folder)
    for rule in tensor_rules(file, config):
        values = _values(file, rule.source)
        if rule.heads is not None:
            values = values[row_order(rule.heads, len(values))]
        if rule.offset:
            values = values - np.float32(rule.offset)
        bfloat16 = dtype == "bfloat16"
        writer.add(f"{rule.target}.{rule.suffix}", _bfloat16_bits(values) if bfloat16 else values, bfloat16=bfloat16)
    writer.close()
    config |= json.loads((folder / "generation_config.json").read_text())
    # vLLM looks the model up by its class.
    config |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_gguf(file: GGUFFile, path: Path, kind: str) -> None:
    writer = gguf.GGUFWriter(path, str(file.require("general.architecture")))
    for name, field in gguf.GGUFReader(file.path).fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(_FILE_TYPES[kind])
    for name, tensor in file.tensors.items():
        values = _values(file, name)
        # llama.cpp keeps norms in float32 in every kind of file.
        target = _TYPES[kind] if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        if target == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(argv: Sequence[str]) -> int:
    """Makes what is missing in the folder that is the only argument, and prints where everything is."""
    (root,) = argv
    print(json.dumps(make_weights(Path(root), embedded_gguf())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
