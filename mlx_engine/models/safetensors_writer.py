"""Writes safetensors files one tensor at a time, so that a conversion needs memory for one tensor only.

The format: eight bytes of header length, a JSON header that may be padded with spaces, then the tensors' bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_DTYPES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8"}
# The header comes first in the file but is known last, so this much is kept free for it.
_HEADER_BYTES = 4 << 20


class SafetensorsWriter:
    """Writes `model.safetensors` into a folder, or `model-0000i-of-0000N.safetensors` with an index.

    Not safe for two threads. Nothing is readable before `close`.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = 5 * 10**9) -> None:
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._shards: list[list[str]] = []  # names of the tensors in each
        self._header: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._size = 0  # of the current shard's tensors
        self._total = 0

    def add(self, name: str, array: np.ndarray[Any, Any], *, bfloat16: bool = False) -> None:
        """Appends one tensor. With bfloat16 the array is uint16 and holds bfloat16 bits."""
        dtype = "BF16" if bfloat16 else _DTYPES[array.dtype.name]
        if self._file is None or (self._size and self._size + array.nbytes > self._max_shard_bytes):
            self._next_shard()
        assert self._file is not None
        self._file.write(np.ascontiguousarray(array).data)
        self._header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [self._size, self._size + array.nbytes],
        }
        self._shards[-1].append(name)
        self._size += array.nbytes
        self._total += array.nbytes

    def close(self) -> None:
        """Finishes the last shard and gives the files their final names."""
        self._finish_shard()
        count = len(self._shards)
        if count == 1:
            self._temporary(0).rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._temporary(index).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        content = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))

    def _temporary(self, index: int) -> Path:
        return self._folder / f"shard-{index}.tmp"

    def _next_shard(self) -> None:
        self._finish_shard()
        self._shards.append([])
        self._file = open(self._temporary(len(self._shards) - 1), "wb")  # noqa: SIM115
        self._file.seek(_HEADER_BYTES)

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "mlx"}, **self._header}).encode()
        room = _HEADER_BYTES - 8
        assert len(header) <= room, "the header outgrew its room"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._file.close()
        self._file, self._header, self._size = None, {}, 0
