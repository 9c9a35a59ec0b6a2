"""Linear layers: several of one input as one product, and weights packed once for the native CPU library."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_engine.modules import replace_module
from mlx_engine.native import NativeLibrary


class DenseLinear(nn.Module):  # type: ignore[misc]
    """x times the transpose of a weight [n, k], plus bias [n], by MLX's own product."""

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        super().__init__()
        self.transposed = weight.T
        self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., k]; returns [..., n]."""
        return self.columns(x, slice(None))

    def columns(self, x: mx.array, columns: slice) -> mx.array:
        """Some of the outputs only."""
        weight = self.transposed[:, columns]
        return x @ weight if self.bias is None else mx.addmm(self.bias[columns], x, weight)


class PackedLinear(nn.Module):  # type: ignore[misc]
    """The same on a weight packed for the native library; the weight itself is not kept. float32."""

    def __init__(self, native: NativeLibrary, weight: mx.array, bias: mx.array | None) -> None:
        super().__init__()
        self._native = native
        self.size = int(weight.shape[0])  # outputs
        self.packed = native.pack_weight(weight)
        self.bias = bias
        mx.eval(self.packed)

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., k]; returns [..., n]."""
        return self._native.packed_linear(x, self.packed, n=self.size, bias=self.bias)

    def columns(self, x: mx.array, columns: slice) -> mx.array:
        """Some of the outputs only."""
        first, last, _ = columns.indices(self.size)
        # The native library starts at whole panels.
        start = first - first % self._native.panel_width
        out = self._native.packed_linear(x, self.packed, n=last - start, first=start, bias=self.bias)
        return out[..., first - start :]


class FusedProjections(nn.Module):  # type: ignore[misc]
    """The weights of several linear layers of the same input as one matrix: one product instead of several.

    The layers are called one after the other with the same array; the first call computes all of them, each takes its
    columns. A call with another array than the first one's computes its own columns only.
    """

    def __init__(self, layers: Sequence[nn.Linear], native: NativeLibrary | None = None) -> None:
        super().__init__()
        sizes = [layer.weight.shape[0] for layer in layers]
        self._ends = list(itertools.accumulate(sizes))
        self._starts = [end - size for end, size in zip(self._ends, sizes, strict=True)]
        weight = mx.concatenate([layer.weight for layer in layers], axis=0)
        bias = mx.concatenate([layer.bias for layer in layers]) if "bias" in layers[0] else None
        self.linear: DenseLinear | PackedLinear
        if native is not None and weight.dtype == mx.float32:
            self.linear = PackedLinear(native, weight, bias)
        else:
            self.linear = DenseLinear(weight, bias)
        mx.eval(self.parameters())
        self._input: mx.array | None = None
        self._output: mx.array | None = None
        self._waiting: set[int] = set()

    def part(self, index: int, x: mx.array) -> mx.array:
        """The output [..., n] of layer `index` for x [..., d]."""
        columns = slice(self._starts[index], self._ends[index])
        if self._output is None or self._input is not x or index not in self._waiting:
            if index != 0:
                return self.linear.columns(x, columns)
            self._input, self._output = x, self.linear(x)
            self._waiting = set(range(len(self._ends)))
        out = self._output[..., columns]
        self._waiting.discard(index)
        if not self._waiting:
            self._input = self._output = None
        return out


class ProjectionPart(nn.Module):  # type: ignore[misc]
    """Stands where one of the fused linear layers was."""

    def __init__(self, fused: FusedProjections, index: int) -> None:
        super().__init__()
        self.fused = fused
        self._index = index

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., d] times this layer's weight, plus its bias: [..., n]."""
        return self.fused.part(self._index, x)


QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def fuse_projections(module: nn.Module, names: Sequence[str], native: NativeLibrary | None = None) -> bool:
    """Fuses this module's linear layers of these names. False: it hasn't all of them, or they don't fit together."""
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if any(type(layer) is not nn.Linear for layer in layers):
        return False
    if len({(layer.weight.shape[1], layer.weight.dtype, "bias" in layer) for layer in layers}) != 1:
        return False
    fused = FusedProjections(layers, native)
    for index, name in enumerate(names):
        setattr(module, name, ProjectionPart(fused, index))
    return True


def pack_linear(model: nn.Module, name: str, module: nn.Module, native: NativeLibrary) -> bool:
    """Puts a packed layer where `model` has this linear layer. False: it isn't one in float32."""
    if type(module) is not nn.Linear or module.weight.dtype != mx.float32:
        return False
    replace_module(model, name, PackedLinear(native, module.weight, module.get("bias")))
    return True


def pack_tied_head(module: nn.Module, native: NativeLibrary) -> bool:
    """Gives this embedding a packed copy of its weight, made when it is first used as the LM head.

    The rows themselves stay for looking tokens up. False: it isn't an embedding in float32.
    """
    if type(module) is not nn.Embedding or module.weight.dtype != mx.float32:
        return False

    def as_linear(x: mx.array) -> mx.array:
        if "head" not in module:
            module.head = PackedLinear(native, module.weight, None)
        return module.head(x)  # type: ignore[no-any-return]

    module.as_linear = as_linear
    return True
