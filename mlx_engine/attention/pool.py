"""One layer's K/V pool: in the model's type, or as 8-bit integers with a scale for each token and K/V head.

A scale is float32 whatever the model's type: a token's 64 keys of a head then take 68 bytes instead of 128 in 16 bits,
and there is nothing to round or to overflow. Scales lie apart from the numbers, so that these stay in whole pieces of
16 bytes, and those of a block's tokens lie together.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.types import LayerKVSpec

_SCALE_BYTES = 4
# Below, 127 / magnitude would be infinite.
_SMALLEST = 1e-30
# What a pool has in place of scales where it needs none: kernels take the same arguments for both kinds.
_NO_SCALES = 8


@dataclass(slots=True)
class LayerPool:
    """Keys and values of one layer. Rows are numbered block by block, in a block head by head."""

    shape: tuple[int, int, int]  # num_blocks, num_kv_heads, block_size
    dtype: mx.Dtype  # that keys and values come and go in
    keys: mx.array  # [rows, key_head_dim] of dtype, or int8
    values: mx.array  # [rows, value_head_dim]
    key_scales: mx.array  # [rows] float32: what 1 is worth; not used unless the pool is int8
    value_scales: mx.array

    @classmethod
    def zeros(cls, spec: LayerKVSpec, num_blocks: int, block_size: int, dtype: mx.Dtype, stored: mx.Dtype) -> LayerPool:
        """An empty pool whose numbers are of type `stored`: dtype, or int8."""
        rows = num_blocks * spec.num_kv_heads * block_size
        num_scales = rows if stored == mx.int8 else _NO_SCALES
        return cls(
            (num_blocks, spec.num_kv_heads, block_size),
            dtype,
            mx.zeros((rows, spec.key_head_dim), stored),
            mx.zeros((rows, spec.value_head_dim), stored),
            mx.zeros((num_scales,)),
            mx.zeros((num_scales,)),
        )

    @property
    def quantized(self) -> bool:
        """Whether the pool holds 8-bit integers."""
        return bool(self.keys.dtype == mx.int8)

    def arrays(self) -> list[mx.array]:
        """All that a step may change."""
        return [self.keys, self.values, *([self.key_scales, self.value_scales] if self.quantized else [])]

    def write(self, rows: mx.array, keys: mx.array, values: mx.array) -> None:
        """Puts keys and values [T, num_kv_heads, head_dim] at rows [T, num_kv_heads]."""
        # In place as long as nothing else holds the buffer: the step before has ended when this one is launched.
        if self.quantized:
            keys, self.key_scales[rows] = quantize(keys)
            values, self.value_scales[rows] = quantize(values)
        self.keys[rows] = keys
        self.values[rows] = values

    def blocks(self) -> tuple[mx.array, mx.array]:
        """Keys and values as they are stored, [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.keys.reshape(*self.shape, -1), self.values.reshape(*self.shape, -1)

    def pages(self, block_tables: mx.array) -> tuple[mx.array, mx.array]:
        """Copies of blocks: keys and values [*block_tables.shape, num_kv_heads, block_size, head_dim] of dtype."""
        keys, values = (stored[block_tables] for stored in self.blocks())
        if not self.quantized:
            return keys, values
        scales = (scales.reshape(self.shape)[block_tables] for scales in (self.key_scales, self.value_scales))
        return dequantize(keys, next(scales), self.dtype), dequantize(values, next(scales), self.dtype)


def quantize(numbers: mx.array) -> tuple[mx.array, mx.array]:
    """Of numbers [..., n]: 8-bit integers of the same shape, and what 1 is worth, [...] float32.

    The largest magnitude becomes 127. The same numbers always give the same bytes, here and in the kernels.
    """
    numbers = numbers.astype(mx.float32)
    top = mx.abs(numbers).max(axis=-1)
    inverse = mx.where(top > _SMALLEST, 127.0 / top, 0.0)
    return mx.round(numbers * inverse[..., None]).astype(mx.int8), top / 127.0


def dequantize(stored: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """What `quantize` gave, as numbers [..., n] of dtype."""
    return (stored.astype(mx.float32) * scales[..., None]).astype(dtype)


def row_bytes(head_dim: int, stored: mx.Dtype) -> int:
    """Bytes of one token's key or value of one head in a pool of this type."""
    return head_dim * int(stored.size) + (_SCALE_BYTES if stored == mx.int8 else 0)
