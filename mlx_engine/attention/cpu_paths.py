"""Attention for MLX's CPU backend in float32, where copies and `where` cost several times the arithmetic.

Both functions put the query heads that share a K/V head into the rows of one matrix, so that the products are large
and each key is read once for the group.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_engine.attention.pages import MASKED, Pages
from mlx_engine.attention.pool import LayerPool
from mlx_engine.mathops import fast_exp

# Scores of one tile of queries, per head of a group: small enough to stay in the cache between operations.
_TILE_SCORES = 196_608
_MIN_TILE = 32


def paged_matmul(queries: mx.array, pool: LayerPool, pages: Pages, scale: float, sinks: mx.array | None) -> mx.array:
    """Scores and sums page by page with `mx.gather_mm`; the softmax runs over all of a row's pages.

    The query heads that share a K/V head are the rows of one matrix, so each page is read once for the group; those of
    all rows that share a table are.
    """
    num_tables, num_pages = pages.block_tables.shape
    shared = queries.shape[0] // num_tables
    if pool.quantized:
        keys, values = (copied.flatten(0, 1) for copied in pool.pages(pages.block_tables))
        pages = Pages(mx.arange(num_tables * num_pages).reshape(num_tables, num_pages), pages.visible, pages.bias)
    else:
        keys, values = pool.blocks()
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    num_heads = queries.shape[1]
    group = num_heads // num_kv_heads
    row, page = pages.matrices(num_kv_heads)
    q = queries * scale
    if shared > 1:
        q = q.reshape(num_tables, shared, num_kv_heads, group, head_dim).swapaxes(1, 2)
    q = q.reshape(num_tables * num_kv_heads, shared * group, head_dim)
    k = keys.reshape(num_blocks * num_kv_heads, block_size, head_dim)
    v = values.reshape(num_blocks * num_kv_heads, block_size, -1)
    scores = mx.gather_mm(q, k.swapaxes(-1, -2), row, page)  # [B, P, Hkv, shared * group, block_size]
    scores = scores + pages.head_bias(group)
    top = scores.max(axis=(1, 4), keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(1, 1, num_kv_heads, group, 1)
        if shared > 1:
            sinks = mx.tile(sinks, (1, 1, 1, shared, 1))
        top = mx.maximum(top, sinks)
    weights = fast_exp(scores - top)
    total = weights.sum(axis=(1, 4))
    if sinks is not None:
        total = total + fast_exp(sinks - top).squeeze((1, 4))
    out = mx.gather_mm(weights, v, None, page)  # [B, P, Hkv, shared * group, head_dim]
    out = out.sum(axis=1) / total[..., None]
    if shared > 1:
        out = out.reshape(num_tables, num_kv_heads, shared, group, -1).swapaxes(1, 2)
    return out.reshape(queries.shape[0], num_heads, 1, -1)


def tiled_chunk(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention of the last n tokens of a sequence over all L of it, tile by tile of queries.

    queries [H, n, D], keys [num_kv_heads, L, D], values [num_kv_heads, L, Dv]; returns [H, n, Dv]. A tile sees all
    keys before it, without any mask, and itself through a triangle; both parts share one softmax.
    """
    num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    past = num_keys - num_queries
    q = (queries * scale).reshape(num_kv_heads, group, num_queries, head_dim)
    transposed = keys.swapaxes(-1, -2)
    tile = min(num_queries, max(_MIN_TILE, _TILE_SCORES // num_keys))
    parts = []
    for first in range(0, num_queries, tile):
        rows = min(tile, num_queries - first)
        before = past + first
        tile_q = q[:, :, first : first + rows].reshape(num_kv_heads, group * rows, head_dim)
        out = _tile(tile_q, transposed, values, rows, before)
        parts.append(out.reshape(num_kv_heads, group, rows, -1))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return out.reshape(num_heads, num_queries, -1)


def _tile(queries: mx.array, transposed: mx.array, values: mx.array, rows: int, before: int) -> mx.array:
    """One tile: queries [Hkv, group * rows, D] at positions `before` to `before + rows - 1` of the sequence."""
    scores = queries @ transposed[:, :, : before + rows]
    own_shape = (scores.shape[0], -1, rows, rows)
    triangle = mx.where(mx.arange(rows)[:, None] >= mx.arange(rows), 0.0, MASKED)
    own = (scores[:, :, before:].reshape(own_shape) + triangle).reshape(scores.shape[0], -1, rows)
    top = own.max(axis=-1, keepdims=True)
    if before:
        top = mx.maximum(top, scores[:, :, :before].max(axis=-1, keepdims=True))
    weights = fast_exp(own - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = weights @ values[:, before : before + rows]
    if before:
        weights = fast_exp(scores[:, :, :before] - top)
        total = total + weights.sum(axis=-1, keepdims=True)
        out = out + weights @ values[:, :before]
    return out / total
