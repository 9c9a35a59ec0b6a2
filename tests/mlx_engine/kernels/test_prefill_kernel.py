"""Attention of prefill chunks by the warp's matrix instructions, emulated on the host, and on a GPU if any."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlx_engine.attention.kernels import PagedKernels
from mlx_engine.attention.kernels.paged import ChunkPlan
from mlx_engine.attention.pool import LayerPool
from mlx_engine.input_batch import PrefillChunk
from mlx_engine.types import LayerKVSpec, cdiv

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """Chunks as (position of the first token, tokens)."""

    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 1
    key_head_dim: int = 64
    value_head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: mx.Dtype = mx.bfloat16
    growth: float = 0.0  # by how much each token's keys are larger than those of the one before


CASES = (
    # Several steps of four warps' instructions, in the middle of which rows begin and end.
    Case(((0, 200), (64, 3), (127, 70)), num_heads=2),
    # Later tokens outweigh all before, again and again: sums are scaled down.
    Case(((40, 160),), num_heads=2, growth=0.2),
    Case(((150, 9),), num_heads=2, window=70, key_head_dim=128, value_head_dim=64),
    Case(((0, 1), (0, 40))),
    Case(((0, 33), (17, 5), (48, 16)), num_heads=6, num_kv_heads=2),
    Case(((70, 3), (0, 15)), num_heads=3, num_kv_heads=3, block_size=32),
    Case(((5, 20),), num_heads=7, dtype=mx.float16),
    Case(((0, 50), (90, 9)), window=24, num_heads=2),
    Case(((3, 30),), soft_cap=2.0, num_heads=2),
    Case(((0, 21), (40, 2)), has_sinks=True, window=16),
    Case(((9, 18),), num_heads=2, key_head_dim=128, value_head_dim=128),
    Case(((0, 18),), num_heads=2, key_head_dim=80, value_head_dim=80, dtype=mx.float16),
    Case(((30, 18),), num_heads=2, key_head_dim=96, value_head_dim=48),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_attends_to_its_sequence_up_to_itself(products: str, case: Case) -> None:
    got, expected = run(case)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < (1e-2 if case.dtype == mx.bfloat16 else 2e-3)


def run(case: Case, seed: int = 0) -> tuple[Array, Array]:
    """What the kernel gives for random chunks, and what it must give, in float64. Slots that no row sees hold NaN."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(case.dtype)

    def exact(array: mx.array) -> Array:
        return np.array(array.astype(mx.float32)).astype(np.float64)

    spec = LayerKVSpec(case.num_kv_heads, case.key_head_dim, case.value_head_dim)
    needed = [cdiv(start + n, case.block_size) for start, n in case.chunks]
    ids = (rng.permutation(sum(needed)) + 1).astype(np.int32)
    pool = LayerPool.zeros(spec, len(ids) + 2, case.block_size, case.dtype, case.dtype)
    shape = (len(ids) + 2, case.num_kv_heads, case.block_size)
    stored = [np.full((*shape, dim), np.nan) for dim in (case.key_head_dim, case.value_head_dim)]
    chunks, first_row, first_id = [], 3, 0
    for (start, n), blocks in zip(case.chunks, needed, strict=True):
        table = ids[first_id : first_id + blocks]
        chunks.append(PrefillChunk(first_row, n, start, table))
        first_seen = 0 if case.window is None else max(0, start - case.window + 1)
        for token, numbers in itertools.product(range(first_seen, start + n), stored):
            drawn = exact(draw(case.num_kv_heads, numbers.shape[-1]))
            if numbers is stored[0]:
                drawn = exact(mx.array(drawn * (1 + case.growth * token)).astype(case.dtype))
            numbers[table[token // case.block_size], :, token % case.block_size] = drawn
        first_row, first_id = first_row + n, first_id + blocks
    pool.keys, pool.values = (
        mx.array(a.reshape(-1, a.shape[-1]).astype(np.float32)).astype(case.dtype) for a in stored
    )
    num_rows = first_row - 3
    # As fused projections give them: heads side by side, with others after them.
    queries = draw(num_rows, case.num_heads + 1, case.key_head_dim)[:, : case.num_heads]
    sinks = draw(case.num_heads) if case.has_sinks else None
    kernels = PagedKernels(
        case.num_heads, case.num_kv_heads, case.key_head_dim, case.value_head_dim, case.block_size, case.dtype
    )
    scale = float(case.key_head_dim**-0.5)
    out = kernels.prefill(
        queries,
        pool,
        ChunkPlan.of(chunks, 3, kernels.tile_shape),
        mx.zeros((8,), mx.int32),
        scale=scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=sinks,
    )
    expected = np.zeros((num_rows, case.num_heads, case.value_head_dim))
    group = case.num_heads // case.num_kv_heads
    for chunk in chunks:
        for i, head in itertools.product(range(chunk.num_tokens), range(case.num_heads)):
            position = chunk.start + i
            first = 0 if case.window is None else max(0, position - case.window + 1)
            tokens = np.arange(first, position + 1)
            keys, values = (
                numbers[chunk.block_table[tokens // case.block_size], head // group, tokens % case.block_size]
                for numbers in stored
            )
            row = chunk.first_row - 3 + i
            scores = keys @ exact(queries[row, head]) * scale
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            sink = -np.inf if sinks is None else exact(sinks)[head]
            highest = max(scores.max(), sink)
            weights = np.exp(scores - highest)
            expected[row, head] = weights @ values / (weights.sum() + np.exp(sink - highest))
    return exact(out), expected
