"""Our own operations for MLX's CPU backend: C++ that is compiled once at first start and kept.

They need a C++ compiler and Python's headers. Where those are missing, everything runs on OpenBLAS, slower.
"""

from mlx_engine.native.build import NativeUnavailable, build_native
from mlx_engine.native.library import NativeLibrary, load_native

__all__ = ["NativeLibrary", "NativeUnavailable", "build_native", "load_native"]
