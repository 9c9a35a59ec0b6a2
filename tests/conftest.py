"""Imported before every test module: OpenBLAS must be in the process before any of them imports `mlx.core`."""

from collections.abc import Iterator

import mlx_engine  # noqa: F401

# Third-party, but after ours: the first import of `mlx.core` binds its BLAS.
import mlx.core as mx  # isort: skip
import pytest  # isort: skip


@pytest.fixture
def mlx_limit() -> Iterator[int]:
    """MLX's own limit, which it has again afterwards."""
    limit = mx.get_memory_limit()
    yield limit
    mx.set_memory_limit(limit)
