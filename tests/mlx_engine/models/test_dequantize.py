from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_engine.models.dequantize import dequantize_layers

MODES = [("affine", 64, 4), ("affine", 32, 8), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.linear = nn.Linear(64, 32)
        self.experts = SwitchLinear(64, 32, 3)
        self.heads = MultiLinear(64, 32, 2)
        self.norm = nn.RMSNorm(64)


@pytest.mark.parametrize(("mode", "group_size", "bits"), MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_layers_of_every_kind_and_mode_hold_the_stored_numbers(
    mode: str, group_size: int, bits: int, dtype: mx.Dtype
) -> None:
    model = _Layers()
    model.update(nn.utils.tree_map(lambda x: x.astype(mx.float16), model.parameters()))
    nn.quantize(model, group_size, bits, mode=mode)
    names = ("embedding", "linear", "experts", "heads")
    quantized: dict[str, Any] = {name: model[name] for name in names}
    seen: list[float] = []

    assert dequantize_layers(model, dtype, seen.append) == 4

    assert seen == [0.25, 0.5, 0.75, 1.0]
    for name in names:
        layer, dense = quantized[name], model[name]
        assert type(dense).__name__ == type(layer).__name__.removeprefix("Quantized")
        floats = [None if part is None else part.astype(mx.float32) for part in (layer.scales, layer.biases)]
        scales, biases = floats if mode == "affine" else (layer.scales, None)
        expected = mx.dequantize(layer.weight, scales, biases, group_size, bits, mode, dtype=mx.float32)
        assert dense.weight.dtype == dtype
        assert mx.array_equal(dense.weight, expected.astype(dtype))
        assert ("bias" in dense) == ("bias" in layer)
    assert mx.array_equal(model.linear.bias, quantized["linear"].bias.astype(dtype))
    tokens = model.embedding(mx.array([1, 2]))
    assert model.linear(tokens).shape == (2, 32)
    assert model.experts(tokens[:, None, None, :], mx.array([[0], [2]])).shape[-1] == 32


def test_dense_model_is_left_alone() -> None:
    model = _Layers()
    before = model.linear
    assert dequantize_layers(model, mx.float32, lambda _: None) == 0
    assert model.linear is before
