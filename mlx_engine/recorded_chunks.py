"""Small steps with prefill chunks as CUDA graphs that were recorded once, as recorded_decode.py does for decode steps.

Built anew by MLX such a step costs the host more than the GPU, up to several hundred tokens. A recording has a fixed
number of decode rows and of chunk tokens; what a step has less is padding, which writes to the scratch block.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_engine.attention.kernels.paged import ChunkPlan, share_out
from mlx_engine.attention.kernels.sampling import publish, sample_rows
from mlx_engine.input_batch import InputBatch, IntArray
from mlx_engine.interfaces import LayerKVView
from mlx_engine.native.graphs import Fetch, Graphs
from mlx_engine.paged_model import PagedModel
from mlx_engine.sampler import NUM_OPTIONS, sampling_options
from mlx_engine.types import cdiv

logger = logging.getLogger(__name__)

# Chunk tokens of a recording, with none, some or the most decode rows, and with none or the most only. In still larger
# steps the GPU has enough to do while the host builds the next one.
_TOKENS = (16, 64, 128, 256, 512)
_MORE_TOKENS = (384, 768, 1024, 1536, 2048)
_SOME_DECODES = 32
# Chunks of a step for so many of its tokens, and the most.
_TOKENS_PER_CHUNK = 8
_MAX_CHUNKS = 32
_FIELDS = ("tokens", "feedback", "seq_lens", "positions", "slots", "table", "chunks", "tiles")


class ChunkBackend(Protocol):
    """An attention backend whose steps with chunks have nothing but arrays of fixed shapes."""

    def tile_shape(self, num_heads: tuple[int, ...]) -> tuple[int, int] | None:
        """What `share_out` needs to know of the kernels; None where a layer's chunks run otherwise."""

    def chunk_views(
        self,
        block_tables: mx.array,
        seq_lens: mx.array,
        positions: mx.array,
        slots: mx.array,
        tile_shape: tuple[int, int],
        plan: ChunkPlan,
    ) -> list[LayerKVView]:
        """The caches of a step; see FusedBackend."""

    def lead(self, output: mx.array | None) -> None:
        """See CompilableBackend."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a recording holds at most."""

    num_decodes: int
    num_tokens: int  # of chunks
    num_chunks: int
    num_tiles: int
    table_size: int  # of all chunks' block tables together
    width: int  # of the decode rows' block tables
    num_samples: int

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers in each field of the step's first input. One chunk more than there are is padding."""
        counts = (
            self.num_decodes + self.num_tokens,
            self.num_decodes,
            self.num_decodes,
            self.num_tokens,
            self.num_tokens,
            self.table_size,
            4 * (self.num_chunks + 1),
            2 * self.num_tiles,
        )
        return dict(zip(_FIELDS, counts, strict=True))

    def padding(self) -> dict[str, IntArray]:
        """The fields of a step of nothing but padding.

        Its rows have length 0, its tokens go to the scratch block, its tiles are of the last chunk, which has no rows.
        """
        fields = {name: np.zeros(size, np.int32) for name, size in self.sizes.items()}
        fields["feedback"][:] = -1
        fields["tiles"][::2] = self.num_chunks
        return fields


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Any
    numbers: mx.array  # [1, n] int32 the fields, one after the other
    tables: mx.array  # [num_decodes, width] int32
    sampling: mx.array  # [num_samples, NUM_OPTIONS + 1] bits of the options, then the row that is sampled


def _num_rows(shape: _Shape) -> int:
    return shape.num_decodes + shape.num_tokens


class RecordedChunks:
    """Runs steps with prefill chunks from recordings."""

    def __init__(
        self,
        model: PagedModel,
        backend: ChunkBackend,
        graphs: Graphs,
        samples: mx.array,
        *,
        tile_shape: tuple[int, int],
        max_num_batched_tokens: int,
        max_pages: int,
        block_size: int,
        max_bytes: int,
    ) -> None:
        """`samples` [n] uint32 is where all recordings publish theirs; recordings take max_bytes at most, about."""
        self._model = model
        self._backend = backend
        self._graphs = graphs
        self._samples = samples
        self._tile_shape = tile_shape
        self._max_pages = max_pages
        self._block_size = block_size
        self._max_bytes = max_bytes
        most = samples.shape[0]
        decodes = sorted({0, min(_SOME_DECODES, most), most})
        sizes = [*itertools.product(_TOKENS, decodes), *itertools.product(_MORE_TOKENS, (0, most))]
        # In the order in which they are recorded while there is memory.
        self._shapes = [self._shape(*size) for size in sizes if size[0] < 2 * max_num_batched_tokens]
        self._recordings: dict[_Shape, _Recording] = {}

    def warm_up(self) -> Iterator[float]:
        """Records the shapes, small ones first, on padding; yields the share that is done.

        RuntimeError where CUDA refuses.
        """
        before = mx.get_active_memory()
        for done, shape in enumerate(self._shapes, 1):
            if mx.get_active_memory() - before > self._max_bytes:
                logger.info("%d of %d shapes of steps with chunks recorded", done - 1, len(self._shapes))
                yield 1.0
                return
            self._recordings[shape] = self._record(shape)
            yield done / len(self._shapes)

    def launch(self, batch: InputBatch) -> Fetch | None:
        """Hands a step with chunks to the GPU; its samples once they are there. None: no recording holds it."""
        shape = min((shape for shape in self._recordings if self._holds(shape, batch)), key=_num_rows, default=None)
        if shape is None:
            return None
        recording = self._recordings[shape]
        numbers = self._numbers(shape, batch)
        self._graphs.write_rows(recording.numbers, numbers.tobytes(), 1, numbers.shape[0])
        if batch.num_decode_rows:
            tables = np.ascontiguousarray(batch.block_tables, np.int32)
            self._graphs.write_rows(recording.tables, tables.tobytes(), *tables.shape)
        if batch.samples:
            sampling = self._sampling(shape, batch)
            self._graphs.write_rows(recording.sampling, sampling.tobytes(), *sampling.shape)
        recording.graph.launch()
        # What MLX's own steps gave comes before this one in the GPU's stream; nothing has to follow it any more.
        self._backend.lead(None)
        return self._graphs.fetch(self._samples, len(batch.samples))

    def _shape(self, num_tokens: int, num_decodes: int) -> _Shape:
        num_chunks = min(cdiv(num_tokens, _TOKENS_PER_CHUNK), _MAX_CHUNKS)
        rows, group = self._tile_shape
        return _Shape(
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            num_chunks=num_chunks,
            num_tiles=cdiv(num_tokens * group, rows) + num_chunks,
            # One chunk at the end of the longest sequence, and room for as much again.
            table_size=2 * self._max_pages + cdiv(num_tokens, self._block_size) + num_chunks,
            width=self._max_pages,
            num_samples=min(num_decodes + num_chunks, self._samples.shape[0]),
        )

    def _holds(self, shape: _Shape, batch: InputBatch) -> bool:
        chunks = batch.prefill_chunks
        return (
            batch.num_decode_rows <= shape.num_decodes
            and batch.num_rows - batch.num_decode_rows <= shape.num_tokens
            and len(chunks) <= shape.num_chunks
            and sum(len(chunk.block_table) for chunk in chunks) <= shape.table_size
            and len(batch.samples) <= shape.num_samples
        )

    def _numbers(self, shape: _Shape, batch: InputBatch) -> IntArray:
        decodes = batch.num_decode_rows
        table, chunks, tiles = share_out(batch.prefill_chunks, decodes, self._tile_shape)
        fields = shape.padding()
        fields["tokens"][:decodes] = batch.token_ids[:decodes]
        if batch.feedback is not None:
            fields["feedback"][:decodes] = batch.feedback[:decodes]
        filled = {
            "seq_lens": batch.seq_lens,
            "positions": batch.positions[decodes:],
            "slots": batch.slot_mapping[decodes:],
            "table": table,
            "chunks": chunks.reshape(-1),
            "tiles": tiles.reshape(-1),
        }
        for name, numbers in filled.items():
            fields[name][: len(numbers)] = numbers
        first, end = shape.num_decodes, shape.num_decodes + batch.num_rows - decodes
        fields["tokens"][first:end] = batch.token_ids[decodes:]
        return np.concatenate(list(fields.values()))

    def _sampling(self, shape: _Shape, batch: InputBatch) -> IntArray:
        out = np.empty((len(batch.samples), NUM_OPTIONS + 1), np.int32)
        out[:, :NUM_OPTIONS] = sampling_options(batch.samples).view(np.int32)
        # Chunks begin after the decode rows that the recording has.
        chunk_rows = batch.sample_rows >= batch.num_decode_rows
        out[:, NUM_OPTIONS] = batch.sample_rows + chunk_rows * (shape.num_decodes - batch.num_decode_rows)
        return out

    def _record(self, shape: _Shape) -> _Recording:
        padding = np.concatenate(list(shape.padding().values()))
        numbers = mx.zeros((1, len(padding)), mx.int32)
        tables = mx.zeros((shape.num_decodes, shape.width), mx.int32)
        sampling = mx.zeros((shape.num_samples, NUM_OPTIONS + 1), mx.int32)
        mx.eval(numbers, tables, sampling)
        self._graphs.write_rows(numbers, padding.tobytes(), 1, len(padding))
        try:
            graph = self._graphs.record(lambda: self._step(shape, numbers, tables, sampling))
        finally:
            # No step must follow what was only recorded, or refused.
            self._backend.lead(None)
        return _Recording(graph, numbers, tables, sampling)

    def _step(self, shape: _Shape, numbers: mx.array, tables: mx.array, sampling: mx.array) -> mx.array:
        ends = list(itertools.accumulate(shape.sizes.values()))
        flat = numbers.reshape(-1)
        field = {name: flat[end - size : end] for (name, size), end in zip(shape.sizes.items(), ends, strict=True)}
        decodes = shape.num_decodes
        feedback = field["feedback"]
        fed_back = self._samples[mx.maximum(feedback, 0)].astype(mx.int32)
        tokens = field["tokens"]
        tokens = mx.concatenate([mx.where(feedback >= 0, fed_back, tokens[:decodes]), tokens[decodes:]])
        plan = ChunkPlan(field["table"], field["chunks"].reshape(-1, 4), field["tiles"].reshape(-1, 2))
        views = self._backend.chunk_views(
            tables, field["seq_lens"], field["positions"], field["slots"], self._tile_shape, plan
        )
        logits = self._model(tokens, views, mx.contiguous(sampling[:, NUM_OPTIONS]))
        return publish(sample_rows(logits, sampling.view(mx.float32)), self._samples)
