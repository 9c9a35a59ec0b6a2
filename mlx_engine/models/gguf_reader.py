"""Opens a GGUF file, whole or split in parts, and checks it before anything is converted.

Every fault of the file is a ModelLoadError that names the part, tensor, type or key.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mlx_engine.errors import ModelLoadError

# Stored as they are; every other type needs a dequantizer.
PLAIN_TYPES = frozenset({"F32", "F16", "BF16", "F64"})

_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. `data` is a view of the mapped file, read when touched."""

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # row-major: (rows, columns)
    data: np.ndarray[Any, Any]  # plain types in `shape`; quantized ones as uint8 (rows, bytes of a row)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata and tensors of a model, all parts together."""

    path: Path  # the part or file that was asked for
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, or the default."""
        return self.metadata.get(key, default)

    def require(self, key: str) -> Any:
        """The value of a metadata key. Raises ModelLoadError, naming it, if it is missing."""
        if key not in self.metadata:
            raise ModelLoadError(f"{self.path} has no metadata key {key!r}: the file is incomplete")
        return self.metadata[key]


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The package's reader, checking each tensor's entry first: its own errors name no tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            name = bytes(name_data).decode("utf-8", "replace")
            _check_entry(self._path, name, [int(d) for d in dims], int(raw_type[0]), start_offs + int(offset[0]))
        super()._build_tensors(start_offs, fields)


def _check_entry(path: Path, name: str, dims: list[int], raw_type: int, start: int) -> None:
    try:
        tensor_type = gguf.GGMLQuantizationType(raw_type)
    except ValueError:
        raise ModelLoadError(f"{path}: tensor {name!r} has the unknown type id {raw_type}") from None
    if not _can_convert(tensor_type):
        raise ModelLoadError(
            f"{path}: tensor {name!r} has type {tensor_type.name}, which the gguf package can't dequantize"
        )
    block_size, type_size = gguf.GGML_QUANT_SIZES[tensor_type]
    if dims and dims[0] % block_size:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of type {tensor_type.name} has rows of {dims[0]} elements, "
            f"not a multiple of {block_size}"
        )
    end = start + int(np.prod(dims, dtype=np.int64)) * type_size // block_size
    size = path.stat().st_size
    if end > size:
        raise ModelLoadError(
            f"{path} is truncated: tensor {name!r} ends at byte {end} and the file at {size}. Download it again"
        )


@functools.cache
def _can_convert(tensor_type: gguf.GGMLQuantizationType) -> bool:
    if tensor_type.name in PLAIN_TYPES:
        return True
    _, type_size = gguf.GGML_QUANT_SIZES[tensor_type]
    try:
        gguf.dequantize(np.zeros((1, type_size), np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return True


def part_paths(path: Path) -> list[Path]:
    """All the files of a model, in order, from any one of them. A file that isn't a part is alone.

    Raises ModelLoadError naming the first part that isn't there.
    """
    match = _PART.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"{path} is one of {count} parts, and {part.name} is missing beside it")
    return parts


def read_gguf(path: Path) -> GGUFFile:
    """Opens the file with all its parts. The tensors' data stays on disk until it is touched.

    Raises ModelLoadError: not a GGUF file, truncated, a part missing, a tensor of a type that can't be read.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    parts = part_paths(path)
    for part in parts:
        reader = _open(part)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        declared = int(fields.get("split.count", 1) or 1)
        if declared > 1 and declared != len(parts):
            raise ModelLoadError(
                f"{part} says it is one of {declared} parts, but its name gives {len(parts)}: keep the names "
                f"NAME-00001-of-{declared:05d}.gguf and so on"
            )
        # The first part carries the model's metadata, the others at most repeat it.
        metadata = {**fields, **metadata}
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise ModelLoadError(f"{part}: tensor {tensor.name!r} is in an earlier part too")
            tensors[tensor.name] = GGUFTensor(
                tensor.name, tensor.tensor_type, tuple(int(d) for d in reversed(tensor.shape)), tensor.data
            )
    expected = metadata.get("split.tensors.count")
    if expected is not None and int(expected) != len(tensors):
        raise ModelLoadError(f"{path}: the parts hold {len(tensors)} tensors together, not the declared {expected}")
    return GGUFFile(path, metadata, tensors)


def _open(path: Path) -> _Reader:
    try:
        return _Reader(path)
    except ModelLoadError:
        raise
    # A damaged header makes the package raise almost anything.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} isn't a readable GGUF file, or is truncated in its header: {error}") from error
