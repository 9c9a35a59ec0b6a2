"""The step's inputs as flat host arrays: what the device needs to run a SchedulerOutput in one forward pass.

Rows are tokens. Sequences that run one token come first (the decode rows), prefill chunks follow:

    row            0   1   2   3   4   5   6   7
    sequence       a   b   c   d   d   d   e   e
                   `- decode -'   `-- chunks ---'

A draft is a decode row of its own, after all that are none. Sequences with drafts come last among the decode rows, so
that the rows which see what others of the same step store lie together (here b and c have drafts):

    row            0   1   2   3   4   5   6   7   8
    sequence       a   b   c   b   b   c   d   d   d
                       `---- verify ---'
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_engine.types import ScheduledSequence, SchedulerOutput, cdiv

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose block tables are of similar length, so that padding them costs little.

    Each of B tables is read by m rows: by 1, or by all rows of a sequence with drafts, in order. Where others have more
    of them its last row stands there again.
    """

    rows: IntArray  # [B, m] row numbers
    block_tables: IntArray  # [B, max_blocks], padded with the scratch block
    seq_lens: IntArray  # [B, m] tokens to attend to, the row's own included


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
    block_size: int  # tokens
    num_decode_rows: int  # B; rows 0 to B - 1
    num_drafts: tuple[int, ...]  # of each sequence that has some
    block_tables: IntArray  # [B, P] of the decode rows, padded with the scratch block
    seq_lens: IntArray  # [B] tokens to attend to, the row's own included
    prefill_chunks: tuple[PrefillChunk, ...]
    sample_rows: IntArray  # [S], ascending
    samples: tuple[ScheduledSequence, ...]  # [S], the sequences of sample_rows

    @property
    def num_rows(self) -> int:
        """T, the number of tokens in the forward pass."""
        return len(self.token_ids)

    @property
    def num_verify_rows(self) -> int:
        """The last of the decode rows, of sequences with drafts: each sees K/V that others of them store."""
        return len(self.num_drafts) + sum(self.num_drafts)

    @property
    def verify_rows(self) -> IntArray:
        """[n, m] the rows of each sequence with drafts in order, its last one repeated. Made anew each time."""
        counts = np.asarray(self.num_drafts, np.int32).reshape(-1, 1)
        lone = self.num_decode_rows - self.num_verify_rows + np.arange(len(counts), dtype=np.int32)
        first = self.num_decode_rows - counts.sum() + np.cumsum(counts, axis=0, dtype=np.int32) - counts
        drafts = first + np.minimum(np.arange(counts.max(initial=0), dtype=np.int32), counts - 1)
        return np.hstack([lone[:, None], drafts]).astype(np.int32)

    @property
    def draft_samples(self) -> range:
        """Which of the samples are of drafts."""
        end = int(np.searchsorted(self.sample_rows, self.num_decode_rows))
        return range(end - sum(self.num_drafts), end)

    @property
    def decode_groups(self) -> tuple[DecodeGroup, ...]:
        """The decode rows, split where padding to the longest would more than double the work. Made anew each time."""
        lone = np.arange(self.num_decode_rows - self.num_verify_rows, dtype=np.int32)[:, None]
        return tuple(
            DecodeGroup(rows, self.block_tables[rows[:, -1], :width], self.seq_lens[rows])
            for sequences in ((lone, self.verify_rows) if self.num_drafts else (lone,))
            for rows, width in _group_decodes(sequences, self.seq_lens, self.block_size)
        )


def build_input_batch(output: SchedulerOutput, block_size: int, last_samples: Sequence[str] = ()) -> InputBatch:
    """Flattens a step. `last_samples` names the request of each of the last step's samples, in order.

    Raises ValueError when a token is neither on the host nor among the last step's samples.
    """
    decodes = [seq for seq in output.sequences if seq.num_tokens == 1]
    chunks = [seq for seq in output.sequences if seq.num_tokens > 1]
    drafted = [seq for seq in decodes if seq.draft_token_ids]
    if drafted:
        decodes = [seq for seq in decodes if not seq.draft_token_ids] + drafted
    num_lone = len(decodes)
    drafts = [(seq, i, token) for seq in drafted for i, token in enumerate(seq.draft_token_ids, 1)]
    num_decodes = num_lone + len(drafts)
    num_rows = num_decodes + sum([seq.num_tokens for seq in chunks])
    token_ids = np.zeros(num_rows, np.int32)
    feedback = np.full(num_rows, -1, np.int32)
    positions = np.empty(num_rows, np.int32)
    slots = np.empty(num_rows, np.int32)
    # All decode rows at once: with hundreds of them a loop over rows costs more than the step itself.
    token_ids[:num_lone] = [seq.token_ids[0] if seq.token_ids else 0 for seq in decodes]
    token_ids[num_lone:num_decodes] = [token for _, _, token in drafts]
    feedback[:num_lone] = _feedback(decodes, last_samples)
    starts = positions[:num_decodes]
    starts[:num_lone] = [seq.start for seq in decodes]
    starts[num_lone:] = [seq.start + i for seq, i, _ in drafts]
    decodes += [seq for seq, _, _ in drafts]
    blocks, offsets = np.divmod(starts, block_size)
    tables = _padded_tables(decodes, blocks + 1)
    slots[:num_decodes] = tables[np.arange(num_decodes), blocks] * block_size + offsets
    sample_rows = [row for row, seq in enumerate(decodes) if seq.samples]
    samples = [seq for seq in decodes if seq.samples]
    prefill = []
    row = num_decodes
    for seq in chunks:
        end = row + seq.num_tokens
        token_ids[row:end] = seq.token_ids
        where = np.arange(seq.start, seq.start + seq.num_tokens, dtype=np.int32)
        positions[row:end] = where
        table = np.asarray(seq.block_table[: cdiv(seq.start + seq.num_tokens, block_size)], np.int32)
        slots[row:end] = table[where // block_size] * block_size + where % block_size
        prefill.append(PrefillChunk(row, seq.num_tokens, seq.start, table))
        if seq.samples:
            sample_rows.append(end - 1)
            samples.append(seq)
        row = end
    return InputBatch(
        token_ids=token_ids,
        feedback=feedback if (feedback >= 0).any() else None,
        positions=positions,
        slot_mapping=slots,
        block_size=block_size,
        num_decode_rows=num_decodes,
        num_drafts=tuple([len(seq.draft_token_ids) for seq in drafted]),
        block_tables=tables,
        seq_lens=starts + 1,
        prefill_chunks=tuple(prefill),
        sample_rows=np.asarray(sample_rows, np.int32),
        samples=tuple(samples),
    )


def _feedback(decodes: Sequence[ScheduledSequence], last_samples: Sequence[str]) -> list[int]:
    """Which of the last samples each row's token is, -1 where the host has it."""
    source = dict(zip(last_samples, range(len(last_samples)), strict=True))
    indices = [-1 if seq.token_ids else source.get(seq.request_id, -2) for seq in decodes]
    if -2 in indices:
        seq = decodes[indices.index(-2)]
        raise ValueError(f"no token for {seq.request_id} at position {seq.start}")
    return indices


def _padded_tables(decodes: Sequence[ScheduledSequence], used: IntArray) -> IntArray:
    """[B, P] the first `used` blocks of each table, padded with the scratch block."""
    width = int(used.max(initial=0))
    out = np.zeros((len(decodes), width), np.int32)
    # A table that is an array("i") of the right length, as PagedKVManager's mostly are, needs no copy of its own.
    flat = [
        table if len(table := seq.block_table) == count and isinstance(table, array) else array("i", table[:count])
        for seq, count in zip(decodes, used.tolist(), strict=True)
    ]
    out[np.arange(width) < used[:, None]] = np.frombuffer(b"".join(flat), np.int32)
    return out


def _group_decodes(sequences: IntArray, seq_lens: IntArray, block_size: int) -> list[tuple[IntArray, int]]:
    """The rows of the sequences [n, m] in groups, and how many blocks the longest of each has."""
    used = ((seq_lens[sequences[:, -1]] + block_size - 1) // block_size).tolist()
    order = sorted(range(len(used)), key=used.__getitem__)
    groups = []
    while order:
        # The longest, and all that are at least half as long; a few short stragglers ride along.
        longest = used[order[-1]]
        cut = next(i for i, row in enumerate(order) if 2 * used[row] >= longest)
        if sum(longest - used[row] for row in order[:cut]) <= longest:
            cut = 0
        groups.append((sequences[sorted(order[cut:])], longest))
        order = order[:cut]
    return groups
