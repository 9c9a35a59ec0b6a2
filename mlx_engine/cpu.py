"""What makes MLX's CPU backend bearable: memory that stays mapped, and cheaper forms of three operations.

Only instances of the served model are changed; mlx-lm's own classes and modules stay as they are.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import types
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from mlx_engine.mathops import fast_exp
from mlx_engine.modules import replace_module

logger = logging.getLogger(__name__)

# glibc's mallopt parameters, from <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Tells glibc to reuse large blocks instead of returning them to the kernel; False where that can't be done.

    MLX's CPU backend frees and allocates every intermediate array. Above 128 KB each would be a fresh mapping, and
    faulting its pages in costs several times the arithmetic (a 25 MB gather: 17 ms against 2.4 ms).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: (1 << 31) - 1, _M_TOP_PAD: 64 << 20}
    return all(mallopt(parameter, value) == 1 for parameter, value in settings.items())


def adapt_for_cpu(model: nn.Module) -> None:
    """Swaps rotary embeddings and SwiGLU of this model for forms that MLX's CPU backend runs faster."""
    tables: dict[tuple[Any, ...], RotaryTable] = {}
    ropes = gates = 0
    for name, module in list(model.named_modules()):
        if type(module) is nn.RoPE and not module.traditional:
            key = (module.dims, module.base, module.scale)
            replace_module(model, name, StepRoPE(module, tables.setdefault(key, RotaryTable(*key))))
            ropes += 1
        else:
            gates += _rebind_swiglu(module)
    logger.info("CPU: %d rotary embeddings and %d SwiGLU modules swapped for faster forms", ropes, gates)


class RotaryTable:
    """Cosines and sines of one step's positions, computed once and shared by all layers."""

    def __init__(self, dims: int, base: float, scale: float) -> None:
        half = dims // 2
        self._frequencies = mx.power(base, -mx.arange(half, dtype=mx.float32) / half) * scale
        self._offset: mx.array | None = None
        self._pair: tuple[mx.array, mx.array] | None = None

    def __call__(self, offset: mx.array) -> tuple[mx.array, mx.array]:
        """Cosines and sines [T, 1, 1, dims / 2] for positions [T]."""
        if self._pair is None or self._offset is not offset:
            angle = (offset.astype(mx.float32)[:, None] * self._frequencies)[:, None, None]
            self._offset, self._pair = offset, (mx.cos(angle), mx.sin(angle))
        return self._pair


class StepRoPE(nn.Module):  # type: ignore[misc]
    """nn.RoPE that takes its angles from a shared table when it is given one position per row."""

    def __init__(self, original: nn.RoPE, table: RotaryTable) -> None:
        super().__init__()
        self.original = original
        self._table = table
        self._half = original.dims // 2

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotates x [T, heads, 1, head_dim] by positions [T]; anything else goes to nn.RoPE."""
        if not isinstance(offset, mx.array) or offset.ndim != 1 or x.shape[2] != 1 or x.dtype != mx.float32:
            return self.original(x, offset=offset)  # type: ignore[no-any-return]
        cos, sin = self._table(offset)
        half = self._half
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = [first * cos - second * sin, first * sin + second * cos]
        if 2 * half < x.shape[-1]:
            parts.append(x[..., 2 * half :])
        return mx.concatenate(parts, axis=-1)


def fast_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x. In float32 from fast_exp: MLX's CPU sigmoid costs several times as much."""
    if gate.dtype != mx.float32:
        return activations.swiglu(gate, x)  # type: ignore[no-any-return]
    return _gated(gate, x, fast_exp(mx.minimum(-gate, 87.0)))


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, x: mx.array, exp_minus_gate: mx.array) -> mx.array:
    return gate * x / (1.0 + exp_minus_gate)


def _rebind_swiglu(module: nn.Module) -> bool:
    """Gives this instance a `__call__` that finds fast_swiglu under the name `swiglu`. False: it uses none."""
    cls = type(module)
    call = cls.__call__
    namespace = getattr(call, "__globals__", {})
    if "swiglu" not in call.__code__.co_names or namespace.get("swiglu") is not activations.swiglu:
        return False
    rebound = types.FunctionType(
        call.__code__, {**namespace, "swiglu": fast_swiglu}, call.__name__, call.__defaults__, call.__closure__
    )
    rebound.__kwdefaults__ = call.__kwdefaults__
    module.__class__ = type(cls.__name__, (cls,), {"__call__": rebound, "__module__": cls.__module__})
    return True
