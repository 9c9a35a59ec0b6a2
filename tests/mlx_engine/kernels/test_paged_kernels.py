"""The kernels' text, run on the host in its own dialect and as the text that Metal would get, and on a GPU if any."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.attention.kernels import PagedKernels, paged, reference
from mlx_engine.attention.kernels.paged import heads_per_group, num_splits
from mlx_engine.attention.kernels.reference import DecodeCase
from tests.mlx_engine.kernels.executors import HostKernel, KernelFault

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# float16 differs from the others in how it is loaded and stored only.
_CASES = [*reference.cases(mx.float32), *reference.cases(mx.bfloat16), *reference.cases(mx.float16)[::5]]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_decode_is_attention_over_the_rows_own_tokens(dialect: str, case: DecodeCase) -> None:
    inputs = reference.make_inputs(case)
    out, *pools = reference.run(case, inputs)
    assert reference.relative_error(out, reference.decode(case, inputs)) < reference.TOLERANCE[case.dtype]
    # Exactly the new tokens have been added to the pools.
    for pool, before, new in zip(
        pools, (inputs.key_pool, inputs.value_pool), (inputs.new_keys, inputs.new_values), strict=True
    ):
        expected = before.copy()
        for row, length in enumerate(inputs.seq_lens):
            if length:
                block = inputs.block_tables[row, (length - 1) // case.block_size]
                expected[block, :, (length - 1) % case.block_size] = new[row]
        np.testing.assert_array_equal(np.array(pool.astype(mx.float32)), expected)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_append_writes_its_slots_and_no_other(dialect: str, dtype: mx.Dtype) -> None:
    kernels = PagedKernels(4, 2, 64, 80, 16, dtype)
    rng = np.random.default_rng(1)
    new = [rng.integers(-9, 9, (21, 2, dim)).astype(np.float32) for dim in (64, 80)]
    pools = [mx.full((4, 2, 16, dim), 5.0, dtype) for dim in (64, 80)]
    slots = rng.permutation(64)[:21]
    mx.eval(pools)
    mx.eval(kernels.append(*[mx.array(a).astype(dtype) for a in new], *pools, mx.array(slots.astype(np.int32))))
    for pool, values in zip(pools, new, strict=True):
        expected = np.full(pool.shape, 5.0, np.float32)
        for slot, value in zip(slots, values, strict=True):
            expected[slot // 16, :, slot % 16] = value
        np.testing.assert_array_equal(np.array(pool.astype(mx.float32)), expected)


def test_lanes_that_do_not_meet_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    text = paged.kernel_text("append", "host") + "\nif (QUIRE_THREAD % 2 == 0) { QUIRE_BARRIER(); }\n"
    monkeypatch.setattr(paged, "_kernel", HostKernel)
    monkeypatch.setattr(paged, "kernel_text", lambda name, dialect: text)
    pools = [mx.zeros((2, 1, 16, 64)) for _ in range(2)]
    with pytest.raises(KernelFault, match="append"):
        PagedKernels(1, 1, 64, 64, 16, mx.float32).append(*[mx.zeros((8, 1, 64))] * 2, *pools, mx.arange(8))


@pytest.mark.parametrize(("group", "heads"), [(1, 1), (3, 3), (7, 7), (8, 8), (9, 3), (12, 6), (16, 8), (11, 1)])
def test_heads_of_a_group_are_split_evenly(group: int, heads: int) -> None:
    assert heads_per_group(group) == heads


def test_splits_keep_a_gpu_busy_and_stay_worth_their_while() -> None:
    for rows in (1, 3, 32, 500):
        for length in (1, 1024, 4096, 100_000):
            splits = num_splits(rows, 8, length)
            assert splits & (splits - 1) == 0
            assert splits == 1 or (length // splits >= 256 and rows * 8 * splits <= 1024)
    assert num_splits(1, 8, 32_768) == 128


@pytest.mark.parametrize(
    ("key", "value", "dtype", "fits"),
    [
        (64, 64, mx.bfloat16, True),
        (68, 68, mx.float32, True),
        (68, 68, mx.float16, False),
        (288, 256, mx.float32, False),
    ],
)
def test_what_the_kernels_take(key: int, value: int, dtype: mx.Dtype, fits: bool) -> None:
    assert PagedKernels.supports(key, value, dtype) is fits
