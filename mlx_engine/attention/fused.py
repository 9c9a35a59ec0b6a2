"""The `fused` backend: decode rows read K/V through the block table in one kernel, which also stores their new K/V.

The pools are written in place, behind MLX's back: no operation makes a new version of them, so none is ever copied.
What reads or writes a pool after another does so by data flow: a layer's attention takes what the layer before gave,
chunks are given what the kernel that stored them gave, and the indices of a step are computed from what the last layer
of the step before gave. It has to be an argument of a kernel: a GPU runs kernels at once that share no array. The
paths, counted by name:

- `fused`: decode rows in the kernel, each row's tokens in one part. Drafts are such rows too, after a kernel that has
  stored all tokens of their sequences.
- `fused_split`: the same in several parts, put together by a second kernel.
- `chunk_paged`: prefill chunks, all of a step in one kernel that reads the pool: 16-bit types on CUDA.
- `chunk_sdpa`: other prefill chunks; stored by a kernel, then as in the `gather` backend.
- `gather_sdpa`: layers whose heads the kernels don't take run as in the `gather` backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_engine.attention.dispatch import PagedView
from mlx_engine.attention.gather import GatherBackend, GatherStep, GatherView, LayerView
from mlx_engine.attention.kernels import PagedKernels
from mlx_engine.attention.kernels.paged import MIN_TOKENS, ChunkPlan
from mlx_engine.attention.kernels.self_check import check_kernels
from mlx_engine.errors import ConfigError
from mlx_engine.input_batch import InputBatch
from mlx_engine.types import LayerKVSpec

# Rows from which a step that is built anew is handed over layer by layer: the device has begun, and has enough to do,
# while the host builds the layers after.
_LAUNCHED_ROWS = 128


def kernels_run_here() -> bool:
    """Whether MLX's default device is a GPU that the kernels have a dialect for."""
    on_gpu = bool(mx.default_device().type == mx.DeviceType.gpu)
    return on_gpu and (mx.metal.is_available() or mx.cuda.is_available())


class FusedBackend(GatherBackend):
    """K/V pools that kernels of ours read and write in place."""

    def __init__(self) -> None:
        super().__init__(decode="gather_sdpa")
        self._supported: list[bool] = []
        self._kernels: dict[tuple[int, LayerKVSpec], PagedKernels] = {}
        self._dtype: mx.Dtype = mx.float32
        self._last: list[mx.array] = []  # what the last layer of the latest step gave

    def initialize(
        self,
        layers: Sequence[LayerKVSpec],
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        kv_dtype: mx.Dtype | None = None,
    ) -> None:
        """See AttentionBackend. Raises ConfigError where there is no GPU that the kernels run on."""
        if not kernels_run_here():
            raise ConfigError(
                "engine.attention_backend is fused, whose kernels run on Metal and CUDA, and MLX's default device is "
                f"{mx.default_device()}: set it to gather, or to auto"
            )
        super().initialize(layers, num_blocks, block_size, dtype, kv_dtype)
        self._dtype = dtype
        self._supported = [PagedKernels.supports(s.key_head_dim, s.value_head_dim, dtype, kv_dtype) for s in layers]

    def check(
        self,
        num_heads: Sequence[int],
        layers: Sequence[LayerKVSpec],
        block_size: int,
        dtype: mx.Dtype,
        kv_dtype: mx.Dtype,
    ) -> None:
        """Raises KernelError if a kernel is wrong on this GPU: for layers of these shapes, with so many query heads.

        Without a GPU there is nothing to check: `initialize` will say so.
        """
        if not kernels_run_here():
            return
        for heads, spec in dict.fromkeys(zip(num_heads, layers, strict=True)):
            if PagedKernels.supports(spec.key_head_dim, spec.value_head_dim, dtype, kv_dtype):
                check_kernels(heads, spec, block_size, dtype, kv_dtype)

    def begin_step(self, batch: InputBatch) -> list[PagedView]:
        """See AttentionBackend."""
        step = _make_step(batch, self._block_size, self._last)
        gather = None if all(self._supported) else step.chunks or GatherStep(batch, self._block_size)
        offset = mx.array(batch.positions)
        self._last = []
        views: list[PagedView] = []
        for layer, fits in enumerate(self._supported):
            if fits or gather is None:
                views.append(_FusedView(self, step, layer, offset))
            else:
                views.append(GatherView(self, gather, layer, offset))
        return views

    @property
    def compiles(self) -> bool:
        """Whether decode steps may be compiled: no layer gathers, whose shapes differ in each step."""
        return all(self._supported)

    def decode_views(self, block_tables: mx.array, seq_lens: mx.array, has_drafts: bool = False) -> list[PagedView]:
        """The caches of a step of decode rows only, for a function that is compiled over these arrays.

        With drafts all rows are stored before any attends: which of them have some is not known.
        """
        num_rows, width = block_tables.shape
        step = FusedStep(num_rows, width * self._block_size, block_tables, seq_lens, num_rows, seq_lens[:0])
        if has_drafts:
            # Padding has length 0 and a table of the scratch block only, which takes whatever it is given.
            last = mx.maximum(seq_lens - 1, 0)
            blocks = mx.take_along_axis(block_tables, (last // self._block_size)[:, None], axis=1)[:, 0]
            step.first_stored, step.stored_slots = 0, blocks * self._block_size + last % self._block_size
        offset = seq_lens - 1
        return [_FusedView(self, step, layer, offset) for layer in range(len(self._layers))]

    def tile_shape(self, num_heads: Sequence[int]) -> tuple[int, int] | None:
        """That of all layers' chunks, of which each has so many query heads; None where the kernels don't take them."""
        shapes = {
            kernels.tile_shape if kernels.takes_chunks(pool) else None
            for kernels, pool in (
                (self._layer_kernels(heads, spec), pool)
                for heads, spec, pool in zip(num_heads, self._layers, self._pools, strict=True)
            )
        }
        return shapes.pop() if len(shapes) == 1 and all(self._supported) else None

    def chunk_views(
        self,
        block_tables: mx.array,
        seq_lens: mx.array,
        positions: mx.array,
        slots: mx.array,
        tile_shape: tuple[int, int],
        plan: ChunkPlan,
    ) -> list[PagedView]:
        """The caches of a step of decode rows and of chunks, all of whose shapes are fixed.

        block_tables and seq_lens as for `decode_views`; positions and slots are those of the chunks' tokens.
        """
        num_rows, width = block_tables.shape
        step = FusedStep(num_rows, width * self._block_size, block_tables, seq_lens, num_rows, slots)
        step.chunk_plans[tile_shape] = plan
        offset = mx.concatenate([seq_lens - 1, positions])
        return [_FusedView(self, step, layer, offset) for layer in range(len(self._layers))]

    def follow(self, indices: mx.array) -> mx.array:
        """The indices [B, ...] int32 of a compiled step, made to come after the step before."""
        last, self._last = self._last, []
        return indices + _zero_after(last) if last else indices

    def lead(self, output: mx.array | None) -> None:
        """What a compiled step gave, for the step after to follow."""
        self._last = [] if output is None else [output]

    def leads(self, output: mx.array | None) -> bool:
        """Whether this is what the latest step gave."""
        return output is not None and len(self._last) == 1 and self._last[0] is output

    def state(self) -> list[mx.array]:
        """See AttentionBackend."""
        gathered = [pool.arrays() for pool, fits in zip(self._pools, self._supported, strict=True) if not fits]
        return [*itertools.chain(*gathered), *self._last]

    def append(self, layer: int, step: FusedStep, keys: mx.array, values: mx.array) -> mx.array:
        """Stores the keys and values [n, num_kv_heads, head_dim] of `stored_slots`; see PagedKernels.append."""
        spec = self._layers[layer]
        return self._layer_kernels(spec.num_kv_heads, spec).append(keys, values, self._pools[layer], step.stored_slots)

    def attend_fused(
        self,
        layer: int,
        step: FusedStep,
        queries: mx.array,
        new: tuple[mx.array, mx.array],
        ticket: mx.array | None,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        rotation: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """Attention of queries [T, num_heads, 1, head_dim], same shape back.

        `new` are the keys and values [T, num_kv_heads, 1, head_dim] of the step. `rotation`: see PagedKernels.decode,
        of steps of decode rows only.
        """
        spec, pool = self._layers[layer], self._pools[layer]
        num_decodes = step.num_decodes
        kernels = self._layer_kernels(queries.shape[1], spec)
        parts = []
        if num_decodes:
            longest = step.max_decode_len if window is None else min(step.max_decode_len, window)
            splits = kernels.num_splits(num_decodes, pool, longest)
            self._counts["fused" if splits == 1 else "fused_split"] += 1
            seq_lens = step.seq_lens
            if ticket is not None and step.first_stored < num_decodes:
                # Rows with drafts read what other rows store. The kernel stores it too, the same bytes once more.
                seq_lens = seq_lens + ticket[:1]
            out = kernels.decode(
                queries[:num_decodes].squeeze(2),
                new[0][:num_decodes].squeeze(2),
                new[1][:num_decodes].squeeze(2),
                pool,
                step.block_tables,
                seq_lens,
                scale=scale,
                splits=splits,
                # Of a compiled step the longest row is not known.
                min_span=MIN_TOKENS,
                busy_splits=kernels.busy_splits(num_decodes, pool),
                rotation=rotation,
                window=window,
                sinks=sinks,
            )
            parts.append(out[:, :, None])
        # Rows with drafts have a ticket too, chunks or not.
        if ticket is not None and num_decodes < queries.shape[0]:
            after = ticket
            if kernels.takes_chunks(pool):
                plan = step.chunk_plan(kernels.tile_shape)
                self._counts["chunk_paged"] += plan.chunks.shape[0]
                rows = queries[num_decodes:].squeeze(2)
                out = kernels.prefill(rows, pool, plan, after, scale=scale, window=window, sinks=sinks)
                parts.append(out[:, :, None])
            elif step.chunks is not None:
                parts += self.attend_chunks(
                    step.chunks,
                    queries,
                    lambda context: kernels.collect(pool, context.block_table, step.length(context.num_tokens), after),
                    scale,
                    window,
                    sinks,
                )
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        # All the layers before come before it.
        self._last = [out] if ticket is None else [out, ticket]
        if step.launches:
            mx.async_eval(out)  # type: ignore[no-untyped-call]
        return out

    def rotates(self, layer: int, num_heads: int) -> bool:
        """Whether the kernel for decode rows turns their queries and keys by their positions."""
        return self._layer_kernels(num_heads, self._layers[layer]).rotates(self._pools[layer])

    def _layer_kernels(self, num_heads: int, spec: LayerKVSpec) -> PagedKernels:
        key = (num_heads, spec)
        if key not in self._kernels:
            self._kernels[key] = PagedKernels(
                num_heads, spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim, self._block_size, self._dtype
            )
        return self._kernels[key]


@dataclass(slots=True)
class FusedStep:
    """A step's indices on the device. Decode rows come first."""

    num_decodes: int
    max_decode_len: int  # tokens that the longest decode row may see, at least
    block_tables: mx.array  # [num_decodes, P]
    seq_lens: mx.array  # [num_decodes], the new token included
    first_stored: int  # rows from here on are stored before any row attends: those of chunks, or with drafts
    stored_slots: mx.array  # [T - first_stored] of the pool
    chunks: GatherStep | None = None
    launches: bool = False  # each layer as soon as it is built
    chunk_plans: dict[tuple[int, int], ChunkPlan] = field(default_factory=dict)  # by tile shape
    _lengths: dict[int, tuple[int, mx.array]] = field(default_factory=dict)

    def chunk_plan(self, tile_shape: tuple[int, int]) -> ChunkPlan:
        """How the chunks are shared out, made once for all layers."""
        if tile_shape not in self.chunk_plans:
            if self.chunks is None:
                raise ValueError("the step has no chunks")
            chunks = self.chunks.batch.prefill_chunks
            self.chunk_plans[tile_shape] = ChunkPlan.of(chunks, self.num_decodes, tile_shape)
        return self.chunk_plans[tile_shape]

    def length(self, num_tokens: int) -> tuple[int, mx.array]:
        """See PagedKernels.length; made once for all layers."""
        if num_tokens not in self._lengths:
            self._lengths[num_tokens] = PagedKernels.length(num_tokens)
        return self._lengths[num_tokens]


def _make_step(batch: InputBatch, block_size: int, after: Sequence[mx.array]) -> FusedStep:
    num_decodes = batch.num_decode_rows
    first = num_decodes - batch.num_verify_rows
    arrays = [mx.array(batch.block_tables), mx.array(batch.seq_lens), mx.array(batch.slot_mapping[first:])]
    if after:
        zero = _zero_after(after)
        arrays = [array + zero for array in arrays]
    step = FusedStep(num_decodes, int(batch.seq_lens.max(initial=0)), arrays[0], arrays[1], first, arrays[2])
    step.launches = batch.num_rows >= _LAUNCHED_ROWS
    if batch.prefill_chunks:
        step.chunks = GatherStep(batch, block_size)
    return step


def _zero_after(arrays: Sequence[mx.array]) -> mx.array:
    """A zero that is computed from these arrays, for the indices of a step whose kernels must come after them."""
    parts = [array.reshape(-1)[:1].view(mx.uint8)[:1] & 0 for array in arrays]
    return sum(parts[1:], parts[0]).astype(mx.int32)


class _FusedView(LayerView):
    """A layer that the kernels read."""

    __slots__ = ("_backend", "_new", "_step", "_ticket")

    def __init__(self, backend: FusedBackend, step: FusedStep, layer: int, offset: mx.array) -> None:
        super().__init__(layer, backend.spec(layer), offset)
        self._backend = backend
        self._step = step
        self._new: tuple[mx.array, mx.array] | None = None
        self._ticket: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        first = self._step.first_stored
        if first < keys.shape[0]:
            self._ticket = self._backend.append(
                self._layer, self._step, keys[first:].squeeze(2), values[first:].squeeze(2)
            )
        self._new = keys, values
        return keys, values

    def rotates(self, num_heads: int) -> bool:
        """Whether `attend` takes queries, and update_and_fetch keys, that their positions have not turned yet."""
        # What is stored by a kernel of its own is stored as it is.
        return self._step.stored_slots.shape[0] == 0 and self._backend.rotates(self._layer, num_heads)

    def attend(
        self,
        queries: Any,
        *,
        scale: float,
        mask: Any,
        sinks: Any | None,
        rotation: tuple[mx.array, mx.array] | None = None,
    ) -> Any:
        """See LayerKVView; with `rotation`, cosines and sines [T, head_dim / 2] float32, where it `rotates`."""
        if self._new is None:
            raise ValueError("attends before it has stored the step's keys and values")
        return self._backend.attend_fused(
            self._layer, self._step, queries, self._new, self._ticket, scale, self._window(mask.window), sinks, rotation
        )
