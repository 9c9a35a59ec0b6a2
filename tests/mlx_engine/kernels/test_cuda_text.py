"""The kernels' text as CUDA: NVIDIA's compiler takes it. Slow, and for machines that have the compiler, GPU or not."""

from __future__ import annotations

import shutil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.attention.kernels import PagedKernels, gemv, texts
from mlx_engine.attention.kernels.paged import ChunkPlan
from mlx_engine.attention.kernels.sampling import publish, sample_rows
from mlx_engine.attention.pool import LayerPool
from mlx_engine.input_batch import PrefillChunk
from mlx_engine.types import LayerKVSpec
from tests.mlx_engine.kernels.executors import CudaTextKernel

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]

HEADS, KV_HEADS, BLOCK_SIZE = 8, 2, 16


@pytest.fixture(autouse=True, params=["before Hopper", "Hopper"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, not run."""
    monkeypatch.setattr(texts, "kernel", CudaTextKernel)
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    monkeypatch.setattr(texts, "has_warpgroup_instructions", lambda: request.param == "Hopper")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "stored"),
    [
        (mx.bfloat16, 64, mx.bfloat16),
        (mx.bfloat16, 128, mx.bfloat16),
        (mx.float16, 64, mx.float16),
        (mx.float16, 80, mx.float16),
        (mx.bfloat16, 256, mx.bfloat16),
        (mx.float32, 64, mx.float32),
        (mx.bfloat16, 64, mx.int8),
        (mx.bfloat16, 128, mx.int8),
        (mx.float16, 80, mx.int8),
        (mx.bfloat16, 256, mx.int8),
        (mx.float32, 64, mx.int8),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"window": 8, "soft_cap": 2.0, "sinks": True}], ids=["plain", "options"])
def test_attention(dtype: mx.Dtype, head_dim: int, stored: mx.Dtype, options: dict[str, Any]) -> None:
    kernels = PagedKernels(HEADS, KV_HEADS, head_dim, head_dim, BLOCK_SIZE, dtype)
    pool = LayerPool.zeros(LayerKVSpec(KV_HEADS, head_dim, head_dim), 4, BLOCK_SIZE, dtype, stored)
    queries = mx.zeros((3, HEADS, head_dim), dtype)
    new = mx.zeros((3, KV_HEADS, head_dim), dtype)
    if options:
        options = options | {"sinks": mx.zeros((HEADS,), dtype)}
    tables, lengths = mx.zeros((3, 1), mx.int32), mx.ones((3,), mx.int32)
    for splits in (1, 2):
        kernels.decode(queries, new, new, pool, tables, lengths, scale=1.0, splits=splits, **options)
    if kernels.rotates(pool):
        angles = mx.zeros((3, head_dim // 2))
        kernels.decode(
            queries, new, new, pool, tables, lengths, scale=1.0, splits=1, rotation=(angles, angles), **options
        )
    ticket = kernels.append(new, new, pool, mx.zeros((3,), mx.int32))
    kernels.collect(pool, tables[0], kernels.length(3), ticket)
    if kernels.takes_chunks(pool):
        plan = ChunkPlan.of([PrefillChunk(0, 3, 0, np.zeros(1, np.int32))], 0, kernels.tile_shape)
        kernels.prefill(queries, pool, plan, ticket, scale=1.0, **options)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [2, 12])
def test_products_of_a_few_rows(dtype: mx.Dtype, rows: int) -> None:
    x, weight = mx.zeros((rows, 576), dtype), mx.zeros((64, 576), dtype)
    gemv.skinny_gemm(x, weight, norm=gemv.Norm(x[0], 1e-5), bias=weight[:, 0])
    gemv.skinny_gemm(x, weight, residual=x[:, :64])
    x, weight = mx.zeros((rows, 8192), dtype), mx.zeros((64, 8192), dtype)
    gemv.skinny_gemm(x, weight, norm=gemv.Norm(x[0], 1e-5), gated=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_what_is_around_it(dtype: mx.Dtype) -> None:
    x, weight = mx.zeros((2, 64), dtype), mx.zeros((64, 64), dtype)
    rotation = gemv.Rotation(mx.zeros((2, 8)), mx.zeros((2, 8)), 2)
    gemv.gemv(x, weight, norm=gemv.Norm(x[0], 1e-5), bias=x[0], rotation=rotation)
    gemv.gemv(x, weight, residual=x)
    gemv.gemv(x, weight, gated=True)
    gemv.rotate(x, rotation)
    gemv.embed(weight, mx.zeros((9,), mx.int32))
    gemv.gate(x)
    publish(sample_rows(x, mx.zeros((2, 8))), mx.zeros((8,), mx.uint32))
