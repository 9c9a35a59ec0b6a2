"""Elementwise math: as exact as MLX's own, over the whole range that is promised."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations

from mlx_engine.mathops import fast_exp, fast_swiglu


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


@pytest.mark.parametrize("size", [96, 8192])
def test_fast_swiglu_is_silu_times_x_for_gates_of_any_size(size: int) -> None:
    rng = np.random.default_rng(0)
    gate = np.concatenate([rng.normal(0, 4, size - 8), [0.0, 88, -88, 1e4, -1e4, 1e30, -1e30, -0.5]]).astype(np.float32)
    x = rng.normal(0, 1, size).astype(np.float32)
    wide = gate.astype(np.float64)
    exact = wide / (1 + np.exp(-np.clip(wide, -700, 700))) * x
    got = np.array(fast_swiglu(mx.array(gate), mx.array(x)), np.float64)
    # The error is a float32's rounding of the gate: what is left of a large negative one is nothing beside it.
    assert (np.abs(got - exact) <= 4e-7 * np.maximum(np.abs(wide * x), 1)).all()


def test_fast_swiglu_leaves_other_types_to_mlx_lm() -> None:
    gate, x = mx.random.normal((2, 8192)).astype(mx.float16)
    assert mx.array_equal(fast_swiglu(gate, x), activations.swiglu(gate, x))
