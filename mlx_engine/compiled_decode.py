"""Steps of decode rows only, as functions that MLX compiles over a few fixed shapes.

A pool never grows, so the shapes of such a step are those of its batch and its block tables. Both are rounded up: a few
dozen shapes cover all steps, and the graph of each is built once instead of in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_engine.attention.kernels.sampling import sample_rows
from mlx_engine.input_batch import InputBatch, IntArray
from mlx_engine.interfaces import LayerKVView
from mlx_engine.paged_model import PagedModel
from mlx_engine.sampler import NUM_OPTIONS, sampling_options

_MIN_TABLE_WIDTH = 8


class CompilableBackend(Protocol):
    """An attention backend whose decode steps have nothing but arrays of fixed shapes."""

    compiles: bool

    def decode_views(
        self, block_tables: mx.array, seq_lens: mx.array, has_drafts: bool = False
    ) -> Sequence[LayerKVView]:
        """The caches of a step of decode rows: block tables [B, P], lengths [B] with the new token, 0 for padding.

        With drafts a row may see what other rows store.
        """

    def follow(self, indices: mx.array) -> mx.array:
        """The same indices, computed after all that the step before did to the pools."""

    def lead(self, output: mx.array | None) -> None:
        """Names what must be computed before the step after this one touches the pools."""

    def leads(self, output: mx.array | None) -> bool:
        """Whether this is what was named last, and no step has come since."""


def row_bucket(num_rows: int) -> int:
    """The fixed number of rows that a batch is padded to: a power of two, or three quarters of one."""
    power = 1 << max(num_rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 16 and num_rows <= power * 3 // 4 else power


def width_bucket(num_pages: int) -> int:
    """The fixed width that block tables are padded to: a power of two."""
    return max(_MIN_TABLE_WIDTH, 1 << max(num_pages - 1, 0).bit_length())


class CompiledDecode:
    """Runs decode steps, sampler included, through compiled functions; with `has_drafter` also those with drafts."""

    NUM_COLUMNS = NUM_OPTIONS + 3  # of `indices`, before the block table

    def __init__(
        self,
        model: PagedModel,
        backend: CompilableBackend,
        max_num_seqs: int,
        max_pages: int,
        has_drafter: bool = False,
    ) -> None:
        self._backend = backend
        self._model = model
        self.max_rows = max(row_bucket(max_num_seqs), 8)
        self.row_buckets = sorted({row_bucket(n) for n in range(1, self.max_rows + 1)})
        self.max_width = width_bucket(max_pages)
        self._last_out: mx.array | None = None
        self._no_samples = mx.zeros((self.max_rows,), mx.uint32)
        self.step = mx.compile(self._step)
        self._checked = mx.compile(partial(self._step, has_drafts=True)) if has_drafter else None

    def takes(self, batch: InputBatch) -> bool:
        """Whether this is a step of decode rows only, each of which gives a sample."""
        if batch.num_drafts and self._checked is None:
            return False
        return not batch.prefill_chunks and 0 < batch.num_rows == len(batch.samples) <= self.max_rows

    def padded(self, sampled: mx.array) -> mx.array:
        """The samples with padding after them, as the next step takes them."""
        missing = self.max_rows - sampled.shape[0]
        return mx.pad(sampled, (0, missing)) if missing > 0 else sampled

    def __call__(self, batch: InputBatch, last_sampled: mx.array | None) -> mx.array:
        """Token ids [rows] uint32 of a batch that it takes; rows beyond the batch's are padding.

        last_sampled [max_rows] are the samples that batch.feedback indexes, as `padded` gives them.
        """
        if last_sampled is None:
            last_sampled = self._no_samples
        width = width_bucket(batch.block_tables.shape[1])
        meta = mx.array(self.indices(batch, row_bucket(batch.num_rows), width))
        # A compiled step before this one is followed already: last_sampled is computed from what it gave.
        if not self._backend.leads(self._last_out):
            meta = self._backend.follow(meta)
        run = self._checked if batch.num_drafts and self._checked is not None else self.step
        self._last_out = run(meta, last_sampled)
        self._backend.lead(self._last_out)
        return self._last_out

    @staticmethod
    def indices(batch: InputBatch, num_rows: int, width: int) -> IntArray:
        """A step's input [num_rows, NUM_COLUMNS + width].

        Its columns are the bits of the sampling options, token, sample to take or -1, length, block table.
        """
        out = np.zeros((num_rows, CompiledDecode.NUM_COLUMNS + width), np.int32)
        # Padding rows are greedy and have length 0, and block tables end in the scratch block.
        token, feedback, length = range(NUM_OPTIONS, CompiledDecode.NUM_COLUMNS)
        out[:, feedback] = -1
        rows = out[: batch.num_rows]
        rows[:, :NUM_OPTIONS] = sampling_options(batch.samples).view(np.int32)
        rows[:, token] = batch.token_ids
        if batch.feedback is not None:
            rows[:, feedback] = batch.feedback
        rows[:, length] = batch.seq_lens
        rows[:, CompiledDecode.NUM_COLUMNS :][:, : batch.block_tables.shape[1]] = batch.block_tables
        return out

    def forget(self) -> None:
        """Lets go of what tracing left behind: arrays of the trace, which no step must follow."""
        self._backend.lead(None)

    def warm_up(self, rows: Sequence[int] | None = None) -> Iterator[float]:
        """Builds and compiles every shape on padding rows, which touch no pool; yields the share that is done.

        Of steps without drafts only those of these sizes (None: of all).
        """
        functions = [(self.step, self.row_buckets if rows is None else rows)]
        if self._checked is not None:
            functions.append((self._checked, self.row_buckets))
        widths = sorted({width_bucket(n) for n in range(1, self.max_width + 1)})
        runs = [(run, n, width) for run, sizes in functions for n in sizes for width in widths]
        for done, (run, num_rows, width) in enumerate(runs, 1):
            mx.eval(run(mx.zeros((num_rows, width + self.NUM_COLUMNS), mx.int32), self._no_samples))
            self.forget()
            yield done / len(runs)

    def _step(self, meta: mx.array, last_sampled: mx.array, has_drafts: bool = False) -> mx.array:
        host, feedback, lens = (meta[:, i] for i in range(NUM_OPTIONS, self.NUM_COLUMNS))
        fed_back = last_sampled[mx.maximum(feedback, 0)].astype(mx.int32)
        tokens = mx.where(feedback >= 0, fed_back, host)
        tables = mx.contiguous(meta[:, self.NUM_COLUMNS :])
        views = self._backend.decode_views(tables, mx.contiguous(lens), has_drafts)
        # All of `meta`, which the kernel reads the first columns of: a slice might be too small for it.
        return sample_rows(self._model(tokens, views, None), meta.view(mx.float32))
