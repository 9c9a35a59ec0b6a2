"""Turns GGUF tensors into MLX ones, keeping them quantized wherever MLX can hold the very same numbers.

MLX's affine quantization says w = scale * q + bias for each group of 32 along a row, with unsigned q. So do these GGUF
types, once q is shifted to be unsigned:

    Q4_0  w = d * (q - 8)    scale d, bias -8 d      4 bits
    Q4_1  w = d * q + m      scale d, bias m         4 bits
    Q8_0  w = d * q          q + 128, bias -128 d    8 bits

Everything is numpy: conversion runs in processes that don't own MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from mlx_engine.models.gguf_reader import GGUFTensor

GROUP_SIZE = 32
Array = np.ndarray[Any, Any]

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


@dataclass(frozen=True, slots=True)
class MLXTensor:
    """What a safetensors file stores for one weight."""

    arrays: dict[str, Array]  # by suffix: weight or bias alone, or weight, scales and biases
    bits: int | None  # of an affine quantization in groups of GROUP_SIZE; None is dense
    bfloat16: bool = False  # the arrays are uint16 and hold bfloat16


def convert_tensor(tensor: GGUFTensor, suffix: str, row_order: Array | None = None) -> MLXTensor:
    """The tensor for MLX. Exact for plain types, Q4_0, Q4_1 and Q8_0; other types become float16.

    row_order, if given, lists for each row of the result the tensor's row that it comes from.
    """
    data = tensor.data if row_order is None else tensor.data[row_order]
    kind = tensor.type.name
    if suffix == "weight" and len(tensor.shape) == 2 and kind in _BITS:
        packed = _repack(kind, np.ascontiguousarray(data))
        if packed is not None:
            return packed
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


def _repack(kind: str, data: Array) -> MLXTensor | None:
    """The affine form of quantized rows, uint8 (rows, bytes); None if float16 can't hold a bias exactly."""
    _, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = len(data)
    blocks = data.reshape(rows, -1, type_size)
    scales = _halves(blocks, 0)
    bits = _BITS[kind]
    # Powers of two times a float16 are exact unless they overflow.
    if kind == "Q4_1":
        biases, quants = _halves(blocks, 2), _nibbles(blocks[..., 4:])
    elif kind == "Q4_0":
        biases, quants = _times(scales, -8), _nibbles(blocks[..., 2:])
    else:
        biases, quants = _times(scales, -128), blocks[..., 2:] ^ 0x80  # two's complement to offset binary
    if not np.isfinite(biases).all():
        return None
    values = quants.reshape(rows, -1)
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    words = np.ascontiguousarray(values).view("<u4")
    return MLXTensor({"weight": words, "scales": scales, "biases": biases}, bits)


def _halves(blocks: Array, start: int) -> Array:
    """The float16 at byte `start` of each block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]


def _times(scales: Array, factor: int) -> Array:
    with np.errstate(over="ignore"):
        return scales * np.float16(factor)


def _nibbles(packed: Array) -> Array:
    """The 32 values of each block: 16 low nibbles, then 16 high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
