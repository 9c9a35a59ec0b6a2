"""What the kernels must give: attention over a paged pool in float64, straight from its definition."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_engine.attention.kernels.paged import ChunkPlan, PagedKernels
from mlx_engine.attention.pool import LayerPool
from mlx_engine.input_batch import PrefillChunk
from mlx_engine.types import LayerKVSpec, cdiv

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
    min_span: int = 1
    busy_splits: int | None = None
    rotated: bool = False  # by the kernel
    quantized: bool = False
    key_size: float = 1.0  # what keys are multiplied by, and queries divided
    value_size: float = 1.0
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
    # Of queries and new keys that are rotated: what they were before, and cosines and sines [num_rows, head_dim / 2].
    before: tuple[Array, Array, Array, Array] | None = None


def make_inputs(case: DecodeCase) -> DecodeInputs:
    """The longest row first, then a padding row, then rows of any length."""
    rng = np.random.default_rng(case.seed)

    def draw(*shape: int, size: float = 1.0) -> Array:
        return _exact(_array(rng.standard_normal(shape) * size, case.dtype))

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
    for dim, size in ((case.key_head_dim, case.key_size), (case.value_head_dim, case.value_size)):
        numbers = draw(num_blocks, case.num_kv_heads, case.block_size, dim, size=size)
        if case.quantized:
            integers, worth = quantize(numbers)
            pools.append(np.where(readable[:, None, :, None], integers, 99))
            scales.append(np.where(readable[:, None], worth, np.nan))
        else:
            pools.append(np.where(readable[:, None, :, None], numbers, np.nan))
            scales.append(None)
    inputs = DecodeInputs(
        queries=draw(case.num_rows, case.num_heads, case.key_head_dim, size=1 / case.key_size),
        new_keys=draw(case.num_rows, case.num_kv_heads, case.key_head_dim, size=case.key_size),
        new_values=draw(case.num_rows, case.num_kv_heads, case.value_head_dim, size=case.value_size),
        key_pool=pools[0],
        value_pool=pools[1],
        key_scales=scales[0],
        value_scales=scales[1],
        block_tables=block_tables,
        seq_lens=seq_lens,
        sinks=draw(case.num_heads) if case.has_sinks else None,
    )
    if case.rotated:
        angles = rng.uniform(0, 3000, (case.num_rows, case.key_head_dim // 2))
        cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        inputs.before = inputs.queries, inputs.new_keys, cosines, sines
        inputs.queries, inputs.new_keys = (
            _exact(_array(rotated(numbers, cosines, sines), case.dtype)) for numbers in inputs.before[:2]
        )
    return inputs


def rotated(numbers: Array, cosines: Array, sines: Array) -> Array:
    """Heads [rows, heads, head_dim], the first half of each turned with the second by its row's angles."""
    one, two = np.split(numbers, 2, axis=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return np.concatenate([one * cosines - two * sines, one * sines + two * cosines], axis=-1)


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
            seen = keys[head // group, first:], values[head // group, first:]
            sink = None if inputs.sinks is None else inputs.sinks[head]
            out[row, head] = _attention(inputs.queries[row, head], *seen, case.scale, case.soft_cap, sink)
    return out


def _attention(
    query: Array, keys: Array, values: Array, scale: float, soft_cap: float | None, sink: float | None
) -> Array:
    """Of one query [d] over keys [n, d] and values [n, v]: [v]."""
    scores = keys @ query * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    top = scores.max()
    weights = np.exp(scores - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
    weighted: Array = weights @ values / total
    return weighted


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


def _array(numbers: Array, dtype: mx.Dtype) -> mx.array:
    return mx.array(numbers.astype(np.float32)).astype(dtype)


def _exact(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def run(case: DecodeCase, inputs: DecodeInputs) -> tuple[mx.array, LayerPool]:
    """The kernels' own answer, and the pool afterwards."""
    # As slices of fused projections, and with the heads' elements apart.
    given_queries, given_keys, *angles = inputs.before or (inputs.queries, inputs.new_keys)
    queries = _array(given_queries, case.dtype)
    queries = mx.concatenate([queries, queries], axis=1)[:, : case.num_heads]
    new_keys = mx.contiguous(_array(given_keys, case.dtype).swapaxes(1, 2)).swapaxes(1, 2)
    pool = make_pool(case, inputs)
    mx.eval(queries, new_keys)
    kernels = PagedKernels(
        case.num_heads, case.num_kv_heads, case.key_head_dim, case.value_head_dim, case.block_size, case.dtype
    )
    out = kernels.decode(
        queries,
        new_keys,
        _array(inputs.new_values, case.dtype),
        pool,
        mx.array(inputs.block_tables.astype(np.int32)),
        mx.array(inputs.seq_lens.astype(np.int32)),
        scale=case.scale,
        splits=case.splits,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if inputs.sinks is None else _array(inputs.sinks, case.dtype),
        min_span=case.min_span,
        busy_splits=case.busy_splits,
        rotation=(mx.array(angles[0]), mx.array(angles[1])) if angles else None,
    )
    mx.eval(out)
    return out, pool


def relative_error(got: mx.array, expected: Array) -> float:
    """Of the L2 norm; NaN where got has one."""
    difference = _exact(got) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def decode_error(case: DecodeCase) -> float:
    """Of the decode kernels."""
    inputs = make_inputs(case)
    return relative_error(run(case, inputs)[0], decode(case, inputs))


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
        DecodeCase(3, 16, 1, 112, 112, 16, 90, dtype, has_sinks=True),
        DecodeCase(2, 8, 1, 64, 64, 32, 200, dtype, splits=2, value_size=1e-3, key_size=100.0),
    ]
    return [
        *sizes,
        *(replace(case, quantized=True) for case in quantized),
        DecodeCase(2, 4, 1, 64, 64, 16, 300, dtype, splits=4),
        DecodeCase(2, 4, 1, 64, 64, 16, 300, dtype, splits=4, busy_splits=2),
        DecodeCase(4, 3, 3, 64, 64, 16, 1, dtype),
        DecodeCase(3, 12, 1, 64, 64, 16, 160, dtype, window=50, splits=2),
        DecodeCase(3, 6, 2, 64, 64, 16, 60, dtype, soft_cap=2.0, has_sinks=True),
        DecodeCase(3, 6, 2, 64, 64, 16, 200, dtype, window=128, has_sinks=True, splits=2),
        DecodeCase(2, 4, 2, 128, 64, 8, 90, dtype, soft_cap=20.0, splits=8),
        DecodeCase(1, 2, 2, 64, 128, 256, 20, dtype),
    ]


def long_cases(dtype: mx.Dtype) -> list[DecodeCase]:
    """Contexts of up to 32,768 tokens in many parts: for GPUs."""
    heads = [DecodeCase(3, 4, 1, dim, dim, 16 if dim < 100 else 32, 32768, dtype) for dim in (64, 80, 96, 128, 256)]
    return [
        *(replace(case, splits=32) for case in heads),
        *(replace(case, splits=32, quantized=True) for case in heads),
        replace(heads[0], splits=8, window=5000),
        replace(heads[0], splits=16, busy_splits=2, min_span=256),
        heads[0],
    ]


@dataclass(frozen=True)
class ChunkCase:
    """Chunks as (position of the first token, tokens). Slots that no row sees hold NaN."""

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

    @property
    def scale(self) -> float:
        return float(self.key_head_dim**-0.5)

    def first_seen(self, position: int) -> int:
        """The first token that one at this position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


CHUNK_CASES = (
    # Several steps of four warps' instructions, in the middle of which rows begin and end.
    ChunkCase(((0, 200), (64, 3), (127, 70)), num_heads=2),
    # Later tokens outweigh all before, again and again: sums are scaled down.
    ChunkCase(((40, 160),), num_heads=2, growth=0.2),
    ChunkCase(((150, 9),), num_heads=2, window=70, key_head_dim=128, value_head_dim=64),
    ChunkCase(((0, 1), (0, 40))),
    ChunkCase(((0, 33), (17, 5), (48, 16)), num_heads=6, num_kv_heads=2),
    ChunkCase(((70, 3), (0, 15)), num_heads=3, num_kv_heads=3, block_size=32),
    ChunkCase(((5, 20),), num_heads=7, dtype=mx.float16),
    ChunkCase(((0, 50), (90, 9)), window=24, num_heads=2),
    ChunkCase(((3, 30),), soft_cap=2.0, num_heads=2),
    ChunkCase(((0, 21), (40, 2)), has_sinks=True, window=16),
    ChunkCase(((9, 18),), num_heads=2, key_head_dim=128, value_head_dim=128),
    ChunkCase(((250, 18),), num_heads=2, key_head_dim=128, value_head_dim=128, dtype=mx.float16, growth=0.2),
    ChunkCase(((130, 9),), num_heads=2, key_head_dim=64, value_head_dim=128, has_sinks=True),
    ChunkCase(((0, 18),), num_heads=2, key_head_dim=80, value_head_dim=80, dtype=mx.float16),
    ChunkCase(((30, 18),), num_heads=2, key_head_dim=96, value_head_dim=48),
)


def chunks_error(case: ChunkCase) -> float:
    """Of the prefill kernel."""
    return relative_error(*run_chunks(case))


def run_chunks(case: ChunkCase, seed: int = 0) -> tuple[mx.array, Array]:
    """What the prefill kernel gives for random chunks, and what it must give, in float64."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> mx.array:
        return _array(rng.standard_normal(shape), case.dtype)

    needed = [cdiv(start + n, case.block_size) for start, n in case.chunks]
    ids = (rng.permutation(sum(needed)) + 1).astype(np.int32)
    shape = (len(ids) + 2, case.num_kv_heads, case.block_size)
    keys, values = (np.full((*shape, dim), np.nan) for dim in (case.key_head_dim, case.value_head_dim))
    chunks, first_row, first_id = [], 3, 0
    for (start, n), blocks in zip(case.chunks, needed, strict=True):
        table = ids[first_id : first_id + blocks]
        chunks.append(PrefillChunk(first_row, n, start, table))
        tokens = np.arange(case.first_seen(start), start + n)
        block, offset = table[tokens // case.block_size], tokens % case.block_size
        drawn = rng.standard_normal((len(tokens), case.num_kv_heads, case.key_head_dim))
        drawn *= 1 + case.growth * tokens[:, None, None]
        keys[block, :, offset] = _exact(_array(drawn, case.dtype))
        values[block, :, offset] = _exact(draw(len(tokens), case.num_kv_heads, case.value_head_dim))
        first_row, first_id = first_row + n, first_id + blocks
    spec = LayerKVSpec(case.num_kv_heads, case.key_head_dim, case.value_head_dim)
    pool = LayerPool.zeros(spec, shape[0], case.block_size, case.dtype, case.dtype)
    pool.keys, pool.values = (_array(a.reshape(-1, a.shape[-1]), case.dtype) for a in (keys, values))
    # As fused projections give them: heads side by side, with others after them.
    queries = draw(first_row - 3, case.num_heads + 1, case.key_head_dim)[:, : case.num_heads]
    sinks = draw(case.num_heads) if case.has_sinks else None
    kernels = PagedKernels(
        case.num_heads, case.num_kv_heads, case.key_head_dim, case.value_head_dim, case.block_size, case.dtype
    )
    out = kernels.prefill(
        queries,
        pool,
        ChunkPlan.of(chunks, 3, kernels.tile_shape),
        mx.zeros((8,), mx.int32),
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=sinks,
    )
    expected = np.zeros(out.shape)
    group = case.num_heads // case.num_kv_heads
    exact_queries, exact_sinks = _exact(queries), None if sinks is None else _exact(sinks)
    for chunk in chunks:
        for i, head in itertools.product(range(chunk.num_tokens), range(case.num_heads)):
            tokens = np.arange(case.first_seen(chunk.start + i), chunk.start + i + 1)
            place = chunk.block_table[tokens // case.block_size], head // group, tokens % case.block_size
            row = chunk.first_row - 3 + i
            sink = None if exact_sinks is None else exact_sinks[head]
            expected[row, head] = _attention(
                exact_queries[row, head], keys[place], values[place], case.scale, case.soft_cap, sink
            )
    return out, expected
