"""Products of a few rows with a weight matrix, and what is taken in around them, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlx_engine.attention.kernels import gemv as gemv_module
from mlx_engine.attention.kernels import reference, texts
from mlx_engine.attention.kernels.gemv import (
    Norm,
    Rotation,
    SkinnyPlan,
    embed,
    gate,
    gemv,
    rotate,
    skinny_gemm,
    skinny_gemm_takes,
)

Array = npt.NDArray[Any]
_EPS = 1e-5
_HALF = 8  # of a head's columns


@dataclass(frozen=True)
class Case:
    """A product [rows, depth] x [depth, columns]."""

    dtype: mx.Dtype
    rows: int
    depth: int
    columns: int
    splits: int = 1  # that gemv must make of it
    norm: bool = False
    bias: bool = False
    finish: Literal["none", "residual", "gated", "rotation"] = "none"


# A lane reads 4 pieces of 16 bytes before it uses them, a warp 2 KB; a threadgroup takes 8 / splits pairs of columns.
# The depths end within a warp's reading, and the pairs mostly within a threadgroup.
CASES = (
    Case(mx.float32, 1, 4100, 14, 8, norm=True, bias=True),
    Case(mx.float32, 4, 2056, 22, 4, finish="residual"),
    Case(mx.float32, 2, 200, 28, 1, bias=True, finish="gated"),
    Case(mx.bfloat16, 2, 2056, 42, 2, norm=True, finish="gated"),
    Case(mx.bfloat16, 4, 1032, 96, 1, norm=True, bias=True, finish="rotation"),
    Case(mx.bfloat16, 1, 72, 36, 1),
    Case(mx.float16, 3, 72, 38, 1, bias=True, finish="residual"),
    Case(mx.float16, 1, 2048, 64, 2, norm=True, finish="rotation"),
)


# Rows of one and two tiles; x held in registers, and read again for each set; more warps than chunks; several sets for
# a threadgroup. With the plan's parts that are given.
SKINNY_CASES: tuple[tuple[Case, dict[str, int]], ...] = (
    (Case(mx.bfloat16, 3, 512, 96, norm=True, finish="gated"), {}),
    (Case(mx.bfloat16, 8, 1024, 64, bias=True, finish="residual"), {}),
    (Case(mx.float16, 12, 576, 96, norm=True), {}),
    (Case(mx.float16, 5, 4096, 48, norm=True, bias=True), {"held": False}),
    (Case(mx.bfloat16, 16, 2304, 160, finish="residual"), {"col_tiles": 2, "warps": 4, "stages": 3}),
    (Case(mx.bfloat16, 2, 1024, 128, finish="gated"), {"col_tiles": 2, "warps": 4, "stages": 1}),
)


@pytest.mark.parametrize(("case", "given"), SKINNY_CASES, ids=str)
def test_a_product_of_more_rows(
    bulk_dialect: str, monkeypatch: pytest.MonkeyPatch, case: Case, given: dict[str, int]
) -> None:
    monkeypatch.setattr(gemv_module, "_SKINNY_GROUPS", 2)
    plan = SkinnyPlan.of(case.rows, case.depth, **given)
    _check(partial(skinny_gemm, plan=plan), case)


@pytest.mark.parametrize(
    ("shape", "dtype", "takes"),
    [
        ((96, 64), mx.bfloat16, True),
        ((96, 64), mx.float16, True),
        ((96, 64), mx.float32, False),
        ((72, 64), mx.bfloat16, False),  # no whole number of 16 columns
        ((96, 96), mx.bfloat16, False),  # or of chunks
    ],
    ids=str,
)
def test_what_bulk_copies_take(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: mx.Dtype, takes: bool
) -> None:
    monkeypatch.setattr(texts, "has_bulk_copies", lambda: True)
    assert skinny_gemm_takes(mx.zeros(shape, dtype)) == takes
    monkeypatch.setattr(texts, "has_bulk_copies", lambda: False)
    assert not skinny_gemm_takes(mx.zeros(shape, dtype))


@pytest.mark.parametrize("depth", [64, 576, 2048, 4096, 8192, 14336])
def test_two_threadgroups_fit_a_multiprocessor(depth: int) -> None:
    """Of an H200, with 114 KiB for each, and one fits where a threadgroup gets 99: 10 KiB are not the ring's."""
    plan = SkinnyPlan.of(8, depth)
    assert plan.stages >= 2
    assert plan.ring_bytes + (10 << 10) < 99 << 10


def test_float16_need_not_hold_what_is_not_scaled_yet(bulk_dialect: str) -> None:
    """A row whose largest number times the norm's weight is beyond float16."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 512)).astype(np.float32)
    x[0, 7] = 20_000
    weight = mx.array((rng.standard_normal((32, 512)) / 16).astype(np.float32)).astype(mx.float16)
    norm = Norm(mx.full((512,), 4.0, mx.float16), _EPS)
    rows = mx.array(x).astype(mx.float16)
    expected = _exact(mx.fast.rms_norm(rows, norm.weight, _EPS)) @ _exact(weight).T
    got = skinny_gemm(rows, weight, norm=norm)
    assert reference.relative_error(got, expected) < reference.TOLERANCE[mx.float16]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_with_all_that_goes_around_it(dialect: str, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    templates = _noted_templates(monkeypatch)
    _check(gemv, case)
    if templates is not None:
        assert [template["SPLITS"] for template in templates] == [case.splits]


def _check(product: Callable[..., mx.array], case: Case) -> None:
    """One of the products against float64."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(case.dtype)

    x, weight = draw(case.rows, case.depth), draw(case.columns, case.depth)
    norm_weight, bias, residual = draw(case.depth), draw(case.columns), draw(case.rows, case.columns)
    expected = _exact(x)
    options: dict[str, Any] = {}
    if case.norm:
        expected = expected / np.sqrt((expected**2).mean(axis=1, keepdims=True) + _EPS) * _exact(norm_weight)
        options["norm"] = Norm(norm_weight, _EPS)
    # Sums of the size of 1, which is where a gate bends.
    weight = (weight * case.depth**-0.5).astype(case.dtype)
    expected = expected @ _exact(weight).T
    if case.bias:
        expected, options["bias"] = expected + _exact(bias), bias
    if case.finish == "residual":
        expected, options["residual"] = expected + _exact(residual), residual
    elif case.finish == "gated":
        first, second = np.split(expected, 2, axis=1)
        expected, options["gated"] = first / (1 + np.exp(-first)) * second, True
    elif case.finish == "rotation":
        # All heads but the last one, as of values.
        rotation = _rotation(rng, case.rows, case.columns // (2 * _HALF) - 1)
        expected, options["rotation"] = _rotated(expected, rotation), rotation
    got = product(x, weight, **options)
    assert got.dtype == case.dtype
    assert got.shape == expected.shape
    assert reference.relative_error(got, expected) < reference.TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_heads_are_rotated_wherever_their_rows_are(dialect: str, dtype: mx.Dtype) -> None:
    """Rows of a wider matrix, whose other columns aren't taken; more pairs than a threadgroup has threads."""
    rng = np.random.default_rng(1)
    num_heads = 19
    rotation = _rotation(rng, 3, num_heads)
    wide = mx.array(rng.standard_normal((3, 360)).astype(np.float32)).astype(dtype)
    x = wide[:, 16:]
    got = rotate(x, rotation)
    expected = _rotated(_exact(x), rotation)[:, : num_heads * 2 * _HALF]
    assert got.shape == expected.shape
    assert reference.relative_error(got, expected) < reference.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(9, 1), (2, 3)])
def test_rows_are_copied(dialect: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """Fewer than a kernel must be given, and more pieces than a threadgroup has threads."""
    rng = np.random.default_rng(2)
    table = mx.array(rng.standard_normal((50, 1096)).astype(np.float32)).astype(dtype)
    ids = mx.array(rng.integers(0, 50, shape).astype(np.uint32))
    got = embed(table, ids)
    assert got.dtype == dtype
    assert mx.array_equal(got, table[ids])


@pytest.mark.parametrize(
    ("dtype", "columns", "kernels"),
    [
        (mx.bfloat16, 1160, ["gate"]),  # more pieces than a threadgroup has threads
        (mx.float16, 24, ["gate"]),
        (mx.bfloat16, 28, []),
        (mx.float32, 24, []),
    ],
    ids=str,
)
def test_a_gate_is_silu_of_the_first_half_times_the_second(
    matrix_dialect: str, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, columns: int, kernels: list[str]
) -> None:
    used: list[str] = []
    make = texts.kernel
    monkeypatch.setattr(texts, "kernel", lambda name: (used.append(name), make(name))[1])
    x = mx.array((np.random.default_rng(2).standard_normal((3, 2 * columns)) * 3).astype(np.float32)).astype(dtype)
    first, second = np.split(_exact(x), 2, axis=1)
    got = gate(x)
    assert got.dtype == dtype
    assert reference.relative_error(got, first / (1 + np.exp(-first)) * second) < reference.TOLERANCE[dtype]
    assert used == kernels


def test_sums_are_split_only_as_far_as_each_warp_has_enough_to_read() -> None:
    for pairs in (1, 100, 1024, 8192, 100_000):
        for pieces in (1, 255, 256, 512, 1024, 4096):
            splits = gemv_module._num_splits(pairs, pieces)
            assert splits in (1, 2, 4, 8)
            assert splits == 1 or (pieces // splits >= 128 and pairs * splits < 2 * 8192)
    assert gemv_module._num_splits(1024, 1024) == 8
    assert gemv_module._num_splits(8192, 4096) == 1


def _noted_templates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]] | None:
    """What kernels on the host are compiled for from now on; None on a GPU, whose kernels are MLX's own objects."""
    make: Any = texts.kernel
    if not isinstance(make, type):
        return None
    noted: list[dict[str, Any]] = []

    def watched(name: str) -> Any:
        kernel = make(name)

        def call(*, template: Any, **options: Any) -> Any:
            noted.append(dict(template))
            return kernel(template=template, **options)

        return call

    monkeypatch.setattr(texts, "kernel", watched)
    return noted


def _rotation(rng: np.random.Generator, rows: int, num_heads: int) -> Rotation:
    angles = rng.uniform(0, 3000, (rows, _HALF))
    return Rotation(mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32)), num_heads)


def _rotated(x: Array, rotation: Rotation) -> Array:
    columns = rotation.num_heads * 2 * _HALF
    heads = x[:, :columns].reshape(len(x), rotation.num_heads, -1)
    turned = reference.rotated(heads, _exact(rotation.cosines), _exact(rotation.sines))
    return np.concatenate([turned.reshape(len(x), -1), x[:, columns:]], axis=1)


def _exact(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)
