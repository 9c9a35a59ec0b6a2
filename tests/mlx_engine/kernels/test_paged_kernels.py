"""The kernels' text, run on the host in its own dialect and as the text that Metal would get, and on a GPU if any."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.attention.kernels import PagedKernels, paged, reference, texts
from mlx_engine.attention.kernels.paged import busy_splits, heads_per_group, num_splits
from mlx_engine.attention.kernels.reference import DecodeCase
from mlx_engine.attention.pool import LayerPool
from mlx_engine.types import LayerKVSpec
from tests.mlx_engine.kernels.executors import HostKernel, KernelFault

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Types of 16 bits differ from the others, and from each other, in how they are loaded and stored only.
_CASES = [*reference.cases(mx.float32), *reference.cases(mx.bfloat16)[::2], *reference.cases(mx.float16)[1::5]]
# Groups of 1, 4, 8, 12 (two of them in one of 24) and 16 heads.
_MATRIX_CASES = [
    DecodeCase(3, 4, 1, 64, 64, 16, 100, mx.bfloat16),
    DecodeCase(3, 3, 3, 64, 64, 16, 90, mx.float16, window=20),
    DecodeCase(3, 8, 1, 64, 64, 16, 70, mx.bfloat16, soft_cap=3.0, has_sinks=True),
    DecodeCase(3, 24, 1, 80, 80, 16, 70, mx.bfloat16, has_sinks=True),
    # The sums of 8 warps don't fit in shared memory at once.
    DecodeCase(2, 16, 1, 128, 128, 32, 150, mx.bfloat16),
    DecodeCase(3, 4, 2, 96, 64, 48, 300, mx.float16, splits=4),
    DecodeCase(3, 8, 2, 64, 64, 16, 400, mx.bfloat16, splits=4, window=70, has_sinks=True),
    # Several parts have no tokens, and more than 128 threadgroups have 4 warps each.
    DecodeCase(70, 4, 2, 64, 64, 16, 3, mx.bfloat16, splits=2),
    DecodeCase(70, 24, 2, 48, 64, 16, 20, mx.bfloat16),
    DecodeCase(3, 4, 1, 64, 64, 16, 100, mx.bfloat16, rotated=True),
    DecodeCase(4, 6, 2, 128, 128, 32, 90, mx.float16, rotated=True, splits=2),
    DecodeCase(3, 16, 1, 80, 64, 16, 50, mx.bfloat16, rotated=True, has_sinks=True),
]
_QUANTIZED_MATRIX_CASES = [
    *(replace(case, quantized=True, seed=seed) for seed, case in enumerate(_MATRIX_CASES)),
    DecodeCase(3, 3, 1, 112, 112, 16, 130, mx.float16, quantized=True, window=40),
    DecodeCase(3, 8, 2, 16, 32, 16, 200, mx.bfloat16, quantized=True, splits=2, min_span=64),
    DecodeCase(2, 16, 2, 64, 128, 16, 140, mx.float16, quantized=True, soft_cap=20.0),
    # Parts and windows that begin and end within 32 tokens, of which a warp reads so many at once.
    *(DecodeCase(5, 4, 1, 64, 64, 16, 333, mx.float16, window=117, quantized=True, splits=4, seed=s) for s in range(3)),
    DecodeCase(3, 4, 1, 64, 64, 16, 100, mx.bfloat16, quantized=True, rotated=True),
    DecodeCase(3, 24, 2, 96, 64, 16, 80, mx.float16, quantized=True, rotated=True, splits=2),
    # As large and as small as the types go.
    DecodeCase(3, 4, 1, 64, 64, 16, 90, mx.float16, quantized=True, value_size=1e4, key_size=1e3),
    DecodeCase(3, 4, 1, 64, 64, 16, 90, mx.float16, quantized=True, value_size=1e-3, key_size=1e-3),
    DecodeCase(3, 4, 1, 64, 64, 16, 90, mx.bfloat16, quantized=True, value_size=1e37, key_size=1e30),
    DecodeCase(3, 4, 1, 64, 64, 16, 90, mx.bfloat16, quantized=True, value_size=1e-28, key_size=1e-28),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_decode_is_attention_over_the_rows_own_tokens(dialect: str, case: DecodeCase) -> None:
    _check_decode(case)


@pytest.mark.parametrize("case", [*_MATRIX_CASES, *_QUANTIZED_MATRIX_CASES], ids=str)
def test_decode_by_matrix_instructions_gives_the_same(
    matrix_dialect: str, monkeypatch: pytest.MonkeyPatch, case: DecodeCase
) -> None:
    used: list[str] = []
    make = texts.kernel
    monkeypatch.setattr(texts, "kernel", lambda name: (used.append(name), make(name))[1])
    _check_decode(case)
    name = "decode_matrix_int8" if case.quantized else "decode_matrix"
    assert used == ([name] if case.splits == 1 else [f"{name}_split", "combine"])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_small_values_of_great_weight_count_beside_large_ones_of_small_weight(
    matrix_dialect: str, dtype: mx.Dtype
) -> None:
    """The first token has nearly all of the weight, and the others have values that are a million times as large."""
    case = DecodeCase(1, 2, 2, 64, 64, 16, 60, dtype, quantized=True, value_size=1e4)
    inputs = reference.make_inputs(case)
    assert inputs.key_scales is not None
    assert inputs.value_scales is not None
    first = inputs.block_tables[0, 0], slice(None), 0
    inputs.key_scales *= 1e-3
    query = inputs.queries[0]
    key = query / (query**2).sum(axis=-1, keepdims=True) * 24 * np.log(2) / case.scale
    inputs.key_pool[first], inputs.key_scales[first] = reference.quantize(key)
    inputs.new_keys *= 2.0**-10
    inputs.value_scales[first] *= 2.0**-20
    out, _ = reference.run(case, inputs)
    expected = reference.decode(case, inputs)
    inputs.value_scales[first] = 0
    others = reference.decode(case, inputs)
    assert 0.1 < np.linalg.norm(others) / np.linalg.norm(expected) < 0.9, "both must matter"
    assert reference.relative_error(out, expected) < reference.TOLERANCE[dtype]


@pytest.mark.parametrize("growth", [2.0**0.02, 2.0**-0.02], ids=["growing", "shrinking"])
@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_scales_may_grow_and_shrink_along_a_row(matrix_dialect: str, dim: int, heads: int, growth: float) -> None:
    """Several steps of each warp, whose values have another unit, and scores another top, than those before."""
    case = DecodeCase(1, heads, 1, dim, dim, 48, 750, mx.float16, quantized=True)
    inputs = reference.make_inputs(case)
    for scales in (inputs.key_scales, inputs.value_scales):
        assert scales is not None
        tokens = np.arange(scales.shape[2] * inputs.block_tables.shape[1]).reshape(-1, 1, scales.shape[2])
        scales[inputs.block_tables[0]] *= 0.1 * growth ** (tokens if growth < 1 else tokens - case.max_len // 2)
    out, _ = reference.run(case, inputs)
    assert reference.relative_error(out, reference.decode(case, inputs)) < reference.TOLERANCE[case.dtype]


def _check_decode(case: DecodeCase) -> None:
    inputs = reference.make_inputs(case)
    out, pool = reference.run(case, inputs)
    assert reference.relative_error(out, reference.decode(case, inputs)) < reference.TOLERANCE[case.dtype]
    # Exactly the new tokens have been added to the pool.
    for array, expected in zip(pool.arrays(), itertools.chain(*reference.stored(inputs)), strict=True):
        got = np.array(array.astype(mx.float32)).reshape(expected.shape)
        if case.rotated:
            # A number's last bit depends on how its two products were added.
            np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=1 if array.dtype == mx.int8 else 0)
        else:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "decode_matrix"),
        ({"dtype": mx.float16}, "decode_matrix"),
        ({"dtype": mx.float32}, "decode"),
        ({"quantized": True}, "decode_matrix_int8"),
        ({"quantized": True, "dtype": mx.float16}, "decode_matrix_int8"),
        ({"quantized": True, "dtype": mx.float32}, "decode"),
        ({"quantized": True, "key_head_dim": 144}, "decode"),
        ({"quantized": True, "block_size": 24}, "decode"),
        ({"key_head_dim": 136}, "decode"),
        ({"value_head_dim": 256}, "decode"),
        ({"block_size": 24}, "decode"),
    ],
    ids=str,
)
def test_which_layers_are_for_matrix_instructions(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], name: str
) -> None:
    case = replace(DecodeCase(1, 2, 1, 64, 64, 16, 9, mx.bfloat16), **change)
    inputs = reference.make_inputs(case)
    used: list[str] = []
    monkeypatch.setattr(texts, "kernel", lambda kernel: (used.append(kernel), HostKernel(kernel))[1])
    for there in (False, True):
        monkeypatch.setattr(texts, "has_matrix_instructions", lambda there=there: there)
        reference.run(case, inputs)
    assert used == ["decode", name]
    kernels = PagedKernels(2, 1, case.key_head_dim, case.value_head_dim, case.block_size, case.dtype)
    # Prefill has no kernel for 8 bits.
    assert kernels.takes_chunks(reference.make_pool(case, inputs)) == (name == "decode_matrix")


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "layout", "splits"),
    [
        (1, 32, 8, (4, 8), 16),  # 8 threadgroups of all 256 that are wanted, but that are parts enough
        (16, 32, 8, (4, 8), 4),  # no part has twice 8,192 tokens
        (17, 32, 8, (4, 4), 8),  # or, with as many warps, 4,096
        (128, 32, 8, (4, 4), 4),  # but 4,096 threadgroups are enough
        (1000, 32, 8, (4, 4), 1),
        (1, 9, 3, (3, 8), 16),
        (2, 48, 2, (12, 8), 16),  # a group of 24 is two of 12
        (1, 17, 1, (1, 8), 8),
    ],
)
def test_the_layout_for_matrix_instructions(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, kv_heads: int, layout: tuple[int, int], splits: int
) -> None:
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    pool = LayerPool.zeros(LayerKVSpec(kv_heads, 64, 64), 2, 16, mx.bfloat16, mx.bfloat16)
    kernels = PagedKernels(heads, kv_heads, 64, 64, 16, mx.bfloat16)
    assert kernels.decode_layout(rows, pool, splits=splits > 1) == layout
    assert kernels.num_splits(rows, pool, 32_768) == splits
    assert kernels.num_splits(rows, pool, 1024) == 1


def test_parts_beyond_those_that_keep_a_gpu_busy_are_for_long_rows(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of one call: parts that have no tokens give no weight."""
    monkeypatch.setattr(paged, "_LONG_FOR_WARP", 10)
    weights: list[mx.array] = []

    class Watched(HostKernel):
        def __call__(self, **call: Any) -> list[mx.array]:
            outputs = super().__call__(**call)
            if len(outputs) == 2:
                weights.append(outputs[1][:, 0, :, 1])
            return outputs

    monkeypatch.setattr(texts, "kernel", Watched)
    kernels = PagedKernels(2, 1, 64, 64, 16, mx.float32)
    pool = LayerPool.zeros(LayerKVSpec(1, 64, 64), 21, 16, mx.float32, mx.float32)
    lens, tables = mx.array([9, 60, 95, 100, 320]), mx.arange(100).reshape(5, 20) % 20 + 1
    new = mx.zeros((5, 1, 64))
    mx.eval(
        kernels.decode(
            mx.zeros((5, 2, 64)), new, new, pool, tables.astype(mx.int32), lens.astype(mx.int32),
            scale=1.0, splits=8, min_span=10, busy_splits=2,
        )
    )  # fmt: skip
    # Two parts, of at least 10 tokens; three where two would be longer than 40 and hardly less than 60; then all eight.
    assert (weights[0] > 0).sum(axis=1).tolist() == [1, 2, 2, 3, 8]


@pytest.mark.parametrize(
    ("rows", "dim", "splits"),
    [
        (1, 64, 16), (1, 128, 16), (8, 64, 4), (8, 128, 2), (16, 64, 2), (16, 128, 1),
        (32, 64, 2), (32, 128, 1), (64, 64, 1), (64, 128, 1),
    ],
)  # fmt: skip
def test_larger_heads_are_split_less(monkeypatch: pytest.MonkeyPatch, rows: int, dim: int, splits: int) -> None:
    """Of 4,096 tokens: what was fastest, or near it, on an H200. In 8 bits no head is larger than 64 are in 16."""
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    kernels = PagedKernels(32, 8, dim, dim, 16, mx.bfloat16)
    pool, small, pool_int8 = (
        LayerPool.zeros(LayerKVSpec(8, head_dim, head_dim), 2, 16, mx.bfloat16, stored)
        for head_dim, stored in ((dim, mx.bfloat16), (64, mx.bfloat16), (dim, mx.int8))
    )
    assert kernels.num_splits(rows, pool, 4096) == splits
    like = PagedKernels(32, 8, 64, 64, 16, mx.bfloat16).num_splits(rows, small, 4096)
    assert kernels.num_splits(rows, pool_int8, 4096) == like


def test_parts_share_what_they_read_among_heads() -> None:
    pool = LayerPool.zeros(LayerKVSpec(8, 64, 64), 2, 16, mx.bfloat16, mx.int8)
    kernels = PagedKernels(32, 8, 64, 64, 16, mx.bfloat16)
    assert kernels.num_splits(1, pool, 1024) == 1
    assert kernels.decode_layout(1, pool, splits=False) == (1, 8)
    assert kernels.num_splits(1, pool, 32_768) == 128
    assert kernels.decode_layout(1, pool, splits=True) == (4, 4)


@pytest.mark.parametrize("placed", ["whole", "in wider rows", "at odd places", "transposed"])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_append_writes_its_slots_and_no_other(dialect: str, dtype: mx.Dtype, placed: str) -> None:
    kernels = PagedKernels(4, 2, 64, 80, 16, dtype)
    rng = np.random.default_rng(1)
    new = [rng.integers(-9, 9, (21, 2, dim)).astype(np.float32) for dim in (64, 80)]
    pool = _pool(4, dtype, dtype, fill=5)
    slots = rng.permutation(64)[:21]
    given = [_placed(mx.array(a).astype(dtype), placed) for a in new]
    mx.eval(kernels.append(*given, pool, mx.array(slots.astype(np.int32))))
    for got, values in zip(pool.arrays(), new, strict=True):
        expected = np.full((4, 2, 16, values.shape[-1]), 5.0, np.float32)
        for slot, value in zip(slots, values, strict=True):
            expected[slot // 16, :, slot % 16] = value
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)).reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_8_bits_are_the_same_bytes_whoever_stores_them_and_come_back_the_same(dialect: str, dtype: mx.Dtype) -> None:
    _check_bytes(dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_8_bits_are_the_same_bytes_where_matrix_instructions_read_them(matrix_dialect: str, dtype: mx.Dtype) -> None:
    _check_bytes(dtype)


def _check_bytes(dtype: mx.Dtype) -> None:
    kernels = PagedKernels(4, 2, 64, 80, 16, dtype)
    rng = np.random.default_rng(2)
    # A sequence of 37 tokens in blocks 3, 1, 4: its tokens' positions, and so their slots, in any order.
    table = np.array([3, 1, 4], np.int32)
    positions = rng.permutation(37).astype(np.int32)
    slots = table[positions // 16] * 16 + positions % 16
    scales = 10.0 ** rng.integers(-3, 3, (37, 2, 1))
    new = [mx.array((rng.standard_normal((37, 2, dim)) * scales).astype(np.float32)).astype(dtype) for dim in (64, 80)]
    appended, decoded, written = pools = [_pool(5, dtype, mx.int8, fill=7) for _ in range(3)]
    ticket = kernels.append(*new, appended, mx.array(slots.astype(np.int32)))
    # The same tokens as the last ones of 37 decode rows that share the block table.
    queries, tables = mx.zeros((37, 4, 64), dtype), mx.array(np.tile(table, (37, 1)))
    out = kernels.decode(queries, *new, decoded, tables, mx.array(positions + 1), scale=1.0, splits=1)
    heads = np.arange(2)
    written.write(mx.array(((slots // 16)[:, None] * 2 + heads) * 16 + (slots % 16)[:, None]), *new)
    mx.eval(ticket, out, [pool.arrays() for pool in pools])
    for arrays in zip(*(pool.arrays() for pool in pools), strict=True):
        for got in arrays[:2]:
            np.testing.assert_array_equal(np.array(got), np.array(arrays[2]))
    collected = kernels.collect(appended, mx.array(table), kernels.length(37), ticket)
    for got, pages in zip(collected, written.pages(mx.array(table)), strict=True):
        expected = pages.transpose(1, 0, 2, 3).flatten(1, 2)[:, :37]
        assert got.dtype == expected.dtype == dtype
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)), np.array(expected.astype(mx.float32)))


def _placed(array: mx.array, how: str) -> mx.array:
    """The same numbers [n, heads, columns], elsewhere in memory."""
    rows = array.shape[0]
    if how == "transposed":
        return mx.contiguous(array.transpose(2, 1, 0)).transpose(2, 1, 0)
    if how == "whole":
        return array
    before = 16 if how == "in wider rows" else 3
    flat = array.reshape(rows, -1)
    around = mx.zeros((rows, before), array.dtype), mx.zeros((rows, 32 - before), array.dtype)
    wide = mx.concatenate([around[0], flat, around[1]], axis=1)
    return wide[:, before : before + flat.shape[1]].reshape(array.shape)


def _pool(num_blocks: int, dtype: mx.Dtype, stored: mx.Dtype, fill: int) -> LayerPool:
    """Of 2 heads of 64 and 80 numbers, in blocks of 16 tokens."""
    pool = LayerPool.zeros(LayerKVSpec(2, 64, 80), num_blocks, 16, dtype, stored)
    for array in pool.arrays():
        array[:] = mx.full(array.shape, fill, array.dtype)
    mx.eval(pool.keys, pool.values, pool.key_scales, pool.value_scales)
    return pool


def test_lanes_that_do_not_meet_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    text = texts.kernel_text("append", "host") + "\nif (QUIRE_THREAD % 2 == 0) { QUIRE_BARRIER(); }\n"
    monkeypatch.setattr(texts, "kernel", HostKernel)
    monkeypatch.setattr(texts, "kernel_text", lambda name, dialect: text)
    new = [mx.zeros((8, 2, dim)) for dim in (64, 80)]
    with pytest.raises(KernelFault, match="append"):
        PagedKernels(2, 2, 64, 80, 16, mx.float32).append(*new, _pool(2, mx.float32, mx.float32, 0), mx.arange(8))


@pytest.mark.parametrize(("group", "heads"), [(1, 1), (3, 3), (7, 7), (8, 8), (9, 3), (12, 6), (16, 8), (11, 1)])
def test_heads_of_a_group_are_split_evenly(group: int, heads: int) -> None:
    assert heads_per_group(group) == heads
    # Lanes that read 16 numbers at once have registers for fewer heads.
    few = heads_per_group(group, 4)
    assert few <= 4
    assert group % few == 0


def test_splits_keep_a_gpu_busy_and_stay_worth_their_while() -> None:
    for rows in (1, 3, 32, 500):
        for length in (1, 1024, 4096, 100_000):
            splits = num_splits(8 * rows, length, busy_splits(8 * rows), 4096)
            assert splits & (splits - 1) == 0
            assert splits == 1 or (length // splits >= 256 and rows * 8 * splits <= 4096)
            # Nobody waits for one long row, unless there are threadgroups enough.
            assert length / splits < 2 * 4096 or rows * 8 * splits > 2048
    assert num_splits(8, 32_768, busy_splits(8), 4096) == 128


@pytest.mark.parametrize(
    ("key", "value", "dtype", "stored", "fits"),
    [
        (64, 64, mx.bfloat16, mx.bfloat16, True),
        (68, 68, mx.float32, None, True),
        (68, 68, mx.float16, None, False),
        (288, 256, mx.float32, None, False),
        (80, 96, mx.bfloat16, mx.int8, True),
        (72, 72, mx.bfloat16, mx.bfloat16, True),
        (72, 72, mx.bfloat16, mx.int8, False),
    ],
)
def test_what_the_kernels_take(key: int, value: int, dtype: mx.Dtype, stored: mx.Dtype | None, fits: bool) -> None:
    assert PagedKernels.supports(key, value, dtype, stored) is fits
