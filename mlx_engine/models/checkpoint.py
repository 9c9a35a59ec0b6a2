"""A model folder, checked before a byte of its weights is loaded.

mlx-lm takes whatever `model*.safetensors` it finds and complains in the words of whatever breaks first. Here the files
are the ones that the index names, their headers are read, and each fault is named. Imports no MLX.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_engine.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"^model-\d+-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a safetensors header."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files are there and whole."""

    folder: Path
    config: dict[str, Any]
    files: tuple[str, ...]  # the weight files, by name
    tensors: dict[str, StoredTensor]

    @contextlib.contextmanager
    def view(self) -> Iterator[Path]:
        """A folder in which mlx-lm finds exactly `files`: this one, or a temporary one of links to it.

        The links may go as soon as the arrays exist: MLX keeps the files open.
        """
        if set(self.files) == {path.name for path in self.folder.glob("model*.safetensors")}:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="quire-view-") as temporary:
            view = Path(temporary)
            for path in self.folder.iterdir():
                if path.suffix != ".safetensors" and path.is_file():
                    (view / path.name).symlink_to(path.resolve())
            for i, name in enumerate(self.files):
                (view / f"model-{i}.safetensors").symlink_to((self.folder / name).resolve())
            yield view

    def config_overrides(self) -> dict[str, Any]:
        """Config keys that mlx-lm reads under another name than the folder's."""
        if "quantization" in self.config:
            return {}
        legacy = self.config.get("quantization_config") or {}
        if isinstance(legacy, dict) and "quant_method" not in legacy and {"group_size", "bits"} <= set(legacy):
            return {"quantization": legacy}
        return {}

    def explain(self, reason: str) -> str:
        """mlx-lm's message with the file added for each tensor that it names."""
        named = {name: tensor.file for name, tensor in self.tensors.items() if re.search(_word(name), reason)}
        where = "; ".join(f"{name} is in {file}" for name, file in sorted(named.items())[:3])
        return f"{reason} ({where})" if where else reason


def _word(name: str) -> str:
    return rf"(?<![\w.]){re.escape(name)}(?![\w])"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads config.json and the headers of the weight files.

    Raises ModelLoadError naming the file, tensor, layer or key: a missing or damaged config.json, no `model_type`, no
    weights, a shard that the index names and that isn't there, a file cut short, a tensor that isn't in the file that
    the index says, or in two files, a quantization override that contradicts what is stored.
    """
    config = _read_config(folder)
    files, weight_map = _weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(folder / file).items():
            if name in tensors:
                # mlx-lm would take whichever file it happens to read last.
                raise ModelLoadError(f"{folder}: tensor {name!r} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise ModelLoadError(f"{folder / file} has no tensor {name!r}, which {_INDEX} says it holds")
    checkpoint = Checkpoint(folder, config, files, tensors)
    _check_overrides(checkpoint)
    return checkpoint


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{folder} has no config.json: it isn't the folder of a Hugging Face or MLX model"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path} has no 'model_type', so the model's architecture isn't known")
    return config


def _weight_files(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the weight files, and the index's map from tensor to file (empty without an index)."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{index} can't be read: {error!r}") from error
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (folder / name).is_file():
                raise ModelLoadError(f"{folder} has no {name}, which {_INDEX} names: download it again")
        return tuple(names), weight_map
    if (folder / "model.safetensors").is_file():
        return ("model.safetensors",), {}
    names = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not names:
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        hint = f" ({', '.join(others[:3])} isn't named model*.safetensors)" if others else ""
        raise ModelLoadError(f"{folder} has no model.safetensors{hint}: only safetensors weights can be loaded")
    numbered = [match for match in map(_NUMBERED.match, names) if match]
    if numbered and len(numbered) != int(numbered[0][1]):
        raise ModelLoadError(f"{folder} holds {len(numbered)} of {int(numbered[0][1])} shards, and no {_INDEX}")
    return tuple(names), {}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ModelLoadError(f"{path} is cut short inside its header: download it again")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        tensors = {
            name: StoredTensor(path.name, str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"{path} isn't a safetensors file: {error}") from error
    if 8 + length + end > size:
        raise ModelLoadError(f"{path} is cut short: {size} of {8 + length + end} bytes are there. Download it again")
    return tensors


def _check_overrides(checkpoint: Checkpoint) -> None:
    """Compares the quantization that config.json claims, layer by layer, with the stored shapes."""
    config = checkpoint.config
    quantization = config.get("quantization") or checkpoint.config_overrides().get("quantization")
    if not isinstance(quantization, dict):
        return
    for layer, override in quantization.items():
        if not isinstance(override, dict | bool) or f"{layer}.weight" not in checkpoint.tensors:
            continue
        scales = checkpoint.tensors.get(f"{layer}.scales")
        if override is False:
            if scales is not None:
                raise ModelLoadError(
                    f"{checkpoint.folder}: config.json says that layer {layer} isn't quantized, but {scales.file} "
                    "stores scales for it"
                )
            continue
        if scales is None:
            raise ModelLoadError(f"{checkpoint.folder}: config.json quantizes layer {layer}, but no scales are stored")
        settings = quantization if override is True else {**quantization, **override}
        _check_layer(checkpoint, layer, settings, scales)


def _check_layer(checkpoint: Checkpoint, layer: str, settings: dict[str, Any], scales: StoredTensor) -> None:
    bits, group_size = settings.get("bits"), settings.get("group_size")
    weight = checkpoint.tensors[f"{layer}.weight"]
    if not isinstance(bits, int) or not isinstance(group_size, int) or bits < 1 or group_size < 1:
        raise ModelLoadError(f"{checkpoint.folder}: quantization of layer {layer} has no usable bits and group_size")
    inputs = weight.shape[-1] * 32 // bits
    if weight.shape[-1] * 32 % bits or inputs != scales.shape[-1] * group_size:
        raise ModelLoadError(
            f"{checkpoint.folder}: config.json says {bits} bits in groups of {group_size} for layer {layer}, but "
            f"{weight.file} stores {weight.shape[-1]} words and {scales.shape[-1]} scales a row"
        )
