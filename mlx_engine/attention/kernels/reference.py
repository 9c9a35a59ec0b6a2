"""What the kernels must give: decode attention over a paged pool in float64, straight from its definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_engine.attention.kernels.paged import PagedKernels
from mlx_engine.attention.pool import LayerPool

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DecodeCase:
    """Random pools, tables and queries. Slots that no row may read hold NaN, or of 8-bit integers have scale NaN."""

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
    quantized: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return float(self.key_head_dim**-0.5)


@dataclass
class DecodeInputs:
    """All in float64, of values that the case's type can hold; pools of values that they can hold."""

    queries: Array
    new_keys: Array
    new_values: Array
    key_pool: Array
    value_pool: Array
    key_scales: Array | None  # of quantized pools, whose values are the integers then
    value_scales: Array | None
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
    pools: list[Array] = []
    scales: list[Array | None] = []
    for dim in (case.key_head_dim, case.value_head_dim):
        numbers = draw(num_blocks, case.num_kv_heads, case.block_size, dim)
        if case.quantized:
            integers, worth = quantize(numbers)
            pools.append(np.where(readable[:, None, :, None], integers, 99))
            scales.append(np.where(readable[:, None], worth, np.nan))
        else:
            pools.append(np.where(readable[:, None, :, None], numbers, np.nan))
            scales.append(None)
    return DecodeInputs(
        queries=draw(case.num_rows, case.num_heads, case.key_head_dim),
        new_keys=draw(case.num_rows, case.num_kv_heads, case.key_head_dim),
        new_values=draw(case.num_rows, case.num_kv_heads, case.value_head_dim),
        key_pool=pools[0],
        value_pool=pools[1],
        key_scales=scales[0],
        value_scales=scales[1],
        block_tables=block_tables,
        seq_lens=seq_lens,
        sinks=draw(case.num_heads) if case.has_sinks else None,
    )


def quantize(numbers: Array) -> tuple[Array, Array]:
    """Integers -127 to 127 for numbers [..., n], and what 1 is worth [...]; exactly what a pool must hold."""
    exact = numbers.astype(np.float32)
    top = np.abs(exact).max(axis=-1)
    integers = np.rint(exact * (np.float32(127) / top)[..., None])
    return integers.astype(np.float64), (top / np.float32(127)).astype(np.float64)


def stored(inputs: DecodeInputs) -> tuple[list[Array], list[Array]]:
    """The pools as they must be after the new tokens were put into them: numbers, and scales if there are any."""
    block_size = inputs.key_pool.shape[2]
    pools, scales = [], []
    for pool, scale, new in (
        (inputs.key_pool.copy(), inputs.key_scales, inputs.new_keys),
        (inputs.value_pool.copy(), inputs.value_scales, inputs.new_values),
    ):
        worth = None if scale is None else scale.copy()
        for row, length in enumerate(inputs.seq_lens):
            if length:
                block, offset = inputs.block_tables[row, (length - 1) // block_size], (length - 1) % block_size
                if worth is None:
                    pool[block, :, offset] = new[row]
                else:
                    pool[block, :, offset], worth[block, :, offset] = quantize(new[row])
        pools.append(pool)
        if worth is not None:
            scales.append(worth)
    return pools, scales


def decode(case: DecodeCase, inputs: DecodeInputs) -> Array:
    """[num_rows, num_heads, value_head_dim]; the pools are left as they are."""
    group = case.num_heads // case.num_kv_heads
    out = np.zeros((case.num_rows, case.num_heads, case.value_head_dim))
    pools, scales = stored(inputs)
    key_pool, value_pool = (
        [pool * scale[..., None] for pool, scale in zip(pools, scales, strict=True)] if scales else pools
    )
    for row, length in enumerate(inputs.seq_lens):
        if length == 0:
            continue
        pages = inputs.block_tables[row, : -(-length // case.block_size)]
        keys = np.concatenate(list(key_pool[pages]), axis=1)[:, :length]
        values = np.concatenate(list(value_pool[pages]), axis=1)[:, :length]
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


def make_pool(case: DecodeCase, inputs: DecodeInputs) -> LayerPool:
    """The pool that the kernels read and write."""
    num_blocks, num_kv_heads, block_size, _ = inputs.key_pool.shape
    arrays = [
        mx.array(pool.reshape(-1, pool.shape[-1]).astype(np.float32)).astype(mx.int8 if case.quantized else case.dtype)
        for pool in (inputs.key_pool, inputs.value_pool)
    ]
    scales = [
        mx.zeros((8,)) if scale is None else mx.array(scale.reshape(-1).astype(np.float32))
        for scale in (inputs.key_scales, inputs.value_scales)
    ]
    mx.eval(arrays, scales)
    return LayerPool((num_blocks, num_kv_heads, block_size), case.dtype, *arrays, *scales)


def run(case: DecodeCase, inputs: DecodeInputs) -> tuple[mx.array, LayerPool]:
    """The kernels' own answer, and the pool afterwards."""

    def exact(array: Array) -> mx.array:
        return mx.array(array.astype(np.float32)).astype(case.dtype)

    # As slices of fused projections, and with the heads' elements apart.
    queries = exact(inputs.queries)
    queries = mx.concatenate([queries, queries], axis=1)[:, : case.num_heads]
    new_keys = mx.contiguous(exact(inputs.new_keys).swapaxes(1, 2)).swapaxes(1, 2)
    pool = make_pool(case, inputs)
    mx.eval(queries, new_keys)
    kernels = PagedKernels(
        case.num_heads, case.num_kv_heads, case.key_head_dim, case.value_head_dim, case.block_size, case.dtype
    )
    out = kernels.decode(
        queries,
        new_keys,
        exact(inputs.new_values),
        pool,
        mx.array(inputs.block_tables.astype(np.int32)),
        mx.array(inputs.seq_lens.astype(np.int32)),
        scale=case.scale,
        splits=case.splits,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if inputs.sinks is None else exact(inputs.sinks),
    )
    mx.eval(out)
    return out, pool


def relative_error(got: mx.array, expected: Array) -> float:
    """Of the L2 norm; NaN where got has one."""
    difference = np.array(got.astype(mx.float32)).astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


def cases(dtype: mx.Dtype) -> list[DecodeCase]:
    """Each head size, and each option at least once, small enough for the host."""
    sizes = [DecodeCase(3, 4, 2, dim, dim, 16 if dim < 100 else 32, 75, dtype) for dim in (64, 80, 96, 128, 256)]
    quantized = [
        replace(sizes[0], splits=2),
        replace(sizes[1], has_sinks=True),
        replace(sizes[2], window=20),
        replace(sizes[3], soft_cap=2.0),
        sizes[4],
        DecodeCase(3, 12, 1, 64, 64, 16, 160, dtype, window=50, splits=2),
        DecodeCase(2, 4, 2, 128, 64, 8, 90, dtype, soft_cap=20.0, has_sinks=True, splits=8),
        DecodeCase(4, 3, 3, 64, 64, 16, 1, dtype),
    ]
    return [
        *sizes,
        *(replace(case, quantized=True) for case in quantized),
        DecodeCase(2, 4, 1, 64, 64, 16, 300, dtype, splits=4),
        DecodeCase(4, 3, 3, 64, 64, 16, 1, dtype),
        DecodeCase(3, 12, 1, 64, 64, 16, 160, dtype, window=50, splits=2),
        DecodeCase(3, 6, 2, 64, 64, 16, 60, dtype, soft_cap=2.0, has_sinks=True),
        DecodeCase(3, 6, 2, 64, 64, 16, 200, dtype, window=128, has_sinks=True, splits=2),
        DecodeCase(2, 4, 2, 128, 64, 8, 90, dtype, soft_cap=20.0, splits=8),
        DecodeCase(1, 2, 2, 64, 128, 256, 20, dtype),
    ]
