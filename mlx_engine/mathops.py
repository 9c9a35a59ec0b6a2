"""Elementwise math where MLX's CPU backend is slow."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

# 2**x on [-0.5, 0.5], Chebyshev fit of degree 6; the relative error of fast_exp is that of its argument's
# rounding, as for mx.exp (4e-6 over [-80, 80]).
_EXP2 = (
    1.0,
    6.93147207e-01,
    2.40226512e-01,
    5.55032719e-02,
    9.61802558e-03,
    1.34004417e-03,
    1.54697403e-04,
)
_LOG2E = 1.4426950408889634
# Below this size the operations' overhead costs more than mx.exp.
_MIN_SIZE = 4096
# 1.5 * 2**23 + 127: adding it rounds a float32 to an integer k and leaves k + 127, an exponent, in the low bits.
_ROUND = 12582912.0 + 127.0


def fast_exp(x: mx.array) -> mx.array:
    """exp(x) for float32 x, from multiplications and bit operations; other types go to mx.exp.

    MLX's CPU exp takes 12 ns an element, this a quarter of that where a compiler is present (see
    `models.load.can_compile_on_cpu`). Arguments below -87 give about 1e-38 instead of a smaller number or 0, those
    above 88 are not supported.
    """
    if x.dtype != mx.float32 or x.size < _MIN_SIZE or mx.default_device() != mx.Device(mx.cpu):
        return mx.exp(x)
    fraction, rounded = _split(x)
    return fraction * mx.left_shift(rounded.view(mx.int32), 23).view(mx.float32)


# Without shapes, or MLX would keep one compiled graph for each shape that it ever saw.
@partial(mx.compile, shapeless=True)
def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """2**(x log2(e) - k), and k + _ROUND, for the nearest integer k."""
    t = mx.maximum(x * _LOG2E, -126.0)
    z = t + _ROUND
    r = t - (z - _ROUND)
    p = r * _EXP2[6] + _EXP2[5]
    for c in _EXP2[4::-1]:
        p = p * r + c
    return p, z
