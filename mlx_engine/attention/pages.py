"""What a part of a step reads of the pool, as indices on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

# Added to the scores of slots that a row must not see. Finite, so that a fully masked page gives no NaN.
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages that a group of decode rows reads."""

    block_tables: mx.array  # [B, P]
    visible: mx.array  # [B, P, block_size] bool: the slots that the row sees
    bias: mx.array  # [B, P, 1, 1, block_size] float32: 0 where visible
    _matrices: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)

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
