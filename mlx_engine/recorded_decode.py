"""Decode steps as CUDA graphs that were recorded once: the host launches one instead of building a step's nodes anew.

A recording's kernels read and write the same memory each time. The host writes a step's indices into the recording's
own input; the sampled tokens go into one array that all recordings share, where the next step finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlx_engine.attention.kernels.sampling import publish
from mlx_engine.compiled_decode import CompiledDecode, row_bucket
from mlx_engine.input_batch import InputBatch
from mlx_engine.native.graphs import Fetch, Graphs
from mlx_engine.types import cdiv

logger = logging.getLogger(__name__)

# Rows of fewer tokens than this get recordings whose attention doesn't split them.
_SHORT_TOKENS = 1024


class RecordedDecode:
    """Runs decode steps from recordings."""

    def __init__(self, compiled: CompiledDecode, graphs: Graphs, block_size: int, max_bytes: int) -> None:
        """Recordings take max_bytes at most, about."""
        self._compiled = compiled
        self._graphs = graphs
        short = min(cdiv(_SHORT_TOKENS, block_size), compiled.max_width)
        self._widths = sorted({short, compiled.max_width})
        self._max_bytes = max_bytes
        self._recordings: dict[tuple[int, int], tuple[Any, mx.array]] = {}
        self.max_pages = compiled.max_width  # of a sequence
        self.samples = mx.zeros((compiled.max_rows,), mx.uint32)
        mx.eval(self.samples)

    def warm_up(self) -> Iterator[float]:
        """Records the shapes, small ones first, on padding rows, which touch no pool; yields the share that is done."""
        shapes = [(n, width) for n in self._compiled.row_buckets for width in self._widths]
        before = mx.get_active_memory()
        for done, (num_rows, width) in enumerate(shapes, 1):
            if mx.get_active_memory() - before > self._max_bytes:
                logger.warning(
                    "decode steps of %d sequences and more are not recorded: they take too much memory", num_rows
                )
                yield 1.0
                return
            indices = mx.zeros((num_rows, width + CompiledDecode.NUM_COLUMNS), mx.int32)
            mx.eval(indices)
            recording = self._graphs.record(lambda indices=indices: self._step(indices))  # type: ignore[misc]
            self._recordings[num_rows, width] = recording, indices
            self._compiled.forget()
            yield done / len(shapes)

    @property
    def missing_rows(self) -> list[int]:
        """The sizes of steps that some recording is missing of: those that memory didn't reach for."""
        return [
            n for n in self._compiled.row_buckets if any((n, width) not in self._recordings for width in self._widths)
        ]

    def launch(self, batch: InputBatch) -> Fetch | None:
        """Hands a step that CompiledDecode takes to the GPU; its samples once they are there. None: not recorded."""
        num_rows = row_bucket(batch.num_rows)
        used = batch.block_tables.shape[1]
        width = next(width for width in self._widths if width >= used)
        if (num_rows, width) not in self._recordings:
            return None
        recording, indices = self._recordings[num_rows, width]
        rows = self._compiled.indices(batch, num_rows, used)
        self._graphs.write_rows(indices, rows.tobytes(), *rows.shape)
        recording.launch()
        # What MLX's own steps gave comes before this one in the GPU's stream; nothing has to follow it any more.
        self._compiled.forget()
        return self._graphs.fetch(self.samples, batch.num_rows)

    def publish(self, sampled: mx.array, *others: mx.array) -> Fetch:
        """Evaluates a step that was not recorded: its samples [n] uint32, now the latest, and other arrays."""
        mx.async_eval(publish(sampled, self.samples), *others)  # type: ignore[no-untyped-call]
        return self._graphs.fetch(self.samples, sampled.shape[0])

    def _step(self, indices: mx.array) -> mx.array:
        return publish(self._compiled.step(indices, self.samples), self.samples)
