"""The `gather` backend: pages are collected through the block table, then attended to with MLX's own operations.

The pool of one layer is [num_blocks + 1, num_kv_heads, block_size, head_dim], so that one head's part of a block is one
contiguous matrix. Three paths, counted by name:

- `gather_sdpa`: decode rows; pages copied into a dense tensor, then `mx.fast.scaled_dot_product_attention`.
- `paged_matmul`: decode rows on the CPU in float32; `mx.gather_mm` multiplies the pages where they lie, by index. MLX's
  copies cost several times the arithmetic there.
- `chunk_sdpa`: prefill chunks; each sequence's context gathered once, then MLX's attention with its causal mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlx_engine.attention.dispatch import PagedMask, PagedView, narrower
from mlx_engine.input_batch import DecodeGroup, InputBatch, PrefillChunk
from mlx_engine.interfaces import INTERFACE_VERSION
from mlx_engine.mathops import exp_difference
from mlx_engine.types import LayerKVSpec

# Added to the scores of slots that a row must not see. Finite, so that a fully masked page gives no NaN.
_MASKED = -1e30


class GatherBackend:
    """K/V pools as plain MLX arrays, read by gathering."""

    interface_version = INTERFACE_VERSION

    def __init__(self, *, decode: Literal["auto", "gather_sdpa", "paged_matmul"] = "auto") -> None:
        if decode not in ("auto", "gather_sdpa", "paged_matmul"):
            raise ValueError(f"decode must be auto, gather_sdpa or paged_matmul, not {decode!r}")
        self._decode = decode
        self._layers: Sequence[LayerKVSpec] = ()
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._num_blocks = 0
        self._block_size = 0
        self._counts: Counter[str] = Counter()

    def initialize(self, layers: Sequence[LayerKVSpec], num_blocks: int, block_size: int, dtype: mx.Dtype) -> None:
        """See AttentionBackend."""
        self._layers = tuple(layers)
        self._num_blocks = num_blocks + 1  # and the scratch block
        self._block_size = block_size
        if self._decode == "auto":
            on_cpu = mx.default_device() == mx.Device(mx.cpu)
            self._decode = "paged_matmul" if on_cpu and dtype == mx.float32 else "gather_sdpa"
        for spec in self._layers:
            rows = self._num_blocks * spec.num_kv_heads * block_size
            self._keys.append(mx.zeros((rows, spec.key_head_dim), dtype))
            self._values.append(mx.zeros((rows, spec.value_head_dim), dtype))
        mx.eval(self._keys, self._values)

    def begin_step(self, batch: InputBatch) -> list[PagedView]:
        """See AttentionBackend."""
        step = _Step(batch, self._block_size)
        offset = mx.array(batch.positions)
        return [_GatherView(self, step, layer, offset) for layer in range(len(self._layers))]

    def state(self) -> list[mx.array]:
        """See AttentionBackend."""
        return [*self._keys, *self._values]

    def dispatch_counts(self) -> Mapping[str, int]:
        """See AttentionBackend."""
        return dict(self._counts)

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Puts keys and values [T, num_kv_heads, head_dim] at the pool rows slots [T, num_kv_heads]."""
        # In place as long as nothing else holds the buffer: the step before has ended when this one is launched.
        self._keys[layer][slots] = keys
        self._values[layer][slots] = values

    def pool(self, layer: int) -> tuple[mx.array, mx.array]:
        """The layer's keys and values as [num_blocks + 1, num_kv_heads, block_size, head_dim]."""
        shape = (self._num_blocks, self._layers[layer].num_kv_heads, self._block_size, -1)
        return self._keys[layer].reshape(shape), self._values[layer].reshape(shape)

    def attend(
        self, layer: int, step: _Step, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of queries [T, num_heads, 1, head_dim] over each row's sequence, same shape back."""
        keys, values = self.pool(layer)
        parts = []
        for group in step.batch.decode_groups:
            rows = queries if len(group.rows) == queries.shape[0] else queries[step.rows(group)]
            run = _paged_matmul if self._decode == "paged_matmul" else _gather_sdpa
            self._counts[self._decode] += 1
            parts.append(run(rows, keys, values, step.pages(group, window), scale, sinks))
        for chunk in step.batch.prefill_chunks:
            self._counts["chunk_sdpa"] += 1
            rows = queries[chunk.first_row : chunk.first_row + chunk.num_tokens]
            parts.append(_chunk_sdpa(rows, keys, values, step.context(chunk, window), scale, sinks))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return out if step.order is None else out[step.order]


class _GatherView(PagedView):
    """One layer's cache for one step."""

    __slots__ = ("_backend", "_layer", "_step")

    def __init__(self, backend: GatherBackend, step: _Step, layer: int, offset: mx.array) -> None:
        self.offset = offset
        self._backend = backend
        self._step = step
        self._layer = layer

    @property
    def _spec(self) -> LayerKVSpec:
        return self._backend._layers[self._layer]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> PagedMask:
        return PagedMask(narrower(window_size, self._spec.sliding_window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        slots = self._step.slots(self._spec.num_kv_heads)
        self._backend.write(self._layer, slots, keys.squeeze(2), values.squeeze(2))
        return keys, values

    def attend(self, queries: Any, *, scale: float, mask: Any, sinks: Any | None) -> Any:
        window = narrower(mask.window, self._spec.sliding_window)
        return self._backend.attend(self._layer, self._step, queries, scale, window, sinks)


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages that a group of decode rows reads."""

    block_tables: mx.array  # [B, P]
    visible: mx.array  # [B, P, block_size] bool: the slots that the row sees
    bias: mx.array  # [B, P, 1, 1, block_size] float32: 0 where visible
    derived: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)

    def matrices(self, num_kv_heads: int) -> tuple[mx.array, mx.array]:
        """For `mx.gather_mm`, both [B, P, num_kv_heads]: the query matrix of each row and head, and the page's."""
        if num_kv_heads not in self.derived:
            num_rows, num_pages = self.block_tables.shape
            heads = mx.arange(num_kv_heads, dtype=mx.uint32)
            page = self.block_tables.astype(mx.uint32)[:, :, None] * num_kv_heads + heads
            row = (mx.arange(num_rows, dtype=mx.uint32) * num_kv_heads)[:, None, None] + heads
            shape = (num_rows, num_pages, num_kv_heads)
            self.derived[num_kv_heads] = (mx.contiguous(mx.broadcast_to(row, shape)), page)
        return self.derived[num_kv_heads]


@dataclass(frozen=True, slots=True)
class _Context:
    """The pages that a prefill chunk reads, and how much of them."""

    block_table: mx.array  # [P]
    num_tokens: int  # keys from the first of these pages on
    mask: mx.array | str  # [n, num_tokens] bool, or "causal"


@dataclass(slots=True)
class _Step:
    """A batch's indices on the device, made once and shared by the layers that need the same."""

    batch: InputBatch
    block_size: int
    order: mx.array | None = field(init=False)  # [T] puts the parts' rows back in batch order; None: they are
    _cache: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = self.batch.decode_groups
        order = np.concatenate([g.rows for g in groups]) if groups else np.zeros(0, np.int32)
        inverse = np.arange(self.batch.num_rows, dtype=np.int32)
        inverse[order] = np.arange(len(order), dtype=np.int32)
        in_order = bool((inverse == np.arange(len(inverse))).all())
        self.order = None if in_order else mx.array(inverse)

    def rows(self, group: DecodeGroup) -> mx.array:
        key = ("rows", id(group))
        if key not in self._cache:
            self._cache[key] = mx.array(group.rows)
        return self._cache[key]  # type: ignore[no-any-return]

    def slots(self, num_kv_heads: int) -> mx.array:
        """[T, num_kv_heads] pool rows that the step writes."""
        key = ("slots", num_kv_heads)
        if key not in self._cache:
            block, offset = np.divmod(self.batch.slot_mapping, self.block_size)
            heads = np.arange(num_kv_heads)
            rows = (block[:, None] * num_kv_heads + heads) * self.block_size + offset[:, None]
            self._cache[key] = mx.array(rows.astype(np.uint32))
        return self._cache[key]  # type: ignore[no-any-return]

    def pages(self, group: DecodeGroup, window: int | None) -> _Pages:
        key = ("pages", id(group), window)
        if key not in self._cache:
            self._cache[key] = _pages(group, window, self.block_size)
        return self._cache[key]  # type: ignore[no-any-return]

    def context(self, chunk: PrefillChunk, window: int | None) -> _Context:
        key = ("context", id(chunk), window)
        if key not in self._cache:
            self._cache[key] = _context(chunk, window, self.block_size)
        return self._cache[key]  # type: ignore[no-any-return]


def _pages(group: DecodeGroup, window: int | None, block_size: int) -> _Pages:
    tables, lens = group.block_tables, group.seq_lens
    # Pages that lie wholly before the window are left out.
    first_token = np.maximum(lens - window, 0) if window is not None else np.zeros_like(lens)
    first_page = first_token // block_size
    if first_page.any():
        num_pages = int((-(-lens // block_size) - first_page).max())
        columns = np.minimum(first_page[:, None] + np.arange(num_pages), tables.shape[1] - 1)
        tables = np.take_along_axis(tables, columns, axis=1)
    slots = first_page[:, None] * block_size + np.arange(tables.shape[1] * block_size)
    visible = (slots < lens[:, None]) & (slots >= first_token[:, None])
    visible = visible.reshape(*tables.shape, block_size)
    bias = np.where(visible, 0.0, _MASKED).astype(np.float32)[:, :, None, None]
    return _Pages(mx.array(tables), mx.array(visible), mx.array(bias))


def _context(chunk: PrefillChunk, window: int | None, block_size: int) -> _Context:
    if window is None or chunk.seq_len <= window:
        return _Context(mx.array(chunk.block_table), chunk.seq_len, "causal")
    first_page = max(chunk.start - window + 1, 0) // block_size
    first = first_page * block_size
    query = np.arange(chunk.start, chunk.seq_len)[:, None]
    key = np.arange(first, chunk.seq_len)[None]
    mask = (key <= query) & (key > query - window)
    return _Context(mx.array(chunk.block_table[first_page:]), chunk.seq_len - first, mx.array(mask))


def _gather_sdpa(
    queries: mx.array, keys: mx.array, values: mx.array, pages: _Pages, scale: float, sinks: mx.array | None
) -> mx.array:
    num_rows, num_pages = pages.block_tables.shape
    num_kv_heads, block_size = keys.shape[1:3]
    shape = (num_rows, num_kv_heads, num_pages * block_size, -1)
    k = keys[pages.block_tables].transpose(0, 2, 1, 3, 4).reshape(shape)
    v = values[pages.block_tables].transpose(0, 2, 1, 3, 4).reshape(shape)
    mask = pages.visible.reshape(num_rows, 1, 1, -1)
    return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask, sinks=sinks)


def _paged_matmul(
    queries: mx.array, keys: mx.array, values: mx.array, pages: _Pages, scale: float, sinks: mx.array | None
) -> mx.array:
    """Scores and sums page by page with `mx.gather_mm`; the softmax runs over all of a row's pages.

    The query heads that share a K/V head are the rows of one matrix, so each page is read once for the group.
    """
    num_rows = queries.shape[0]
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    num_heads = queries.shape[1]
    group = num_heads // num_kv_heads
    row, page = pages.matrices(num_kv_heads)
    q = (queries * scale).reshape(num_rows * num_kv_heads, group, head_dim)
    k = keys.reshape(num_blocks * num_kv_heads, block_size, head_dim)
    v = values.reshape(num_blocks * num_kv_heads, block_size, -1)
    scores = mx.gather_mm(q, k.swapaxes(-1, -2), row, page)  # [B, P, Hkv, group, block_size]
    scores = scores + pages.bias
    top = scores.max(axis=(1, 4), keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(1, 1, num_kv_heads, group, 1)
        top = mx.maximum(top, sinks)
    weights = exp_difference(scores, top)
    total = weights.sum(axis=(1, 4))
    if sinks is not None:
        total = total + exp_difference(sinks, top).squeeze((1, 4))
    out = mx.gather_mm(weights, v, None, page)  # [B, P, Hkv, group, head_dim]
    return (out.sum(axis=1) / total[..., None]).reshape(num_rows, num_heads, 1, -1)


def _chunk_sdpa(
    queries: mx.array, keys: mx.array, values: mx.array, context: _Context, scale: float, sinks: mx.array | None
) -> mx.array:
    num_kv_heads = keys.shape[1]
    k = keys[context.block_table].transpose(1, 0, 2, 3).reshape(1, num_kv_heads, -1, keys.shape[3])
    v = values[context.block_table].transpose(1, 0, 2, 3).reshape(1, num_kv_heads, -1, values.shape[3])
    k, v = k[:, :, : context.num_tokens], v[:, :, : context.num_tokens]
    q = queries.squeeze(2).transpose(1, 0, 2)[None]  # [1, H, n, D]
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=context.mask, sinks=sinks)
    return out[0].transpose(1, 0, 2)[:, :, None]
