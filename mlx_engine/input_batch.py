"""The step's inputs as flat host arrays: what the device needs to run a SchedulerOutput in one forward pass.

Rows are tokens. Sequences that run one token come first (the decode rows), prefill chunks follow:

    row            0   1   2   3   4   5   6   7
    sequence       a   b   c   d   d   d   e   e
                   `- decode -'   `-- chunks ---'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_engine.types import ScheduledSequence, SchedulerOutput, cdiv

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose block tables are of similar length, so that padding them costs little."""

    rows: IntArray  # [B] row numbers
    block_tables: IntArray  # [B, max_blocks], padded with the scratch block
    seq_lens: IntArray  # [B] tokens to attend to, the row's own included


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive rows of one sequence."""

    first_row: int
    num_tokens: int
    start: int  # position of the first token
    block_table: IntArray  # [cdiv(start + num_tokens, block_size)]

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence after the chunk."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, flattened. T rows, S of which give a sample."""

    token_ids: IntArray  # [T]; 0 where the token is on the device
    feedback: IntArray | None  # [T] index into the last step's samples, -1 where token_ids holds; None if all -1
    positions: IntArray  # [T]
    slot_mapping: IntArray  # [T] block id * block_size + offset: where the row's K/V goes
    decode_groups: tuple[DecodeGroup, ...]
    num_decode_rows: int  # rows 0 to num_decode_rows - 1
    prefill_chunks: tuple[PrefillChunk, ...]
    sample_rows: IntArray  # [S], ascending
    samples: tuple[ScheduledSequence, ...]  # [S], the sequences of sample_rows

    @property
    def num_rows(self) -> int:
        """T, the number of tokens in the forward pass."""
        return len(self.token_ids)


def build_input_batch(output: SchedulerOutput, block_size: int, last_samples: Sequence[str] = ()) -> InputBatch:
    """Flattens a step. `last_samples` names the request of each of the last step's samples, in order.

    Raises ValueError when a token is neither on the host nor among the last step's samples.
    """
    decodes = [seq for seq in output.sequences if seq.num_tokens == 1]
    chunks = [seq for seq in output.sequences if seq.num_tokens > 1]
    ordered = decodes + chunks
    num_rows = output.num_tokens
    token_ids = np.zeros(num_rows, np.int32)
    feedback = np.full(num_rows, -1, np.int32)
    positions = np.empty(num_rows, np.int32)
    slots = np.empty(num_rows, np.int32)
    source = {request_id: i for i, request_id in enumerate(last_samples)}
    tables = [np.asarray(seq.block_table, np.int32) for seq in ordered]
    sample_rows, samples, prefill = [], [], []
    row = 0
    for seq, table in zip(ordered, tables, strict=True):
        end = row + seq.num_tokens
        if seq.token_ids:
            token_ids[row:end] = seq.token_ids
        elif seq.request_id in source:
            feedback[row] = source[seq.request_id]
        else:
            raise ValueError(f"no token for {seq.request_id} at position {seq.start}")
        where = np.arange(seq.start, seq.start + seq.num_tokens, dtype=np.int32)
        positions[row:end] = where
        slots[row:end] = table[where // block_size] * block_size + where % block_size
        if seq.num_tokens > 1:
            used = cdiv(seq.start + seq.num_tokens, block_size)
            prefill.append(PrefillChunk(row, seq.num_tokens, seq.start, table[:used]))
        if seq.samples:
            sample_rows.append(end - 1)
            samples.append(seq)
        row = end
    return InputBatch(
        token_ids=token_ids,
        feedback=feedback if (feedback >= 0).any() else None,
        positions=positions,
        slot_mapping=slots,
        decode_groups=_group_decodes(decodes, tables, block_size),
        num_decode_rows=len(decodes),
        prefill_chunks=tuple(prefill),
        sample_rows=np.asarray(sample_rows, np.int32),
        samples=tuple(samples),
    )


def _group_decodes(
    decodes: Sequence[ScheduledSequence], tables: Sequence[IntArray], block_size: int
) -> tuple[DecodeGroup, ...]:
    """Splits decode rows where padding to the longest would more than double the work."""
    used = [cdiv(seq.start + 1, block_size) for seq in decodes]
    order = sorted(range(len(decodes)), key=used.__getitem__)
    groups = []
    while order:
        # The longest, and all that are at least half as long; a few short stragglers ride along.
        longest = used[order[-1]]
        cut = next(i for i, row in enumerate(order) if 2 * used[row] >= longest)
        if sum(longest - used[row] for row in order[:cut]) <= longest:
            cut = 0
        rows, order = sorted(order[cut:]), order[:cut]
        block_tables = np.zeros((len(rows), longest), np.int32)
        for i, row in enumerate(rows):
            block_tables[i, : used[row]] = tables[row][: used[row]]
        groups.append(
            DecodeGroup(
                rows=np.asarray(rows, np.int32),
                block_tables=block_tables,
                seq_lens=np.asarray([decodes[row].start + 1 for row in rows], np.int32),
            )
        )
    return tuple(groups)
