"""A decoder layer of the Llama family in as few kernels as we can: a small step costs a GPU mostly their number.

With few rows every product is a kernel of ours that takes in what goes before and after it (norm, gate, residual): five
kernels a layer with one row, attention included. With more rows the products are MLX's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_engine.attention.kernels.gemv import (
    MAX_GEMV_ROWS,
    MAX_SKINNY_ROWS,
    Norm,
    Rotation,
    gate,
    gemv,
    rotate,
    skinny_gemm,
    skinny_gemm_takes,
)

# Modules whose TransformerBlock computes x + attention(norm(x)), then h + down(silu(gate(n)) * up(n)) with n = norm(h).
_MODULES = ("mlx_lm.models.llama", "mlx_lm.models.qwen2", "mlx_lm.models.qwen3")


# With which skinny_gemm is checked.
_CHECKED_ROWS = 3


class FusedDecoderBlock(nn.Module):  # type: ignore[misc]
    """Stands where a TransformerBlock was, for rows [T, 1, d] on a paged view."""

    def __init__(self, block: Any, tables: RotaryTables) -> None:
        super().__init__()
        attention, mlp = block.self_attn, block.mlp
        self.use_sliding = getattr(block, "use_sliding", False)  # LlamaModel asks its layers
        self.query_key_value = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        self.input_layernorm = block.input_layernorm
        self.post_attention_layernorm = block.post_attention_layernorm
        self.head_norms = [attention.q_norm, attention.k_norm] if "q_norm" in attention else None
        self.rope = attention.rope
        self._num_heads: int = attention.n_heads
        self._num_kv_heads: int = attention.n_kv_heads
        self._scale: float = attention.scale
        self.choose_products()
        self._angles = None if self.head_norms else tables.of(self.rope, self._head_dim)
        mx.eval(self.parameters())

    @staticmethod
    def takes(block: Any) -> bool:
        """Whether this module can be replaced by one of these: a block of the family, with dense weights."""
        if type(block).__name__ != "TransformerBlock" or type(block).__module__ not in _MODULES:
            return False
        attention, mlp = block.self_attn, block.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
        if len({linear.weight.dtype for linear in linears}) != 1 or "bias" in mlp.gate_proj or "bias" in mlp.up_proj:
            return False
        if len({"bias" in linear for linear in linears[:3]}) != 1:
            return False
        dtype = attention.q_proj.weight.dtype
        pieces = 16 // dtype.size
        norms = (block.input_layernorm, block.post_attention_layernorm)
        return (
            all(type(norm) is nn.RMSNorm and norm.weight.dtype == dtype for norm in norms)
            and all(linear.weight.shape[1] % pieces == 0 for linear in linears)
            and all(linear.weight.shape[0] % 2 == 0 for linear in linears)
        )

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """x [T, 1, d]; returns the same shape."""
        rows = x.squeeze(1)
        attended = self._attend(rows, mask, cache)
        product = self._product(rows.shape[0])
        if product is None:
            hidden = _add_product(rows, attended, self.output)
            normed = self.post_attention_layernorm(hidden)
            both = normed @ self.gate_up.weight.T
            return _add_product(hidden, gate(both), self.down)[:, None]
        hidden = product(attended, self.output.weight, bias=self.output.get("bias"), residual=rows)
        gated = product(hidden, self.gate_up.weight, norm=_norm(self.post_attention_layernorm), gated=True)
        return product(gated, self.down.weight, bias=self.down.get("bias"), residual=hidden)[:, None]

    def choose_products(self) -> None:
        """By what this device has."""
        products = (self.query_key_value, self.output, self.gate_up, self.down)
        self.takes_skinny = all(skinny_gemm_takes(linear.weight) for linear in products)
        self.set_rows(*((1, MAX_SKINNY_ROWS) if self.takes_skinny else (MAX_GEMV_ROWS, 0)))

    def set_rows(self, most_gemv: int, most_skinny: int) -> None:
        """Up to how many rows products are gemv's, and up to how many skinny_gemm's; beyond, they are MLX's."""
        self._most_gemv_rows, self._most_skinny_rows = most_gemv, most_skinny

    def skinny_error(self) -> float:
        """How far this block is, with skinny_gemm's products, from itself with MLX's: relative, of a few random rows.

        RuntimeError where they can't be compiled.
        """
        rows = self._most_gemv_rows, self._most_skinny_rows
        # Small beside what the layer adds to it: the norms make up for that.
        x = mx.random.normal((_CHECKED_ROWS, 1, self.output.weight.shape[0]), key=mx.random.key(0)) / 64
        x = x.astype(self.output.weight.dtype)
        outs = []
        try:
            for most in (0, _CHECKED_ROWS):
                self.set_rows(0, most)
                outs.append((self(x, None, _NoAttention(_CHECKED_ROWS)) - x).astype(mx.float32))
        finally:
            self.set_rows(*rows)
        return float(abs((mx.linalg.norm(outs[1] - outs[0]) / mx.linalg.norm(outs[0])).item()))

    def _product(self, num_rows: int) -> Callable[..., mx.array] | None:
        """What multiplies so many rows with a weight; None for MLX's own."""
        if num_rows <= self._most_gemv_rows:
            return gemv
        return skinny_gemm if num_rows <= self._most_skinny_rows else None

    @property
    def _head_dim(self) -> int:
        return int(self.query_key_value.weight.shape[0]) // (self._num_heads + 2 * self._num_kv_heads)

    def _attend(self, rows: mx.array, mask: Any, cache: Any) -> mx.array:
        """Attention over rows [T, d]: [T, num_heads * head_dim]."""
        weight, bias = self.query_key_value.weight, self.query_key_value.get("bias")
        num_heads, num_kv_heads, dim = self._num_heads, self._num_kv_heads, self._head_dim
        rotation, later = None, {}
        if self._angles is not None:
            rotation = Rotation(*self._angles(cache.offset), num_heads + num_kv_heads)
        product = self._product(rows.shape[0])
        if product is gemv:
            joined = rotated = gemv(rows, weight, norm=_norm(self.input_layernorm), bias=bias, rotation=rotation)
        else:
            if product is not None:
                joined = product(rows, weight, norm=_norm(self.input_layernorm), bias=bias)
            else:
                normed = self.input_layernorm(rows)
                joined = normed @ weight.T if bias is None else mx.addmm(bias, normed, weight.T)
            rotated = joined
            if rotation is not None and cache.rotates(num_heads):
                later = {"rotation": (rotation.cosines, rotation.sines)}
            elif rotation is not None:
                rotated = rotate(joined, rotation)
        first_key, first_value = num_heads * dim, (num_heads + num_kv_heads) * dim
        queries = rotated[:, :first_key].reshape(-1, num_heads, 1, dim)
        keys = rotated[:, first_key:first_value].reshape(-1, num_kv_heads, 1, dim)
        values = joined[:, first_value:].reshape(-1, num_kv_heads, 1, dim)
        if self.head_norms is not None:
            queries, keys = self.head_norms[0](queries), self.head_norms[1](keys)
        if rotation is None:
            queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
        cache.update_and_fetch(keys, values)
        out: mx.array = cache.attend(queries, scale=self._scale, mask=mask, sinks=None, **later)
        return out.reshape(-1, num_heads * dim)


class _NoAttention:
    """A cache whose attention gives the queries back."""

    def __init__(self, num_rows: int) -> None:
        self.offset = mx.zeros((num_rows,), mx.int32)

    def rotates(self, num_heads: int) -> bool:
        del num_heads
        return False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(self, queries: mx.array, **_: Any) -> mx.array:
        return mx.contiguous(queries)  # products take whole rows


def _joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer that gives what these give, one after the other."""
    joined = nn.Linear(1, 1, bias=False)
    joined.weight = mx.concatenate([layer.weight for layer in layers], axis=0)
    if "bias" in layers[0]:
        joined.bias = mx.concatenate([layer.bias for layer in layers])
    return joined


def _norm(norm: nn.RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _add_product(residual: mx.array, x: mx.array, linear: nn.Linear) -> mx.array:
    out = mx.addmm(residual, x, linear.weight.T)
    return out + linear.bias if "bias" in linear else out


class RotaryTable:
    """Cosines and sines of a step's positions, computed once for all layers that use them."""

    def __init__(self, inv_freqs: mx.array) -> None:
        self.inv_freqs = inv_freqs  # [head_dim / 2] float32, radians a position
        self.num_layers = 0
        self._remaining = 0
        self._positions: mx.array | None = None
        self._table: tuple[mx.array, mx.array] | None = None

    def __call__(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Both [T, head_dim / 2] float32, for positions [T]."""
        if self._table is None or self._positions is not positions:
            angles = positions[:, None].astype(mx.float32) * self.inv_freqs
            self._positions, self._table = positions, (mx.cos(angles), mx.sin(angles))
            self._remaining = self.num_layers
        table = self._table
        self._remaining -= 1
        if self._remaining == 0:
            # Nothing of a step outlives it.
            self._positions = self._table = None
        return table


class RotaryTables:
    """The tables of a model: one for all of its layers, mostly."""

    def __init__(self) -> None:
        self._tables: list[RotaryTable] = []

    def of(self, rope: nn.Module, head_dim: int) -> RotaryTable | None:
        """The table for one more layer with this embedding; None for embeddings of another kind."""
        inv_freqs = _inverse_frequencies(rope, head_dim)
        if inv_freqs is None:
            return None
        for known in self._tables:
            if mx.array_equal(known.inv_freqs, inv_freqs):
                break
        else:
            known = RotaryTable(inv_freqs)
            self._tables.append(known)
        known.num_layers += 1
        return known


def _inverse_frequencies(rope: nn.Module, head_dim: int) -> mx.array | None:
    """Radians a position of each pair of a head's columns, float32; None for embeddings of another kind."""
    if getattr(rope, "dims", None) != head_dim or getattr(rope, "traditional", True):
        return None
    if type(rope) is nn.RoPE:
        exponents = mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim
        inv_freqs: mx.array = rope.scale * rope.base**-exponents
        return inv_freqs
    return 1.0 / rope._freqs.astype(mx.float32) if type(rope) is Llama3RoPE else None
