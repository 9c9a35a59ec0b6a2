"""The `gather` backend: pages are collected through the block table, then attended to with MLX's own operations.

The pool of one layer is [num_blocks + 1, num_kv_heads, block_size, head_dim], so that one head's part of a block is one
contiguous matrix. What is read of a pool of 8-bit integers is copied out of it as numbers of the model's type. The
paths, counted by name:

- `gather_sdpa`: decode rows; pages copied into a dense tensor, then `mx.fast.scaled_dot_product_attention`.
- `paged_matmul`: decode rows on the CPU in float32; the pages are multiplied where they lie (8-bit ones: copies).
- `chunk_sdpa`: prefill chunks; each sequence's context gathered once, then MLX's attention with its causal mask.
- `chunk_tiled`: the same on the CPU in float32, in tiles of queries (see cpu_paths.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlx_engine.attention.cpu_paths import paged_matmul, tiled_chunk
from mlx_engine.attention.dispatch import PagedMask, PagedView, narrower
from mlx_engine.attention.pages import MASKED, Context, Pages
from mlx_engine.attention.pool import LayerPool
from mlx_engine.input_batch import DecodeGroup, InputBatch, PrefillChunk
from mlx_engine.interfaces import INTERFACE_VERSION
from mlx_engine.types import LayerKVSpec


class GatherBackend:
    """K/V pools as plain MLX arrays, read by gathering."""

    interface_version = INTERFACE_VERSION

    def __init__(self, *, decode: Literal["auto", "gather_sdpa", "paged_matmul"] = "auto") -> None:
        if decode not in ("auto", "gather_sdpa", "paged_matmul"):
            raise ValueError(f"decode must be auto, gather_sdpa or paged_matmul, not {decode!r}")
        self._decode = decode
        self._layers: Sequence[LayerKVSpec] = ()
        self._pools: list[LayerPool] = []
        self._block_size = 0
        self._counts: Counter[str] = Counter()

    def initialize(
        self,
        layers: Sequence[LayerKVSpec],
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        kv_dtype: mx.Dtype | None = None,
    ) -> None:
        """See AttentionBackend."""
        self._layers = tuple(layers)
        self._block_size = block_size
        if self._decode == "auto":
            on_cpu = mx.default_device() == mx.Device(mx.cpu)
            self._decode = "paged_matmul" if on_cpu and dtype == mx.float32 else "gather_sdpa"
        # One block more, for scratch.
        self._pools = [
            LayerPool.zeros(spec, num_blocks + 1, block_size, dtype, kv_dtype or dtype) for spec in self._layers
        ]
        mx.eval([[*pool.arrays(), pool.key_scales, pool.value_scales] for pool in self._pools])

    def begin_step(self, batch: InputBatch) -> list[PagedView]:
        """See AttentionBackend."""
        step = GatherStep(batch, self._block_size)
        offset = mx.array(batch.positions)
        return [GatherView(self, step, layer, offset) for layer in range(len(self._layers))]

    def state(self) -> list[mx.array]:
        """See AttentionBackend."""
        return [array for pool in self._pools for array in pool.arrays()]

    def dispatch_counts(self) -> Mapping[str, int]:
        """See AttentionBackend."""
        return dict(self._counts)

    def spec(self, layer: int) -> LayerKVSpec:
        """What the layer stores of a token."""
        return self._layers[layer]

    def pool(self, layer: int) -> LayerPool:
        """The layer's keys and values."""
        return self._pools[layer]

    def attend(
        self, layer: int, step: GatherStep, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of queries [T, num_heads, 1, head_dim] over each row's sequence, same shape back."""
        pool = self._pools[layer]
        parts = []
        for group in step.decode_groups:
            rows = queries if step.is_whole(group) else queries[step.rows(group)]
            run = paged_matmul if self._decode == "paged_matmul" else _gather_sdpa
            self._counts[self._decode] += 1
            parts.append(run(rows, pool, step.pages(group, window), scale, sinks))
        parts += self.attend_chunks(
            step,
            queries,
            lambda context: _gather_context(pool, context),
            scale,
            window,
            sinks,
        )
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return out if step.order is None else out[step.order]

    def attend_chunks(
        self,
        step: GatherStep,
        queries: mx.array,
        collect: Callable[[Context], tuple[mx.array, mx.array]],
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> list[mx.array]:
        """Each prefill chunk's part [n, num_heads, 1, head_dim].

        `collect` gives a context's keys and values [num_kv_heads, num_tokens, head_dim].
        """
        parts = []
        for chunk in step.batch.prefill_chunks:
            context = step.context(chunk, window)
            tiled = self._decode == "paged_matmul" and sinks is None and isinstance(context.mask, str)
            self._counts["chunk_tiled" if tiled else "chunk_sdpa"] += 1
            rows = queries[chunk.first_row : chunk.first_row + chunk.num_tokens].squeeze(2).transpose(1, 0, 2)
            k, v = collect(context)
            if tiled:
                out = tiled_chunk(rows, k, v, scale)
            else:
                # Not [0]: MLX would copy what it takes so.
                out = mx.fast.scaled_dot_product_attention(
                    rows[None], k[None], v[None], scale=scale, mask=context.mask, sinks=sinks
                ).squeeze(0)
            parts.append(out.transpose(1, 0, 2)[:, :, None])
        return parts


class LayerView(PagedView):
    """One layer's cache for one step: what views have in common, however their backend reads the pool."""

    __slots__ = ("_layer", "_spec")

    def __init__(self, layer: int, spec: LayerKVSpec, offset: mx.array) -> None:
        self.offset = offset
        self._layer = layer
        self._spec = spec

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> PagedMask:
        return PagedMask(self._window(window_size))

    def _window(self, wanted: int | None) -> int | None:
        return narrower(wanted, self._spec.sliding_window)


class GatherView(LayerView):
    """A layer whose pages are gathered."""

    __slots__ = ("_backend", "_step")

    def __init__(self, backend: GatherBackend, step: GatherStep, layer: int, offset: mx.array) -> None:
        super().__init__(layer, backend.spec(layer), offset)
        self._backend = backend
        self._step = step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        slots = self._step.slots(self._spec.num_kv_heads)
        self._backend.pool(self._layer).write(slots, keys.squeeze(2), values.squeeze(2))
        return keys, values

    def attend(self, queries: Any, *, scale: float, mask: Any, sinks: Any | None) -> Any:
        return self._backend.attend(self._layer, self._step, queries, scale, self._window(mask.window), sinks)


@dataclass(slots=True)
class GatherStep:
    """A batch's indices on the device, made once and shared by the layers that need the same."""

    batch: InputBatch
    block_size: int
    _made: dict[Any, Any] = field(default_factory=dict)

    @property
    def decode_groups(self) -> tuple[DecodeGroup, ...]:
        """See InputBatch. Not looked at where kernels read the decode rows."""
        groups: tuple[DecodeGroup, ...] = self._once("groups", lambda: self.batch.decode_groups)
        return groups

    @property
    def order(self) -> mx.array | None:
        """[T] puts the parts' rows back in batch order; None: they are."""
        order: mx.array | None = self._once("order", self._make_order)
        return order

    def _make_order(self) -> mx.array | None:
        groups = self.decode_groups
        order = np.concatenate([g.rows.ravel() for g in groups]) if groups else np.zeros(0, np.int32)
        # Rows that stand in a group more than once move the chunks' rows behind them.
        inverse = np.arange(self.batch.num_rows, dtype=np.int32) + (len(order) - self.batch.num_decode_rows)
        inverse[order] = np.arange(len(order), dtype=np.int32)
        in_order = len(order) == self.batch.num_decode_rows and bool((inverse == np.arange(len(inverse))).all())
        return None if in_order else mx.array(inverse)

    def is_whole(self, group: DecodeGroup) -> bool:
        """Whether the group is the whole step, in its order."""
        return group.rows.shape == (self.batch.num_rows, 1)

    def rows(self, group: DecodeGroup) -> mx.array:
        rows: mx.array = self._once(("rows", id(group)), lambda: mx.array(group.rows.ravel()))
        return rows

    def slots(self, num_kv_heads: int) -> mx.array:
        """[T, num_kv_heads] pool rows that the step writes."""
        slots: mx.array = self._once(("slots", num_kv_heads), lambda: self._make_slots(num_kv_heads))
        return slots

    def _make_slots(self, num_kv_heads: int) -> mx.array:
        block, offset = np.divmod(self.batch.slot_mapping, self.block_size)
        rows = (block[:, None] * num_kv_heads + np.arange(num_kv_heads)) * self.block_size + offset[:, None]
        return mx.array(rows.astype(np.uint32))

    def pages(self, group: DecodeGroup, window: int | None) -> Pages:
        pages: Pages = self._once(("pages", id(group), window), lambda: _pages(group, window, self.block_size))
        return pages

    def context(self, chunk: PrefillChunk, window: int | None) -> Context:
        context: Context = self._once(("context", id(chunk), window), lambda: _context(chunk, window, self.block_size))
        return context

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _pages(group: DecodeGroup, window: int | None, block_size: int) -> Pages:
    tables, lens = group.block_tables, group.seq_lens
    # Pages that lie wholly before the window are left out.
    first_token = np.maximum(lens - window, 0) if window is not None else np.zeros_like(lens)
    first_page = first_token[:, 0] // block_size
    if first_page.any():
        num_pages = int((-(-lens[:, -1] // block_size) - first_page).max())
        columns = np.minimum(first_page[:, None] + np.arange(num_pages), tables.shape[1] - 1)
        tables = np.take_along_axis(tables, columns, axis=1)
    slots = first_page[:, None] * block_size + np.arange(tables.shape[1] * block_size)
    visible = (slots[:, None] < lens[:, :, None]) & (slots[:, None] >= first_token[:, :, None])
    bias = np.where(visible, 0.0, MASKED).astype(np.float32).reshape(*lens.shape, -1, block_size)
    return Pages(mx.array(tables), mx.array(visible), mx.array(bias.swapaxes(1, 2)[:, :, None]))


def _context(chunk: PrefillChunk, window: int | None, block_size: int) -> Context:
    if window is None or chunk.seq_len <= window:
        return Context(mx.array(chunk.block_table), chunk.seq_len, "causal")
    first_page = max(chunk.start - window + 1, 0) // block_size
    first = first_page * block_size
    query = np.arange(chunk.start, chunk.seq_len)[:, None]
    key = np.arange(first, chunk.seq_len)[None]
    mask = (key <= query) & (key > query - window)
    return Context(mx.array(chunk.block_table[first_page:]), chunk.seq_len - first, mx.array(mask))


def _gather_sdpa(queries: mx.array, pool: LayerPool, pages: Pages, scale: float, sinks: mx.array | None) -> mx.array:
    num_tables, num_pages = pages.block_tables.shape
    num_heads, head_dim = queries.shape[1], queries.shape[3]
    _, num_kv_heads, block_size = pool.shape
    shape = (num_tables, num_kv_heads, num_pages * block_size, -1)
    k, v = (page.transpose(0, 2, 1, 3, 4).reshape(shape) for page in pool.pages(pages.block_tables))
    mask = pages.visible[:, None]
    if len(queries) == num_tables:
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask, sinks=sinks)
    q = queries.reshape(num_tables, -1, num_heads, head_dim).swapaxes(1, 2)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    return out.swapaxes(1, 2).reshape(*queries.shape[:3], -1)


def _gather_context(pool: LayerPool, context: Context) -> tuple[mx.array, mx.array]:
    """A sequence's keys and values [num_kv_heads, num_tokens, head_dim]."""
    k, v = (
        page.transpose(1, 0, 2, 3).reshape(page.shape[1], -1, page.shape[3])[:, : context.num_tokens]
        for page in pool.pages(context.block_table)
    )
    return k, v
