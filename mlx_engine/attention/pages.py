"""What a part of a step reads of the pool, as indices on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

# Added to the scores of slots that a row must not see. Finite, so that a fully masked page gives no NaN.
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages that a group of decode rows reads, m rows each of B tables."""

    block_tables: mx.array  # [B, P]
    visible: mx.array  # [B, m, P * block_size] bool: the slots that the row sees
    bias: mx.array  # [B, P, 1, m, block_size] float32: 0 where visible
    _matrices: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    _biases: dict[int, mx.array] = field(default_factory=dict)

    def head_bias(self, group: int) -> mx.array:
        """The bias where a matrix has `group` heads a row: [B, P, 1, m * group, block_size], or what broadcasts so."""
        if self.bias.shape[3] == 1:
            return self.bias
        if group not in self._biases:
            self._biases[group] = mx.repeat(self.bias, group, axis=3)
        return self._biases[group]

    def matrices(self, num_kv_heads: int) -> tuple[mx.array, mx.array]:
        """For `mx.gather_mm`, both [B, P, num_kv_heads]: the query matrix of each row and head, and the page's."""
        if num_kv_heads not in self._matrices:
            num_rows, num_pages = self.block_tables.shape
            heads = mx.arange(num_kv_heads, dtype=mx.uint32)
            page = self.block_tables.astype(mx.uint32)[:, :, None] * num_kv_heads + heads
            row = (mx.arange(num_rows, dtype=mx.uint32) * num_kv_heads)[:, None, None] + heads
            shape = (num_rows, num_pages, num_kv_heads)
            self._matrices[num_kv_heads] = (mx.contiguous(mx.broadcast_to(row, shape)), page)
        return self._matrices[num_kv_heads]


@dataclass(frozen=True, slots=True)
class Context:
    """The pages that a prefill chunk reads, and how much of them."""

    block_table: mx.array  # [P]
    num_tokens: int  # keys from the first of these pages on
    mask: mx.array | str  # [n, num_tokens] bool, or "causal"
