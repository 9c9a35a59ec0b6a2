"""Replaces quantized layers by dense ones: MLX's CPU backend runs quantized products one scalar at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

_LAYERS = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear)


def dequantize_layers(model: nn.Module, dtype: mx.Dtype, progress: Callable[[float], None]) -> int:
    """Makes every quantized layer of the model dense, in place; returns how many there were.

    Computes in float32, so the numbers are exactly the stored ones, then casts to dtype. One layer at a time: the peak
    is the dense model and one quantized layer.
    """
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)]
    for done, (name, module) in enumerate(quantized):
        dense = _dense(module, dtype)
        mx.eval(dense.parameters())
        model.update_modules(tree_unflatten([(name, dense)]))
        progress((done + 1) / len(quantized))
    return len(quantized)


def _dense(module: Any, dtype: mx.Dtype) -> nn.Module:
    weight = _weight(module).astype(dtype)
    # The constructors fill the weights with random numbers, lazily: replaced before they are ever computed.
    if isinstance(module, nn.QuantizedEmbedding):
        dense = nn.Embedding(*weight.shape)
    elif isinstance(module, QuantizedSwitchLinear):
        experts, outputs, inputs = weight.shape
        dense = SwitchLinear(inputs, outputs, experts, bias="bias" in module)
    elif isinstance(module, QuantizedMultiLinear):
        heads, outputs, inputs = weight.shape
        dense = MultiLinear(inputs, outputs, heads)
    else:
        outputs, inputs = weight.shape
        dense = nn.Linear(inputs, outputs, bias="bias" in module)
    dense.weight = weight
    if "bias" in module:
        dense.bias = module.bias.astype(dtype)
    return dense


def _weight(module: Any) -> mx.array:
    affine = module.mode == "affine"
    return mx.dequantize(
        module.weight,
        # Other modes keep their scales in formats of eight bits.
        module.scales.astype(mx.float32) if affine else module.scales,
        module.biases.astype(mx.float32) if affine else None,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )
