"""Elementwise math where MLX's CPU backend is slow."""

from __future__ import annotations

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
# Below this size the many small operations cost more than mx.exp.
_MIN_SIZE = 4096
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves round(x) in the low bits of a float32
_ROUND_BITS = 0x4B400000


def fast_exp(x: mx.array) -> mx.array:
    """exp(x) for float32 x, from multiplications and bit operations; other types go to mx.exp.

    MLX's CPU exp takes 12 ns an element, these simple operations together a third of that. Arguments below -87
    give about 1e-38 instead of a smaller number or 0, those above 88 are not supported.
    """
    if x.dtype != mx.float32 or x.size < _MIN_SIZE or mx.default_device() != mx.Device(mx.cpu):
        return mx.exp(x)
    t = mx.maximum(x * _LOG2E, -126.0)
    z = t + _ROUND
    r = t - (z - _ROUND)
    p = r * _EXP2[6] + _EXP2[5]
    for c in _EXP2[4::-1]:
        p = p * r + c
    power = mx.left_shift(z.view(mx.int32) + (127 - _ROUND_BITS), 23)
    return p * power.view(mx.float32)


@mx.compile
def exp_difference(x: mx.array, y: mx.array) -> mx.array:
    """exp(x - y) for x <= y, broadcast: the weights of a softmax."""
    return fast_exp(x - y)
