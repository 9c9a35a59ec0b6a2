"""A step as flat arrays: rows, positions, slots and groups that say where everything is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.input_batch import build_input_batch
from mlx_engine.types import SCRATCH_BLOCK, SamplingParams, ScheduledSequence, SchedulerOutput, cdiv

SAMPLING = SamplingParams()


def part(
    name: str,
    start: int,
    tokens: list[int],
    table: list[int],
    *,
    samples: bool = True,
    num_tokens: int | None = None,
    drafts: tuple[int, ...] = (),
) -> ScheduledSequence:
    """One sequence's part of a step."""
    return ScheduledSequence(name, start, num_tokens or len(tokens), tokens, table, samples, 0, SAMPLING, 0, drafts)


def test_decode_rows_come_first_and_every_row_knows_its_place() -> None:
    """The picture in the module's docstring, block size 4."""
    step = SchedulerOutput(
        7,
        (
            part("d", 2, [30, 31, 32], [9, 4], samples=False),
            part("a", 5, [10], [3, 1]),
            part("e", 0, [40, 41], [6]),
            part("b", 8, [11], [2, 5, 7]),
        ),
    )
    batch = build_input_batch(step, 4)
    assert batch.token_ids.tolist() == [10, 11, 30, 31, 32, 40, 41]
    assert batch.positions.tolist() == [5, 8, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [1 * 4 + 1, 7 * 4, 9 * 4 + 2, 9 * 4 + 3, 4 * 4, 6 * 4, 6 * 4 + 1]
    assert batch.num_decode_rows == 2
    assert batch.feedback is None
    assert [(c.first_row, c.num_tokens, c.start, c.seq_len) for c in batch.prefill_chunks] == [
        (2, 3, 2, 5),
        (5, 2, 0, 2),
    ]
    assert [c.block_table.tolist() for c in batch.prefill_chunks] == [[9, 4], [6]]
    assert batch.sample_rows.tolist() == [0, 1, 6]
    assert [seq.request_id for seq in batch.samples] == ["a", "b", "e"]


def test_drafts_are_rows_of_their_own_after_all_others_that_decode() -> None:
    """The second picture in the docstring, block size 4; b's token is on the device still."""
    step = SchedulerOutput(
        7,
        (
            part("b", 7, [], [2, 5, 7], num_tokens=1, drafts=(20, 21)),
            part("d", 2, [30, 31, 32], [9, 4]),
            part("c", 5, [12], [3, 1], drafts=(22,)),
            part("a", 0, [10], [6]),
        ),
    )
    batch = build_input_batch(step, 4, ["x", "b"])
    assert batch.token_ids.tolist() == [10, 0, 12, 20, 21, 22, 30, 31, 32]
    assert batch.feedback is not None
    assert batch.feedback.tolist() == [-1, 1, *[-1] * 7]
    assert batch.positions.tolist() == [0, 7, 5, 8, 9, 6, 2, 3, 4]
    assert batch.slot_mapping[:6].tolist() == [6 * 4, 5 * 4 + 3, 1 * 4 + 1, 7 * 4, 7 * 4 + 1, 1 * 4 + 2]
    assert (batch.num_decode_rows, batch.num_verify_rows) == (6, 5)
    assert batch.seq_lens.tolist() == [1, 8, 6, 9, 10, 7]
    assert batch.block_tables.tolist() == [[6, 0, 0], [2, 5, 0], [3, 1, 0], [2, 5, 7], [2, 5, 7], [3, 1, 0]]
    assert batch.verify_rows.tolist() == [[1, 3, 4], [2, 5, 5]]
    assert [seq.request_id for seq in batch.samples] == ["a", "b", "c", "b", "b", "c", "d"]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert batch.draft_samples == range(3, 6)
    lone, shared = batch.decode_groups
    assert (lone.rows.tolist(), lone.block_tables.tolist(), lone.seq_lens.tolist()) == ([[0]], [[6]], [[1]])
    assert shared.rows.tolist() == [[1, 3, 4], [2, 5, 5]]
    assert shared.block_tables.tolist() == [[2, 5, 7], [3, 1, 0]]
    assert shared.seq_lens.tolist() == [[8, 9, 10], [6, 7, 7]]


def test_tokens_still_on_the_device_are_taken_from_the_last_steps_samples() -> None:
    step = SchedulerOutput(1, (part("a", 3, [], [1], num_tokens=1), part("b", 4, [5], [2, 3])))
    batch = build_input_batch(step, 4, ["x", "b", "a"])
    assert batch.feedback is not None
    # b is among them too, but its token has come to the host since.
    assert batch.feedback.tolist() == [2, -1]
    assert batch.token_ids.tolist() == [0, 5]


def test_a_token_that_is_nowhere_is_an_error_that_names_the_request() -> None:
    step = SchedulerOutput(1, (part("lost", 3, [], [1], num_tokens=1),))
    with pytest.raises(ValueError, match="lost at position 3"):
        build_input_batch(step, 4, ["other"])


def test_tables_longer_than_needed_are_cut() -> None:
    """A slab covers the longest answer: reading all of it for a short one would cost."""
    step = SchedulerOutput(1, (part("a", 4, [1], list(range(1, 40))), part("b", 3, [1, 2], list(range(50, 90)))))
    batch = build_input_batch(step, 4)
    assert batch.decode_groups[0].block_tables.tolist() == [[1, 2]]
    assert batch.prefill_chunks[0].block_table.tolist() == [50, 51]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 2000) | st.integers(0, 40), min_size=1, max_size=20),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_every_decode_row_is_in_one_group_with_its_own_table(lengths: list[int], block_size: int) -> None:
    tables = [[1000 * i + j + 1 for j in range(cdiv(n + 1, block_size))] for i, n in enumerate(lengths)]
    step = SchedulerOutput(
        1, tuple(part(str(i), n, [0], table) for i, (n, table) in enumerate(zip(lengths, tables, strict=True)))
    )
    groups = build_input_batch(step, block_size).decode_groups
    assert sorted(np.concatenate([group.rows[:, 0] for group in groups]).tolist()) == list(range(len(lengths)))
    padded = 0
    for group in groups:
        for row, table, length in zip(group.rows[:, 0], group.block_tables.tolist(), group.seq_lens[:, 0], strict=True):
            assert length == lengths[row] + 1
            assert table[: len(tables[row])] == tables[row]
            assert set(table[len(tables[row]) :]) <= {SCRATCH_BLOCK}
            padded += len(table)
    # What grouping is for: padding at most doubles the work, and once more for stragglers.
    assert padded <= 3 * sum(len(table) for table in tables)
