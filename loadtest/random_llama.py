"""A Llama with random weights, as mlx-lm builds it. Imports nothing of our engine: mlx-lm's arm uses it too."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from loadtest.gpu import on_gpu


def random_llama(config: dict[str, Any], dtype: mx.Dtype) -> Any:
    """The model of a config.json, its weights drawn by MLX and evaluated."""
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    # One at a time: they are drawn as float32, and all of those at once would take twice the model's memory.
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
    mx.clear_cache()
    return model


def device_dtype() -> mx.Dtype:
    """bfloat16, but float32 on a CPU, where MLX is slow at 16 bits."""
    return mx.bfloat16 if on_gpu() else mx.float32
