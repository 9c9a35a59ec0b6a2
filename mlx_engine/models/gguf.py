"""Converts a GGUF file, once, into a folder that mlx-lm loads.

The folder lives in the user's cache, under a name made of the file's content and the converter's version, so a changed
file or converter gets a new one. Needs neither MLX nor a GPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock

from mlx_engine.errors import ModelLoadError
from mlx_engine.folders import cache_folder
from mlx_engine.models.gguf_config import model_config, row_order, tensor_rules
from mlx_engine.models.gguf_reader import GGUFFile, part_paths, read_gguf
from mlx_engine.models.gguf_tensors import GROUP_SIZE, MLXTensor, convert_tensor
from mlx_engine.models.gguf_tokenizer import write_tokenizer
from mlx_engine.models.safetensors_writer import SafetensorsWriter

logger = logging.getLogger(__name__)

# Told what is being done and how much of it is: ("convert", 0.25).
Progress = Callable[[str, float], None]

# Part of the folder's name. Raise it whenever the folder's content changes for the same file.
CONVERTER_VERSION = 3
# The config key that marks a folder of ours.
MARKER = "quire_gguf"


def convert_gguf(path: Path, progress: Progress | None = None) -> Path:
    """The mlx-lm folder of a GGUF file, converted now if it isn't in the cache.

    For a split model, `path` is any of its parts. Processes that ask at the same time wait for the first one.
    Raises ModelLoadError, naming what is at fault in the file or on the disk.
    """
    folder = cache_folder() / "gguf" / _folder_name(path)
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(folder.name + ".lock")):
            if not (folder / "config.json").is_file():
                _convert_into(path, folder, progress or _ignore)
    except OSError as error:
        raise ModelLoadError(
            f"{path} can't be converted into {folder}: {error}. Set QUIRE_CACHE_DIR to a folder with free space"
        ) from error
    return folder


def _ignore(stage: str, fraction: float) -> None:
    del stage, fraction


def _folder_name(path: Path) -> str:
    """A name that changes with the file: its start (metadata), its size and its modification time."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION}".encode())
    parts = part_paths(path)
    for part in parts:
        try:
            stat = part.stat()
            with part.open("rb") as file:
                digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode() + file.read(1 << 20))
        except FileNotFoundError:
            raise ModelLoadError(f"{part} doesn't exist") from None
        except OSError as error:
            raise ModelLoadError(f"{part} can't be read: {error.strerror}") from error
    return f"{parts[0].stem}-{digest.hexdigest()[:16]}"


def _convert_into(path: Path, folder: Path, progress: Progress) -> None:
    """Converts into a temporary folder beside `folder`, then renames it: a folder is whole or absent."""
    logger.info("converting %s into %s", path, folder)
    progress("read", 0.0)
    file = read_gguf(path)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        config = model_config(file)
        write_tokenizer(file, temporary)
        quantization = _write_weights(file, config, temporary, progress)
        if quantization is not None:
            config["quantization"] = quantization
        config |= json.loads((temporary / "generation_config.json").read_text())
        config[MARKER] = {"file": path.name, "converter": CONVERTER_VERSION}
        (temporary / "config.json").write_text(json.dumps(config, indent=1))
        # mkdtemp makes a private folder; a cache may be shared.
        temporary.chmod(0o755)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_weights(file: GGUFFile, config: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any] | None:
    """Writes the weights; returns config.json's `quantization`, None if everything is dense."""
    rules = tensor_rules(file, config)
    writer = SafetensorsWriter(folder)
    bits: dict[str, int] = {}
    for done, rule in enumerate(rules):
        progress("convert", done / len(rules))
        tensor = file.tensors[rule.source]
        order = row_order(rule.heads, tensor.shape[0]) if rule.heads is not None else None
        converted = convert_tensor(tensor, rule.suffix, order, rule.offset)
        _add(writer, rule.target, converted)
        if converted.bits is not None:
            bits[rule.target] = converted.bits
    writer.close()
    progress("convert", 1.0)
    if not bits:
        return None
    usual = Counter(bits.values()).most_common(1)[0][0]
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual, "mode": "affine"}
    for target, width in bits.items():
        if width != usual:
            quantization[target] = {"group_size": GROUP_SIZE, "bits": width, "mode": "affine"}
    return quantization


def _add(writer: SafetensorsWriter, target: str, converted: MLXTensor) -> None:
    for suffix, array in converted.arrays.items():
        writer.add(f"{target}.{suffix}", array, bfloat16=converted.bfloat16)
