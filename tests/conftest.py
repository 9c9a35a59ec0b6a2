"""Imported before every test module: OpenBLAS must be in the process before any of them imports `mlx.core`."""

import mlx_engine  # noqa: F401
