"""Turns GGUF tensors into MLX ones, keeping them quantized wherever MLX can hold the very same numbers.

MLX's affine quantization says w = scale * q + bias for each group of 32 along a row, with unsigned q. So do these GGUF
types, once q is shifted to be unsigned:

    Q4_0, Q5_0  w = d * (q - 8 or 16)      bias -8 d or -16 d      4, 5 bits
    Q4_1, Q5_1  w = d * q + m              bias m                  4, 5 bits
    Q8_0        w = d * q                  q + 128, bias -128 d    8 bits
    Q4_K, Q5_K  w = d * s * q - dmin * m   scale d s, bias -dmin m 4, 5 bits, s and m in six bits for each group

The products fit float16 for the first three rows and float32 for the last, so nothing is rounded. Everything is numpy:
conversion runs in processes that don't own MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from mlx_engine.models.gguf_reader import GGUFTensor

GROUP_SIZE = 32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class MLXTensor:
    """What a safetensors file stores for one weight."""

    arrays: dict[str, Array]  # by suffix: weight or bias alone, or weight, scales and biases
    bits: int | None  # of an affine quantization in groups of GROUP_SIZE; None is dense
    bfloat16: bool = False  # the arrays are uint16 and hold bfloat16


@dataclass(frozen=True, slots=True)
class _Affine:
    """Rows of groups: scales and biases (rows, groups), quants (rows, groups, 32) below 2**bits."""

    bits: int
    scales: Array
    biases: Array
    quants: Array


def convert_tensor(tensor: GGUFTensor, suffix: str, row_order: Array | None = None, offset: float = 0.0) -> MLXTensor:
    """The tensor for MLX. Exact for plain types and those of the table above; other types become float16.

    row_order, if given, lists for each row of the result the tensor's row that it comes from. An offset is taken off
    the values, which become float32.
    """
    if offset:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.type), np.float32)
        return MLXTensor({suffix: values - np.float32(offset)}, None)
    data = tensor.data if row_order is None else tensor.data[row_order]
    kind = tensor.type.name
    if suffix == "weight" and len(tensor.shape) == 2 and kind in _AFFINE:
        _, type_size = gguf.GGML_QUANT_SIZES[tensor.type]
        affine = _AFFINE[kind](np.ascontiguousarray(data).reshape(len(data), -1, type_size))
        # Only a power of two times a float16 can overflow; then the tensor is kept dense.
        if np.isfinite(affine.biases).all():
            return _packed(affine)
    if kind == "BF16":
        # The reader gives raw bytes, and numpy has no bfloat16.
        shape = (len(data), *tensor.shape[1:]) if len(tensor.shape) > 1 else tensor.shape
        raw = np.ascontiguousarray(data).view(np.uint16).reshape(shape)
        return MLXTensor({suffix: raw}, None, bfloat16=True)
    if kind in ("F32", "F16"):
        return MLXTensor({suffix: np.ascontiguousarray(data)}, None)
    if kind == "F64":
        return MLXTensor({suffix: data.astype(np.float32)}, None)
    return MLXTensor({suffix: _dense(tensor, data)}, None)


def _dense(tensor: GGUFTensor, data: Array) -> Array:
    """Dequantized values: float16 where its range suffices (finer than any GGUF type), else float32."""
    values = np.asarray(gguf.dequantize(data, tensor.type), dtype=np.float32)
    if len(tensor.shape) == 1 or float(np.abs(values).max(initial=0.0)) > float(np.finfo(np.float16).max):
        return values
    return values.astype(np.float16)


def _packed(affine: _Affine) -> MLXTensor:
    """MLX packs a row's values one after the other, lowest bits first, into 32-bit words."""
    rows, bits = len(affine.scales), affine.bits
    values = affine.quants.reshape(rows, -1)
    if bits < 8:
        # Eight values make `bits` bytes.
        octets = np.zeros((rows, values.shape[1] // 8), np.uint64)
        for i in range(8):
            octets |= values[:, i::8].astype(np.uint64) << np.uint64(bits * i)
        values = octets.astype("<u8").view(np.uint8).reshape(rows, -1, 8)[..., :bits].reshape(rows, -1)
    words = np.ascontiguousarray(values).view("<u4")
    return MLXTensor({"weight": words, "scales": affine.scales, "biases": affine.biases}, bits)


def _legacy(bits: int, minimum: bool) -> Callable[[Array], _Affine]:
    """Q4_0 to Q5_1: d, m if there is a minimum, the fifth bits if any, then low bits of the first and second half."""

    def unpack(blocks: Array) -> _Affine:
        scales = _halves(blocks, 0)
        biases = _halves(blocks, 2) if minimum else _times(scales, -(2 ** (bits - 1)))
        start = 4 if minimum else 2
        if bits == 5:
            high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
            return _Affine(bits, scales, biases, _nibbles(blocks[..., start + 4 :]) | (high << 4))
        return _Affine(bits, scales, biases, _nibbles(blocks[..., start:]))

    return unpack


def _q8_0(blocks: Array) -> _Affine:
    scales = _halves(blocks, 0)
    # Two's complement to offset binary.
    return _Affine(8, scales, _times(scales, -128), blocks[..., 2:] ^ 0x80)


def _k_quant(bits: int) -> Callable[[Array], _Affine]:
    """Q4_K and Q5_K: d, dmin, eight pairs of six-bit factors in twelve bytes, the fifth bits if any, low bits."""

    def unpack(blocks: Array) -> _Affine:
        rows = len(blocks)
        d, dmin = (_halves(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
        factors, minimums = _six_bit_pairs(blocks[..., 4:16])
        low = blocks[..., 16 + 32 * (bits - 4) :]
        # 32 bytes hold a group in their low nibbles and the next in their high ones.
        quants = _nibbles(low.reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
        if bits == 5:
            high = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # bit i belongs to group i
            quants = quants | (high.swapaxes(-1, -2) << 4)
        scales, biases = (d * factors).reshape(rows, -1), -(dmin * minimums).reshape(rows, -1)
        return _Affine(bits, scales, biases, quants)

    return unpack


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """The eight factors and eight minimums in twelve bytes, float32.

    Bytes 0 to 3 and 4 to 7 hold the first four of each in their low six bits. Bytes 8 to 11 hold the low nibbles of the
    last four of both; their upper two bits are what is left of the first eight bytes.
    """
    first, second, low = (packed[..., i : i + 4] for i in (0, 4, 8))
    factors = np.concatenate([first & 0x3F, (low & 0x0F) | ((first >> 6) << 4)], axis=-1)
    minimums = np.concatenate([second & 0x3F, (low >> 4) | ((second >> 6) << 4)], axis=-1)
    return factors.astype(np.float32), minimums.astype(np.float32)


_AFFINE: dict[str, Callable[[Array], _Affine]] = {
    "Q4_0": _legacy(4, minimum=False),
    "Q4_1": _legacy(4, minimum=True),
    "Q5_0": _legacy(5, minimum=False),
    "Q5_1": _legacy(5, minimum=True),
    "Q8_0": _q8_0,
    "Q4_K": _k_quant(4),
    "Q5_K": _k_quant(5),
}


def _halves(blocks: Array, start: int) -> Array:
    """The float16 at byte `start` of each block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]


def _times(scales: Array, factor: int) -> Array:
    with np.errstate(over="ignore"):
        return scales * np.float16(factor)


def _nibbles(packed: Array) -> Array:
    """Low nibbles, then high ones, along the last axis."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
