"""Products on packed weights against a float64 reference, in each form of the library."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_engine.native import NativeLibrary

_SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    return out if bias is None else out + bias


def _check(got: mx.array, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Within the rounding of a float32 sum over k: that of the terms' magnitudes, not of the result."""
    expected = _reference(x, weight, bias)
    scale = _reference(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias))
    assert got.shape == expected.shape
    assert got.dtype == mx.float32
    error = np.abs(np.array(got) - expected)
    assert np.all(error <= 1e-6 * (x.shape[-1] ** 0.5 + 2) * scale + 1e-30)


@given(
    m=st.integers(1, 40) | st.sampled_from([95, 96, 97, 200]),
    k=st.integers(1, 40) | st.sampled_from([191, 192, 193, 400]),
    n=st.integers(1, 150),
    has_bias=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@example(m=512, k=576, n=960, has_bias=True, threads=2, seed=0)
@example(m=1, k=1536, n=576, has_bias=False, threads=3, seed=0)
@_SETTINGS
def test_a_product_is_that_of_the_unpacked_weight(
    native: NativeLibrary, m: int, k: int, n: int, has_bias: bool, threads: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k)))
    bias = rng.standard_normal(n).astype(np.float32) if has_bias else None
    native.num_threads = threads
    packed = native.pack_weight(mx.array(weight))
    got = native.packed_linear(mx.array(x), packed, n=n, bias=None if bias is None else mx.array(bias))
    _check(got, x, weight, bias)


@given(panel=st.integers(0, 3), n=st.integers(1, 60), has_bias=st.booleans())
@_SETTINGS
def test_some_columns_only(native: NativeLibrary, panel: int, n: int, has_bias: bool) -> None:
    first = panel * native.panel_width
    rng = np.random.default_rng(n)
    x, weight, bias = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((5, 33), (first + 60, 33), first + 60)
    )
    packed = native.pack_weight(mx.array(weight))
    got = native.packed_linear(mx.array(x), packed, n=n, first=first, bias=mx.array(bias) if has_bias else None)
    columns = slice(first, first + n)
    _check(got, x, weight[columns], bias[columns] if has_bias else None)


_VIEWS = {
    "transposed": lambda x: x.transpose(1, 0, 2),
    "every other row": lambda x: x[::2],
    "reversed": lambda x: x[:, ::-1],
    "part of each row": lambda x: x[..., 7:40],
    "broadcast": lambda x: mx.broadcast_to(x[:1], x.shape),
    "no rows": lambda x: x[:0],
    "one vector": lambda x: x[1, 2],
}


@pytest.mark.parametrize("name", _VIEWS)
def test_x_of_any_strides(native: NativeLibrary, name: str) -> None:
    x = _VIEWS[name](mx.random.normal((6, 9, 48)))
    # A weight that isn't row by row in memory either.
    weight = mx.random.normal((x.shape[-1], 2 * 50)).T[::2]
    got = native.packed_linear(x, native.pack_weight(weight), n=50)
    _check(got, np.array(x), np.array(weight), None)


def test_other_types_are_computed_in_float32(native: NativeLibrary) -> None:
    x, bias = mx.random.normal((3, 16)).astype(mx.bfloat16), mx.random.normal((8,)).astype(mx.float16)
    weight = mx.random.normal((8, 16))
    got = native.packed_linear(x, native.pack_weight(weight), n=8, bias=bias)
    _check(got, np.array(x.astype(mx.float32)), np.array(weight), np.array(bias.astype(mx.float32)))


def test_not_a_number_reaches_its_own_row_and_column_only(native: NativeLibrary) -> None:
    x, weight = mx.random.normal((14, 20)), mx.random.normal((37, 20))
    x[3, 5] = float("nan")
    weight[36, 2] = float("inf")
    got = np.array(native.packed_linear(x, native.pack_weight(weight), n=37))
    bad = ~np.isfinite(got)
    assert bad[3].all()
    assert bad[:, 36].all()
    assert bad.sum() == 37 + 14 - 1


def test_inside_a_compiled_function(native: NativeLibrary) -> None:
    weights = [mx.random.normal((24, 24)) for _ in range(2)]
    packed = [native.pack_weight(weight) for weight in weights]

    @mx.compile
    def twice(x: mx.array) -> mx.array:
        for panels in packed:
            x = mx.tanh(native.packed_linear(x, panels, n=24)) * 2
        return x

    for rows in (1, 6, 1):
        x = expected = mx.random.normal((rows, 24))
        for weight in weights:
            expected = mx.tanh(expected @ weight.T) * 2
        np.testing.assert_allclose(np.array(twice(x)), np.array(expected), rtol=1e-5, atol=1e-5)


def test_threads_that_ask_at_the_same_time_all_get_their_own_result(native: NativeLibrary) -> None:
    native.num_threads = 3
    failures: list[str] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 70), (300, 70)))
        # A thread's arrays live on its own stream.
        with mx.stream(mx.new_stream(mx.cpu)):
            packed = native.pack_weight(mx.array(weight))
            for _ in range(60):
                got = np.array(native.packed_linear(mx.array(x), packed, n=300))
                if not np.allclose(got, _reference(x, weight, None), atol=1e-4):
                    failures.append(f"thread {seed}")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_nothing_is_kept_of_products_and_dropped_weights(native: NativeLibrary) -> None:
    x, weight = mx.random.normal((4, 256)), mx.random.normal((2048, 256))
    mx.eval(x, weight)
    before = mx.get_active_memory()
    for _ in range(5):
        packed = native.pack_weight(weight)
        mx.eval(native.packed_linear(x, packed, n=2048))
        assert mx.get_active_memory() - before <= 1.1 * weight.nbytes
    del packed
    assert mx.get_active_memory() == before


def test_what_does_not_fit_is_refused(native: NativeLibrary) -> None:
    packed, x = native.pack_weight(mx.ones((40, 8))), mx.ones((2, 8))
    for weight in (mx.ones((4,)), mx.ones((4, 4)).astype(mx.float16), mx.ones((0, 4)), mx.ones((2, 2, 2))):
        with pytest.raises(ValueError, match="float32 matrix"):
            native.pack_weight(weight)
    wider = native.panel_width * (40 // native.panel_width + 1) + 1
    with pytest.raises(ValueError, match=f"smaller than {wider} rows of 8"):
        native.packed_linear(x, packed, n=wider)
    with pytest.raises(ValueError, match="smaller than 40 rows of 80"):
        native.packed_linear(mx.ones((2, 80)), packed, n=40)
    with pytest.raises(ValueError, match="multiple of the panel width"):
        native.packed_linear(x, packed, n=4, first=1)
    with pytest.raises(ValueError, match="bias is shorter than 40"):
        native.packed_linear(x, packed, n=40, bias=mx.ones((39,)))
    with pytest.raises(ValueError, match="k at least 1"):
        native.packed_linear(mx.ones((2, 0)), packed, n=4)


def test_the_number_of_threads_has_bounds(native: NativeLibrary) -> None:
    native.num_threads = 0
    assert native.num_threads == 1
    native.num_threads = 2
    assert native.num_threads == 2
