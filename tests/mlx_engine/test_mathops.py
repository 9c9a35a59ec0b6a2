"""Elementwise math: as exact as MLX's own, over the whole range that is promised."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.mathops import fast_exp


def test_fast_exp_is_as_exact_as_its_arguments_rounding() -> None:
    x = np.linspace(-86.9, 87.9, 200_001).astype(np.float32)
    got = np.array(fast_exp(mx.array(x)), np.float64)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(got / exact - 1).max() < 1e-5


def test_fast_exp_of_zero_is_one_and_it_never_decreases() -> None:
    assert fast_exp(mx.array([0.0, -0.0])).tolist() == [1.0, 1.0]
    x = np.sort(np.random.default_rng(0).uniform(-90, 87, 50_000)).astype(np.float32)
    values = np.array(fast_exp(mx.array(x)), np.float64)
    assert (values[1:] >= values[:-1] * (1 - 1e-5)).all()


def test_fast_exp_of_very_small_arguments_is_negligible_and_finite() -> None:
    values = np.array(fast_exp(mx.array([-87.5, -100.0, -1e4, -1e30, -np.inf])))
    assert ((values >= 0) & (values < 3e-38)).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_keep_their_type(dtype: mx.Dtype) -> None:
    x = mx.array([-3.0, 0.0, 1.5]).astype(dtype)
    assert fast_exp(x).dtype == dtype
    assert mx.array_equal(fast_exp(x), mx.exp(x))
