"""Calls the paged-attention kernels on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.attention.kernels import texts
from mlx_engine.attention.pool import LayerPool
from mlx_engine.input_batch import IntArray, PrefillChunk
from mlx_engine.types import cdiv

_LOG2_E = math.log2(math.e)

# How often a warp of `decode` reads before it computes, and threads of a threadgroup of the others.
_DECODE_UNROLL = 4
_THREADS = 128
# Query heads that one threadgroup takes at most: their queries and sums fill its registers. A lane that reads 16 bytes
# holds twice as many numbers of each where a number is 8 bits.
_MAX_HEADS = 8
_MAX_HEADS_QUANTIZED = 4
_MAX_HEADS_MATRIX = 16
# Threadgroups of `decode` that keep a GPU busy, the fewest tokens worth one, and the most that are never split: there
# the second kernel costs what the first one saves.
_WANTED_GROUPS = 1024
MIN_TOKENS = 256
_WHOLE_TOKENS = 1024
_MAX_SPLITS = 128
_FEW_GROUPS = 64
# On matrix instructions warps have more on their way: so many keep a GPU busy with keys of up to so many bytes, and of
# longer ones as many as read the same. Parts of one row are also what the second kernel has to put together.
_WANTED_WARPS_MATRIX = 2048
_ROW_BYTES = 128
_ENOUGH_SPLITS = 16
# Of many rows one may be longer than all others, and be waited for: no part has twice as many tokens as this for each
# of its warps, if that doesn't take too many threadgroups. To many of those short rows leave nothing to do.
_LONG_FOR_WARP = 1024
_MOST_GROUPS = 4096
_MAX_COPY_GROUPS = 256


def heads_per_group(group: int, most: int = _MAX_HEADS) -> int:
    """Query heads of `group` that one threadgroup takes: the largest part of them that is not more than `most`."""
    return max(heads for heads in range(1, min(group, most) + 1) if group % heads == 0)


def busy_splits(num_groups: int, wanted_groups: int = _WANTED_GROUPS, most: int = _MAX_SPLITS) -> int:
    """Into how many parts to split the tokens of as many threadgroups for a GPU to be busy: a power of two."""
    return _power_of_two(min(wanted_groups // max(num_groups, 1), most))


def num_splits(num_groups: int, max_len: int, busy: int, long_part: int) -> int:
    """Into how many parts to split up to max_len tokens: as many as `busy_splits` says, a power of two.

    Fewer where a part would have hardly a token, more where it would have far more tokens than others: twice long_part.
    """
    if max_len <= _WHOLE_TOKENS:
        return 1
    needed = min(max_len // long_part, _MOST_GROUPS // max(num_groups, 1))
    return _power_of_two(min(max(busy, needed), max_len // MIN_TOKENS, _MAX_SPLITS))


def _power_of_two(number: int) -> int:
    """The largest one that is not more, at least 1."""
    return 1 << max(number, 1).bit_length() - 1


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Prefill chunks as `prefill` takes them. Any of them may be padding."""

    block_table: mx.array  # [P] those of all chunks, one after the other
    chunks: mx.array  # [n, 4] first row, tokens (0: padding), position of the first, where its block table begins
    tiles: mx.array  # [x, 2] chunk, first of the rows that a threadgroup takes

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], first_row: int, tile_shape: tuple[int, int]) -> ChunkPlan:
        """The plan of these chunks, whose rows are counted from first_row on."""
        return cls(*(mx.array(array) for array in share_out(chunks, first_row, tile_shape)))


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """How a threadgroup of prefill.inc works: see there."""

    kernel: str
    warps: int
    tiles: int
    step: int


@dataclass(frozen=True, slots=True)
class PagedKernels:
    """The kernels for layers of one shape."""

    num_heads: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    block_size: int
    dtype: mx.Dtype  # of queries, keys, values and the output; pools may be int8

    def _constants(self, pool: LayerPool) -> list[tuple[str, Any]]:
        """What every kernel is told of the layer."""
        return [
            ("T", self.dtype),
            ("STORED", pool.keys.dtype),
            ("D", self.key_head_dim),
            ("DV", self.value_head_dim),
            ("NUM_KV_HEADS", self.num_kv_heads),
            ("BLOCK_SIZE", self.block_size),
        ]

    @staticmethod
    def supports(key_head_dim: int, value_head_dim: int, dtype: mx.Dtype, stored: mx.Dtype | None = None) -> bool:
        """Whether the kernels take heads of these sizes, in a pool of type `stored` (None: dtype)."""
        if dtype not in (mx.float32, mx.float16, mx.bfloat16):
            return False
        elements = 16 // (stored or dtype).size
        return all(dim % elements == 0 and 0 < dim <= 256 for dim in (key_head_dim, value_head_dim))

    @staticmethod
    def length(num_tokens: int) -> tuple[int, mx.array]:
        """A number of tokens, on the host and on the device."""
        return num_tokens, mx.full((texts.MIN_SIZE,), num_tokens, mx.int32)

    def takes_chunks(self, pool: LayerPool) -> bool:
        """Whether `prefill` takes chunks over this pool: it runs on matrix instructions, for pools of 16 bits."""
        return self._fits_matrix(pool) and not pool.quantized

    def decode_kernel(self, pool: LayerPool) -> str:
        """The kernel that attends decode rows over this pool: a warp's matrix instructions where they can."""
        if not self._fits_matrix(pool):
            return "decode"
        return "decode_matrix_int8" if pool.quantized else "decode_matrix"

    def rotates(self, pool: LayerPool) -> bool:
        """Whether `decode` turns queries and new keys by their positions."""
        return self.decode_kernel(pool) != "decode" and self.key_head_dim % 16 == 0

    def _fits_matrix(self, pool: LayerPool) -> bool:
        dims = (self.key_head_dim, self.value_head_dim)
        return (
            texts.has_matrix_instructions()
            and self.dtype in (mx.float16, mx.bfloat16)
            and self.block_size % 16 == 0
            and all(dim % (16 if pool.quantized else 8) == 0 and dim <= 128 for dim in dims)
        )

    def decode_layout(self, num_rows: int, pool: LayerPool, splits: bool) -> tuple[int, int]:
        """Query heads that a threadgroup of `decode` takes, and its warps; `splits`: of several parts of a row.

        With few rows there are more warps than a GPU has work for, and each does as little as can be. Parts give them
        more work without reading K/V once for each of the heads.
        """
        group = self.num_heads // self.num_kv_heads
        num_groups = num_rows * self.num_kv_heads
        if self.decode_kernel(pool) != "decode":
            heads = heads_per_group(group, _MAX_HEADS_MATRIX)
            return heads, 8 if num_groups * (group // heads) <= 2 * _FEW_GROUPS else 4
        if num_groups <= _FEW_GROUPS and not splits:
            return 1, 8
        return heads_per_group(group, _MAX_HEADS_QUANTIZED if pool.quantized else _MAX_HEADS), 4

    def num_splits(self, num_rows: int, pool: LayerPool, max_len: int) -> int:
        """Into how many parts to split the tokens of rows of up to max_len of them."""
        heads, warps = self.decode_layout(num_rows, pool, splits=True)
        busy = self.busy_splits(num_rows, pool)
        return num_splits(num_rows * self.num_heads // heads, max_len, busy, _LONG_FOR_WARP * warps)

    def busy_splits(self, num_rows: int, pool: LayerPool) -> int:
        """As many of them as keep the GPU busy: more are for rows that are longer than others."""
        heads, warps = self.decode_layout(num_rows, pool, splits=True)
        num_groups = num_rows * self.num_heads // heads
        if self.decode_kernel(pool) == "decode":
            return busy_splits(num_groups)
        row_bytes = max(self.key_head_dim, self.value_head_dim) * pool.keys.dtype.size
        wanted = _WANTED_WARPS_MATRIX * _ROW_BYTES // max(_ROW_BYTES, row_bytes) // warps
        return busy_splits(num_groups, wanted, _ENOUGH_SPLITS)

    def decode(
        self,
        queries: mx.array,
        new_keys: mx.array,
        new_values: mx.array,
        pool: LayerPool,
        block_tables: mx.array,
        seq_lens: mx.array,
        *,
        scale: float,
        splits: int,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: mx.array | None = None,
        min_span: int = 1,
        busy_splits: int | None = None,
        rotation: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """Puts each row's key and value into the pool, and attends to its sequence through the block table.

        queries [B, num_heads, key_head_dim], new_keys and new_values [B, num_kv_heads, head_dim], block_tables [B, P]
        int32, seq_lens [B] int32 with the new token counted; a row of length 0 is padding and gives 0. A row's tokens
        are split into up to `splits` parts, of min_span or more; into no more than busy_splits (None: any number),
        unless those would be long. `rotation`: cosines and sines [B, key_head_dim / 2] float32 of the positions that
        turn queries and new keys, where `rotates` says so. Returns [B, num_heads, value_head_dim]. The pool is written
        in place: a kernel that reads it later must be given something that was computed from the result. A pool of
        8-bit integers is read as it is then, the new token too.
        """
        num_rows = queries.shape[0]
        group = self.num_heads // self.num_kv_heads
        heads, warps = self.decode_layout(num_rows, pool, splits=splits > 1)
        kernel = self.decode_kernel(pool)
        params = _params(scale, soft_cap)
        inputs = [
            queries,
            new_keys,
            new_values,
            *_arrays(pool),
            texts.padded(block_tables),
            texts.padded(seq_lens),
            params,
            *((params, params) if rotation is None else rotation),
        ]
        sink_array = params if sinks is None else texts.padded(sinks)
        template = [
            *self._constants(pool),
            ("GROUP", group),
            ("HEADS", heads),
            ("WINDOW", window or 0),
            ("WARPS", warps),
            ("UNROLL", _DECODE_UNROLL),
            ("MIN_SPAN", min_span),
            ("BUSY_SPLITS", splits if busy_splits is None else min(busy_splits, splits)),
            ("LONG_PART", _LONG_FOR_WARP * warps),
            ("ROTATED", rotation is not None),
        ]
        threads = 32 * warps
        grid = (self.num_kv_heads * (group // heads) * threads, num_rows, splits)
        shape = (num_rows, self.num_heads, self.value_head_dim)
        if splits == 1:
            out: mx.array = texts.kernel(kernel)(
                inputs=[*inputs, sink_array],
                template=[*template, ("SINKS", sinks is not None)],
                grid=grid,
                threadgroup=(threads, 1, 1),
                output_shapes=[shape],
                output_dtypes=[self.dtype],
            )[0]
            return out
        sums, stats = texts.kernel(f"{kernel}_split")(
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=(threads, 1, 1),
            output_shapes=[(*shape[:2], splits, self.value_head_dim), (*shape[:2], splits, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        combined: mx.array = texts.kernel("combine")(
            inputs=[sums, stats, sink_array],
            template=[
                ("T", self.dtype),
                ("DV", self.value_head_dim),
                ("NUM_HEADS", self.num_heads),
                ("SINKS", sinks is not None),
                ("MAX_PARTS", _MAX_SPLITS),
            ],
            grid=(_THREADS, self.num_heads, num_rows),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[self.dtype],
        )[0]
        return combined

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows that a threadgroup of `prefill` takes, and how many of them are one position."""
        layout = self.prefill_layout
        return layout.warps * layout.tiles * 16, self.num_heads // self.num_kv_heads

    @property
    def prefill_layout(self) -> PrefillLayout:
        """How `prefill` runs: what its registers hold."""
        if texts.has_warpgroup_instructions() and {self.key_head_dim, self.value_head_dim} <= {64, 128}:
            return PrefillLayout("prefill_warpgroup", warps=8, tiles=1, step=64)
        return PrefillLayout("prefill", 4, 2 if max(self.key_head_dim, self.value_head_dim) <= 64 else 1, step=32)

    def prefill(
        self,
        queries: mx.array,
        pool: LayerPool,
        plan: ChunkPlan,
        after: mx.array,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Causal attention of the plan's chunks, queries [n, num_heads, key_head_dim], over their sequences.

        `after` [8] is the ticket of what stored the chunks' own tokens. Returns [n, num_heads, value_head_dim].
        """
        params = _params(scale, soft_cap)
        layout = self.prefill_layout
        threads = 32 * layout.warps
        panels = cdiv(self.key_head_dim, 64) + cdiv(self.value_head_dim, 64)
        # Three steps, whose tokens have 128 bytes in each panel.
        out: mx.array = texts.kernel(layout.kernel, 3 * layout.step * 128 * panels)(
            inputs=[
                queries,
                pool.keys,
                pool.values,
                texts.padded(plan.block_table),
                plan.chunks,
                plan.tiles,
                params,
                params if sinks is None else texts.padded(sinks),
                after,
            ],
            template=[
                ("T", self.dtype),
                ("D", self.key_head_dim),
                ("DV", self.value_head_dim),
                ("NUM_KV_HEADS", self.num_kv_heads),
                ("GROUP", self.num_heads // self.num_kv_heads),
                ("BLOCK_SIZE", self.block_size),
                ("WINDOW", window or 0),
                ("SOFT_CAP", soft_cap is not None),
                ("WARPS", layout.warps),
                ("TILES", layout.tiles),
                ("STEP", layout.step),
                ("SINKS", sinks is not None),
            ],
            grid=(plan.tiles.shape[0] * threads, self.num_kv_heads, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(queries.shape[0], self.num_heads, self.value_head_dim)],
            output_dtypes=[self.dtype],
        )[0]
        return out

    def append(self, new_keys: mx.array, new_values: mx.array, pool: LayerPool, slots: mx.array) -> mx.array:
        """Puts keys and values [n, num_kv_heads, head_dim] into the pool at slots [n] int32.

        A slot is block * block_size + offset. Returns a ticket [8] of zeros, for `collect`.
        """
        ticket: mx.array = texts.kernel("append")(
            inputs=[new_keys, new_values, *_arrays(pool), texts.padded(slots)],
            template=self._constants(pool),
            grid=(_THREADS, 1, new_keys.shape[0]),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(texts.MIN_SIZE,)],
            output_dtypes=[mx.int32],
        )[0]
        return ticket

    def collect(
        self, pool: LayerPool, block_table: mx.array, length: tuple[int, mx.array], after: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The first tokens of a sequence: keys and values [num_kv_heads, num_tokens, head_dim].

        block_table [P] int32, whose first block holds the first of them; after [8] is the ticket of what stored them.
        It is an argument of the kernel, since a GPU runs kernels at the same time that share no array: an order of
        evaluation alone (`mx.depends`) would not keep them apart.
        """
        num_tokens, length_array = length
        numbers = num_tokens * max(self.key_head_dim, self.value_head_dim)
        pieces = numbers if pool.quantized else numbers * self.dtype.size // 16
        keys, values = texts.kernel("collect")(
            inputs=[*_arrays(pool), texts.padded(block_table), length_array, after],
            template=self._constants(pool),
            grid=(min(cdiv(pieces, _THREADS), _MAX_COPY_GROUPS) * _THREADS, self.num_kv_heads, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[
                (self.num_kv_heads, num_tokens, self.key_head_dim),
                (self.num_kv_heads, num_tokens, self.value_head_dim),
            ],
            output_dtypes=[self.dtype, self.dtype],
        )
        return keys, values


def share_out(chunks: Sequence[PrefillChunk], first_row: int, tile_shape: tuple[int, int]) -> tuple[IntArray, ...]:
    """What `prefill` reads of these chunks, whose rows are counted from first_row on: see ChunkPlan."""
    rows, group = tile_shape
    table = np.concatenate([chunk.block_table for chunk in chunks])
    starts = np.cumsum([0, *(len(chunk.block_table) for chunk in chunks[:-1])]).tolist()
    described = [
        (chunk.first_row - first_row, chunk.num_tokens, chunk.start, start)
        for chunk, start in zip(chunks, starts, strict=True)
    ]
    # The longest first: they would be waited for.
    tiles = sorted(
        (-(chunk.start + row // group), i, row)
        for i, chunk in enumerate(chunks)
        for row in range(0, chunk.num_tokens * group, rows)
    )
    return table, np.asarray(described, np.int32), np.asarray([tile[1:] for tile in tiles], np.int32)


def _params(scale: float, soft_cap: float | None) -> mx.array:
    return texts.constants(scale * _LOG2_E, (soft_cap or 0.0) * _LOG2_E)


def _arrays(pool: LayerPool) -> list[mx.array]:
    """The pool as the kernels take it."""
    return [pool.keys, pool.values, pool.key_scales, pool.value_scales]
