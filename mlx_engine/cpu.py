"""What makes MLX's CPU backend bearable: memory that stays mapped, and cheaper forms of a model's modules.

Each operation that MLX hands to its CPU thread costs about 5 us whatever its size, and a decode step of a small model
is thousands of them: the forms here use fewer. Only instances of the served model are changed; mlx-lm's own classes
and modules stay as they are.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import math
import sys
import types
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations

from mlx_engine.linear import QUERY_KEY_VALUE, fuse_projections, pack_linear, pack_tied_head
from mlx_engine.mathops import fast_swiglu
from mlx_engine.modules import inner_first, replace_module
from mlx_engine.native import NativeLibrary

logger = logging.getLogger(__name__)

# glibc's mallopt parameters, from <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

# Of x86-64 and of most ARM kernels; advice from <linux/mman.h>.
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25


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


def use_huge_pages(arrays: Iterable[mx.array]) -> int:
    """Moves the memory around these float32 arrays to pages of 2 MB where Linux allows it; how many bytes it asked for.

    With pages of 4 KB, reading all weights once a step spends 3 to 6 percent of it on finding them.
    """
    if not sys.platform.startswith("linux"):
        return 0
    large = [array for array in arrays if array.dtype == mx.float32 and array.nbytes >= _HUGE_PAGE]
    starts = [np.array(array, copy=False).ctypes.data for array in large]
    spans = sorted((start, start + array.nbytes) for start, array in zip(starts, large, strict=True))
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    asked = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        # An array may lie in several mappings, where a part of its memory was marked for a former owner.
        begun = bisect.bisect_left(spans, (high, 0))
        if begun == 0 or spans[begun - 1][1] <= low or permissions != "rw-p":
            continue
        low, high = -(-low // _HUGE_PAGE) * _HUGE_PAGE, high // _HUGE_PAGE * _HUGE_PAGE
        # A kernel that can't (before 6.1 it can't collapse) says so and leaves the pages as they are.
        if low < high and libc.madvise(low, high - low, _MADV_HUGEPAGE) == 0:
            libc.madvise(low, high - low, _MADV_COLLAPSE)
            asked += high - low
    return asked


def adapt_for_cpu(model: nn.Module, native: NativeLibrary | None = None) -> None:
    """Swaps norms, rotary embeddings, SwiGLU and Q/K/V projections of this model for forms that run faster here.

    With the native library all linear layers in float32 run on it, on weights that are packed once, here.
    """
    tables: dict[tuple[Any, ...], RotaryTable] = {}
    counts: Counter[str] = Counter()
    # Before anything else: the layers that are fused are not to be packed one by one.
    for _, module in inner_first(model):
        counts["fused projections"] += fuse_projections(module, QUERY_KEY_VALUE, native)
    for name, module in inner_first(model):
        if type(module) is nn.RoPE and not module.traditional:
            key = (module.dims, module.base, module.scale)
            replace_module(model, name, StepRoPE(module, tables.setdefault(key, RotaryTable(*key))))
            counts["rotary embeddings"] += 1
        elif type(module) is nn.RMSNorm:
            replace_module(model, name, PlainRMSNorm(module))
            counts["norms"] += 1
        elif native is not None and pack_linear(model, name, module, native):
            counts["linear layers"] += 1
        elif native is not None and pack_tied_head(module, native):
            counts["embeddings"] += 1
        else:
            counts["SwiGLU modules"] += _rebind_swiglu(module)
    logger.info(
        "CPU: swapped for faster forms: %s", ", ".join(f"{n} {what}" for what, n in counts.items() if n) or "nothing"
    )


class RotaryTable:
    """Cosines and sines of one step's positions, computed once and shared by all layers."""

    def __init__(self, dims: int, base: float, scale: float) -> None:
        half = dims // 2
        # In the order of mx.fast.rope's own arithmetic: at position 2,000 an angle shows each rounding.
        self._frequencies = mx.exp(-mx.arange(half, dtype=mx.float32) * (math.log(base) / half))
        self._scale = scale
        self._offset: mx.array | None = None
        self._pair: tuple[mx.array, mx.array] | None = None

    def __call__(self, offset: mx.array) -> tuple[mx.array, mx.array]:
        """For positions [T], [cos, cos] and [-sin, sin], both [T, 1, 1, 2, dims / 2]."""
        if self._pair is None or self._offset is not offset:
            positions = offset.astype(mx.float32)[:, None] * self._scale
            angle = (positions * self._frequencies)[:, None, None, None]
            cos, sin = mx.cos(angle), mx.sin(angle)
            self._offset = offset
            self._pair = mx.concatenate([cos, cos], axis=-2), mx.concatenate([-sin, sin], axis=-2)
        return self._pair


class StepRoPE(nn.Module):  # type: ignore[misc]
    """nn.RoPE that takes its angles from a shared table when it is given one position per row."""

    def __init__(self, original: nn.RoPE, table: RotaryTable) -> None:
        super().__init__()
        self.original = original
        self._table = table
        self._dims = original.dims

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotates x [T, heads, 1, head_dim] by positions [T]; anything else goes to nn.RoPE."""
        if not isinstance(offset, mx.array) or offset.ndim != 1 or x.shape[2] != 1 or x.dtype != mx.float32:
            return self.original(x, offset=offset)  # type: ignore[no-any-return]
        cos, sin = self._table(offset)
        head = x if self._dims == x.shape[-1] else x[..., : self._dims]
        pair = head.reshape(*x.shape[:3], 2, -1)
        # The halves in the other order are a view with a negative stride.
        rotated = _rotated(pair, pair[..., ::-1, :], cos, sin).reshape(head.shape)
        return rotated if head is x else mx.concatenate([rotated, x[..., self._dims :]], axis=-1)


@partial(mx.compile, shapeless=True)
def _rotated(pair: mx.array, swapped: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return pair * cos + swapped * sin


class PlainRMSNorm(nn.Module):  # type: ignore[misc]
    """nn.RMSNorm in five operations instead of the seven that MLX's CPU backend makes of it."""

    def __init__(self, original: nn.RMSNorm) -> None:
        super().__init__()
        self.weight = original.weight
        self.eps = original.eps
        self._constants = mx.array(1.0 / original.weight.size), mx.array(float(original.eps))

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., d], scaled to a root mean square of 1 along d, times the weight [d]."""
        if x.dtype != mx.float32:
            return mx.fast.rms_norm(x, self.weight, self.eps)
        scale = _inverse_root(mx.square(x).sum(axis=-1, keepdims=True), *self._constants)
        return x * scale * self.weight  # type: ignore[no-any-return]


@partial(mx.compile, shapeless=True)
def _inverse_root(total: mx.array, factor: mx.array, eps: mx.array) -> mx.array:
    return mx.rsqrt(total * factor + eps)


def _rebind_swiglu(module: nn.Module) -> bool:
    """Gives this instance a `__call__` that finds fast_swiglu under the name `swiglu`. False: it uses none."""
    cls = type(module)
    call = cls.__call__
    namespace = getattr(call, "__globals__", {})
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    if "swiglu" not in names or namespace.get("swiglu") is not activations.swiglu:
        return False
    rebound = types.FunctionType(
        call.__code__, {**namespace, "swiglu": fast_swiglu}, call.__name__, call.__defaults__, call.__closure__
    )
    rebound.__kwdefaults__ = call.__kwdefaults__
    module.__class__ = type(cls.__name__, (cls,), {"__call__": rebound, "__module__": cls.__module__})
    return True
