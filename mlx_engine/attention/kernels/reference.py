"""What the kernels must give: decode attention over a paged pool in float64, straight from its definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_engine.attention.kernels.paged import PagedKernels

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DecodeCase:
    """Random pools, tables and queries. Slots that no row may read hold NaN."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    block_size: int
    max_len: int
    dtype: mx.Dtype
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    splits: int = 1
    seed: int = 0

    @property
    def scale(self) -> float:
        return float(self.key_head_dim**-0.5)


@dataclass
class DecodeInputs:
    """All in float64, of values that the case's type can hold."""

    queries: Array
    new_keys: Array
    new_values: Array
    key_pool: Array
    value_pool: Array
    block_tables: Array
    seq_lens: Array
    sinks: Array | None


def make_inputs(case: DecodeCase) -> DecodeInputs:
    """The longest row first, then a padding row, then rows of any length."""
    rng = np.random.default_rng(case.seed)

    def draw(*shape: int) -> Array:
        exact = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(case.dtype)
        return np.array(exact.astype(mx.float32)).astype(np.float64)

    seq_lens = rng.integers(1, case.max_len + 1, case.num_rows)
    seq_lens[0] = case.max_len
    if case.num_rows > 2:
        seq_lens[1] = 0
    num_pages = -(-case.max_len // case.block_size)
    num_blocks = case.num_rows * num_pages + 3
    blocks = rng.permutation(np.arange(1, num_blocks))[: case.num_rows * num_pages]
    block_tables = blocks.reshape(case.num_rows, num_pages)
    readable = np.zeros((num_blocks, case.block_size), bool)
    for row, length in enumerate(seq_lens):
        for token in range(max(0, length - (case.window or length)), length - 1):
            readable[block_tables[row, token // case.block_size], token % case.block_size] = True
    pools = [
        np.where(readable[:, None, :, None], draw(num_blocks, case.num_kv_heads, case.block_size, dim), np.nan)
        for dim in (case.key_head_dim, case.value_head_dim)
    ]
    return DecodeInputs(
        queries=draw(case.num_rows, case.num_heads, case.key_head_dim),
        new_keys=draw(case.num_rows, case.num_kv_heads, case.key_head_dim),
        new_values=draw(case.num_rows, case.num_kv_heads, case.value_head_dim),
        key_pool=pools[0],
        value_pool=pools[1],
        block_tables=block_tables,
        seq_lens=seq_lens,
        sinks=draw(case.num_heads) if case.has_sinks else None,
    )


def decode(case: DecodeCase, inputs: DecodeInputs) -> Array:
    """[num_rows, num_heads, value_head_dim]; the pools are left as they are."""
    group = case.num_heads // case.num_kv_heads
    out = np.zeros((case.num_rows, case.num_heads, case.value_head_dim))
    for row, length in enumerate(inputs.seq_lens):
        if length == 0:
            continue
        pages = inputs.block_tables[row, : -(-length // case.block_size)]
        keys = np.concatenate(list(inputs.key_pool[pages]), axis=1)[:, :length]
        values = np.concatenate(list(inputs.value_pool[pages]), axis=1)[:, :length]
        keys[:, -1], values[:, -1] = inputs.new_keys[row], inputs.new_values[row]
        first = max(0, length - case.window) if case.window else 0
        for head in range(case.num_heads):
            scores = keys[head // group, first:] @ inputs.queries[row, head] * case.scale
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            if inputs.sinks is not None:
                total += np.exp(inputs.sinks[head] - top)
            out[row, head] = weights @ values[head // group, first:] / total
    return out


def run(case: DecodeCase, inputs: DecodeInputs) -> tuple[mx.array, mx.array, mx.array]:
    """The kernels' own answer, and the pools afterwards."""

    def exact(array: Array) -> mx.array:
        return mx.array(array.astype(np.float32)).astype(case.dtype)

    # As slices of fused projections, and with the heads' elements apart.
    queries = exact(inputs.queries)
    queries = mx.concatenate([queries, queries], axis=1)[:, : case.num_heads]
    new_keys = mx.contiguous(exact(inputs.new_keys).swapaxes(1, 2)).swapaxes(1, 2)
    key_pool, value_pool = exact(inputs.key_pool), exact(inputs.value_pool)
    mx.eval(queries, new_keys, key_pool, value_pool)
    kernels = PagedKernels(
        case.num_heads, case.num_kv_heads, case.key_head_dim, case.value_head_dim, case.block_size, case.dtype
    )
    out = kernels.decode(
        queries,
        new_keys,
        exact(inputs.new_values),
        key_pool,
        value_pool,
        mx.array(inputs.block_tables.astype(np.int32)),
        mx.array(inputs.seq_lens.astype(np.int32)),
        scale=case.scale,
        splits=case.splits,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if inputs.sinks is None else exact(inputs.sinks),
    )
    mx.eval(out)
    return out, key_pool, value_pool


def relative_error(got: mx.array, expected: Array) -> float:
    """Of the L2 norm; NaN where got has one."""
    difference = np.array(got.astype(mx.float32)).astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


def cases(dtype: mx.Dtype) -> list[DecodeCase]:
    """Each head size, and each option at least once, small enough for the host."""
    sizes = [DecodeCase(3, 4, 2, dim, dim, 16 if dim < 100 else 32, 75, dtype) for dim in (64, 80, 96, 128, 256)]
    return [
        *sizes,
        DecodeCase(2, 4, 1, 64, 64, 16, 300, dtype, splits=4),
        DecodeCase(4, 3, 3, 64, 64, 16, 1, dtype),
        DecodeCase(3, 12, 1, 64, 64, 16, 160, dtype, window=50, splits=2),
        DecodeCase(3, 6, 2, 64, 64, 16, 60, dtype, soft_cap=2.0, has_sinks=True),
        DecodeCase(3, 6, 2, 64, 64, 16, 200, dtype, window=128, has_sinks=True, splits=2),
        DecodeCase(2, 4, 2, 128, 64, 8, 90, dtype, soft_cap=20.0, splits=8),
        DecodeCase(1, 2, 2, 64, 128, 256, 20, dtype),
    ]
