"""Loads the native library into the process, once, and says what became of it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlx_engine.native.build import NativeUnavailable, Starting, build_native

logger = logging.getLogger(__name__)

_MAX_THREADS = 256


# What became of the first attempt.
_loaded: list[NativeLibrary | NativeUnavailable] = []


class NativeLibrary:
    """The compiled operations. All of them run on MLX's CPU stream, lazily like MLX's own."""

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self.panel_width = int(self._module.PANEL_WIDTH)  # columns of a weight that are packed together
        self.vector_width = int(self._module.VECTOR_WIDTH)  # floats in a register of the form that was compiled

    def pack_weight(self, weight: mx.array) -> mx.array:
        """The panels of a float32 weight [n, k], as an opaque array for `packed_linear`; ValueError for another."""
        packed: mx.array = self._module.pack_weight(weight)
        return packed

    def packed_linear(
        self, x: mx.array, packed: mx.array, *, n: int, first: int = 0, bias: mx.array | None = None
    ) -> mx.array:
        """Columns first to first + n of x [..., k] times the transpose of the packed weight, plus bias: [..., n].

        `first` is a multiple of panel_width, and `bias` is that of all columns. Computes in float32. Raises ValueError
        where the sizes don't fit the packed weight.
        """
        out: mx.array = self._module.packed_linear(x, packed, n=n, first=first, bias=bias)
        return out

    @property
    def num_threads(self) -> int:
        """Threads that share out a product."""
        return int(self._module.num_threads())

    @num_threads.setter
    def num_threads(self, value: int) -> None:
        self._module.set_num_threads(value)


def load_native(starting: Starting | None = None) -> NativeLibrary:
    """The native library, compiled first if need be, once a process; starting() is called before that.

    Raises NativeUnavailable, without trying again.
    """
    result = _load(starting)
    if isinstance(result, NativeUnavailable):
        raise result
    return result


def _load(starting: Starting | None) -> NativeLibrary | NativeUnavailable:
    if not _loaded:
        try:
            library = open_library(build_native(starting=starting))
            library.num_threads = wanted_threads()
            _loaded.append(library)
        except NativeUnavailable as error:
            _loaded.append(error)
    return _loaded[0]


def open_library(path: Path) -> NativeLibrary:
    """Imports the library in this file and tries it out. Raises NativeUnavailable."""
    try:
        library = NativeLibrary(import_extension(path))
        # Another nanobind than mlx's own would not know an mx.array.
        product = library.packed_linear(mx.ones((1, 2)), library.pack_weight(mx.ones((3, 2))), n=3)
        works = bool(mx.array_equal(product, mx.full((1, 3), 2.0)).item())
    except (AttributeError, TypeError, RuntimeError) as error:
        raise NativeUnavailable(f"{path} can't be used: {error}") from error
    if not works:
        raise NativeUnavailable(f"{path} gives wrong results")
    return library


def import_extension(path: Path) -> ModuleType:
    """Imports the extension module in this file, which is named after it. Raises NativeUnavailable."""
    loader = importlib.machinery.ExtensionFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NativeUnavailable(f"{path} can't be used: {error}") from error
    return module


def wanted_threads() -> int:
    """As OpenBLAS counts them: OPENBLAS_NUM_THREADS, OMP_NUM_THREADS, or the cores that this process may use."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit() and int(value) > 0:
            return min(int(value), _MAX_THREADS)
    return len(os.sched_getaffinity(0))
