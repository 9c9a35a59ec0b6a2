"""Recorded CUDA graphs of what MLX puts on the GPU (`cuda_src/graphs.cpp`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx

from mlx_engine.native.build import build_graphs
from mlx_engine.native.library import import_extension


class Fetch(Protocol):
    """Numbers on their way from the GPU."""

    def wait(self) -> list[int]:
        """Blocks until they are here. Called from the thread that asked for them."""


class Graphs:
    """Records what MLX evaluates on the calling thread's GPU stream, and runs it again."""

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self.overlap = True  # of recordings from now on; for measurements

    def record(self, build: Callable[[], mx.array], overlap: bool | None = None) -> Any:
        """Evaluates the lazy array that build() gives, twice, and returns the recording, with a method launch().

        All memory that its kernels use is held as long as the recording lives. Inputs must be evaluated arrays that are
        held too, weights among them: our kernels may read those before what comes before has ended. Where the GPU can,
        kernels of ours start while those before them still run; its num_overlapped says how often, and `overlap` may
        say that none does (None: what the attribute says). RuntimeError where CUDA refuses.
        """
        # Once as it is, so that all kernels are compiled before any of them is recorded.
        mx.eval(build())
        return self._module.record(build, self.overlap if overlap is None else overlap)

    def write_rows(self, target: mx.array, rows: bytes, num_rows: int, num_columns: int) -> None:
        """Overwrites the first rows and columns of a 32-bit matrix on the GPU, in the order of the stream."""
        self._module.write_rows(target, rows, num_rows, num_columns)

    def fetch(self, source: mx.array, count: int) -> Fetch:
        """The first numbers of a uint32 array as they are after all that was launched before."""
        fetch: Fetch = self._module.Fetch(source, count)
        return fetch


@functools.cache
def load_graphs() -> Graphs:
    """The extension, compiled first if need be, once a process. Raises NativeUnavailable."""
    return Graphs(import_extension(build_graphs()))
