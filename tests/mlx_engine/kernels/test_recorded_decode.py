"""Recorded decode steps, with recordings that call the step itself: indices, options, and what each step feeds on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlx_engine import recorded_decode
from mlx_engine.attention.kernels.sampling import sample_rows
from mlx_engine.compiled_decode import CompiledDecode
from mlx_engine.input_batch import InputBatch, build_input_batch
from mlx_engine.model_runner import MLXModelRunner
from mlx_engine.recorded_decode import RecordedDecode
from mlx_engine.sampler import sampling_options
from mlx_engine.types import SamplingParams, ScheduledSequence, SchedulerOutput
from tests.mlx_engine.kernels.fake_graphs import FakeGraphs

VOCAB = 64
BLOCK_SIZE = 4
MAX_PAGES = 30
GREEDY = SamplingParams(temperature=0.0)
OPTIONS = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.7, top_k=9),
    SamplingParams(top_p=0.6, min_p=0.02),
]
_TABLE = np.array(mx.random.normal((VOCAB, VOCAB), key=mx.random.key(8)) * 3)


def logits_after(token: int, length: int) -> np.ndarray:
    """What the model says after a token at the end of a sequence of this length."""
    return np.roll(_TABLE[token], length)


class Model:
    """Logits from a row's token and the length that its cache has been told of."""

    def __call__(self, tokens: mx.array, lens: Any, rows: mx.array | None) -> mx.array:
        if rows is not None:
            tokens, lens = tokens[rows], lens[rows]
        table = mx.array(_TABLE)[tokens]
        shifted = (mx.arange(VOCAB) - lens[:, None]) % VOCAB
        return mx.take_along_axis(table, shifted, axis=1)


class Backend:
    """A cache that is no more than the lengths."""

    compiles = True

    def __init__(self) -> None:
        self.tables: list[np.ndarray] = []
        self.lens: list[list[int]] = []

    def decode_views(self, block_tables: mx.array, seq_lens: mx.array, has_drafts: bool = False) -> Any:
        """Notes what each step is given."""
        self.tables.append(np.array(block_tables))
        self.lens.append(seq_lens.tolist())  # type: ignore[arg-type]
        return seq_lens

    def begin_step(self, batch: InputBatch) -> Any:
        """Of a step that isn't compiled."""
        return mx.array(batch.positions + 1)

    def follow(self, indices: mx.array) -> mx.array:
        """Nothing to follow."""
        return indices

    def lead(self, output: mx.array | None) -> None:
        """Nothing to lead."""

    def leads(self, output: mx.array | None) -> bool:
        """Nothing to lead."""
        return False

    def state(self) -> list[mx.array]:
        """No pools."""
        return []

    def dispatch_counts(self) -> dict[str, int]:
        """No paths."""
        return {}


def decoding(
    name: int, length: int, token: int | None, count: int = 0, sampling: SamplingParams = GREEDY
) -> ScheduledSequence:
    """A decode row: a sequence of `length` tokens with this one; without a token, the one on the device."""
    tokens = () if token is None else (token,)
    table = list(range(1, MAX_PAGES + 1))
    return ScheduledSequence(str(name), length - 1, 1, tokens, table, True, count, sampling, 100 + name)


def expected_tokens(parts: Sequence[ScheduledSequence], tokens: Sequence[int]) -> list[int]:
    """What the parts must sample after these tokens."""
    logits = np.stack([logits_after(token, part.start + 1) for part, token in zip(parts, tokens, strict=True)])
    found: list[int] = sample_rows(mx.array(logits), mx.array(sampling_options(parts))).tolist()  # type: ignore[assignment]
    return found


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def graphs() -> FakeGraphs:
    return FakeGraphs()


@pytest.fixture
def recorded(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, backend: Backend, graphs: FakeGraphs
) -> RecordedDecode:
    """Warmed up. Up to 12 rows; recordings for up to 10 pages and for up to 32."""
    monkeypatch.setattr(recorded_decode, "_SHORT_TOKENS", 10 * BLOCK_SIZE)
    compiled = CompiledDecode(Model(), backend, 12, MAX_PAGES)  # type: ignore[arg-type]
    decode = RecordedDecode(compiled, graphs, BLOCK_SIZE, 1 << 40)  # type: ignore[arg-type]
    assert list(decode.warm_up())[-1] == 1.0
    return decode


def launch(decode: RecordedDecode, parts: Sequence[ScheduledSequence], last: Sequence[str] = ()) -> list[int]:
    """The samples of a recorded step."""
    batch = build_input_batch(SchedulerOutput(1, tuple(parts)), BLOCK_SIZE, last)
    return decode.launch(batch).wait()


def test_every_bucket_of_rows_is_recorded_for_short_and_long_rows(recorded: RecordedDecode, graphs: FakeGraphs) -> None:
    assert graphs.num_recorded == 2 * len([1, 2, 4, 8, 12])


def test_recordings_end_where_their_memory_does(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, backend: Backend, graphs: FakeGraphs
) -> None:
    """Each of them takes 10 bytes here. Rows of one bucket may be recorded for short tables only."""
    monkeypatch.setattr(recorded_decode, "_SHORT_TOKENS", 10 * BLOCK_SIZE)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1000 + 10 * graphs.num_recorded)
    compiled = CompiledDecode(Model(), backend, 12, MAX_PAGES)  # type: ignore[arg-type]
    decode = RecordedDecode(compiled, graphs, BLOCK_SIZE, 25)  # type: ignore[arg-type]
    assert list(decode.warm_up())[-1] == 1.0
    assert graphs.num_recorded == 3
    for parts, taken in (
        ([decoding(0, 100, 5)], True),
        ([decoding(0, 9, 5), decoding(1, 9, 5)], True),
        ([decoding(0, 100, 5), decoding(1, 9, 5)], False),
        ([decoding(i, 9, 5) for i in range(3)], False),
    ):
        fetch = decode.launch(build_input_batch(SchedulerOutput(1, tuple(parts)), BLOCK_SIZE))
        assert (None if fetch is None else fetch.wait()) == (
            expected_tokens(parts, [5] * len(parts)) if taken else None
        )


def test_greedy_and_sampled_rows_run_from_one_recording(recorded: RecordedDecode, graphs: FakeGraphs) -> None:
    parts = [decoding(i, 5 + i, 3 * i, i, OPTIONS[i % 4]) for i in range(7)]
    got = launch(recorded, parts)
    assert got == expected_tokens(parts, [3 * i for i in range(7)])
    assert got[::4] == [int(np.argmax(logits_after(3 * i, 5 + i))) for i in range(0, 7, 4)]
    # The same recording, other options.
    parts = [msgspec.structs.replace(part, sampling=OPTIONS[(i + 1) % 4]) for i, part in enumerate(parts)]
    assert launch(recorded, parts) == expected_tokens(parts, [3 * i for i in range(7)])
    assert len(set(graphs.written)) == 1


def test_steps_feed_on_the_samples_of_the_step_before(recorded: RecordedDecode) -> None:
    """In another order, with fewer rows, and a row whose token the host has."""
    first = [decoding(i, 4, 10 + i, 0, OPTIONS[i]) for i in range(4)]
    samples = launch(recorded, first)
    second = [decoding(3, 5, None, 1, OPTIONS[3]), decoding(9, 8, 42, 0), decoding(1, 5, None, 1, OPTIONS[1])]
    got = launch(recorded, second, ["0", "1", "2", "3"])
    assert got == expected_tokens(second, [samples[3], 42, samples[1]])


def test_samples_of_other_steps_are_published_for_recorded_ones(recorded: RecordedDecode) -> None:
    assert recorded.publish(mx.array([7, 50, 21], mx.uint32)).wait() == [7, 50, 21]
    parts = [decoding(2, 9, None, 4, OPTIONS[1]), decoding(0, 6, None)]
    assert launch(recorded, parts, ["0", "1", "2"]) == expected_tokens(parts, [21, 7])


def test_the_width_follows_the_longest_row(recorded: RecordedDecode, graphs: FakeGraphs, backend: Backend) -> None:
    for length, width in ((1, 10), (40, 10), (41, 32), (120, 32), (3, 10)):
        parts = [decoding(0, length, 5), decoding(1, 2, 6)]
        assert launch(recorded, parts) == expected_tokens(parts, [5, 6])
        assert graphs.written[-1] == (2, width + CompiledDecode.NUM_COLUMNS)
        used = -(-length // BLOCK_SIZE)
        assert backend.tables[-1][0, :used].tolist() == list(range(1, used + 1))


def test_what_a_larger_batch_left_behind_is_padding(recorded: RecordedDecode, backend: Backend) -> None:
    launch(recorded, [decoding(i, 20, 5, 0, OPTIONS[1]) for i in range(12)])
    parts = [decoding(i, 7, 8) for i in range(9)]
    assert launch(recorded, parts) == expected_tokens(parts, [8] * 9)
    assert backend.lens[-1] == [7] * 9 + [0] * 3


def runner(backend: Backend, graphs: FakeGraphs | None) -> MLXModelRunner:
    """Not warmed up."""
    compiled = CompiledDecode(Model(), backend, 4, MAX_PAGES)  # type: ignore[arg-type]
    recorded = None if graphs is None else RecordedDecode(compiled, graphs, BLOCK_SIZE, 1 << 40)  # type: ignore[arg-type]
    return MLXModelRunner(
        Model(),  # type: ignore[arg-type]
        backend,  # type: ignore[arg-type]
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        compiled=compiled,
        recorded=recorded,
    )


def run_steps(model_runner: MLXModelRunner) -> list[dict[str, int]]:
    """Prefill, a decode step, a step with both, a decode step; each built before the one before is waited for."""
    tables = list(range(1, MAX_PAGES + 1))

    def chunk(name: int, tokens: tuple[int, ...]) -> ScheduledSequence:
        return ScheduledSequence(str(name), 0, len(tokens), tokens, tables, True, 0, OPTIONS[name], 100 + name)

    steps = [
        (chunk(0, (1, 2, 3)), chunk(1, (4, 5))),
        (decoding(1, 3, None, 1, OPTIONS[1]), decoding(0, 4, None, 1, OPTIONS[0])),
        (decoding(0, 5, None, 2, OPTIONS[0]), chunk(2, (9, 8, 7, 6))),
        (decoding(2, 5, None, 1, OPTIONS[2]), decoding(0, 6, None, 3, OPTIONS[0])),
    ]
    handles = []
    for step, parts in enumerate(steps):
        handles.append(model_runner.execute_model(SchedulerOutput(step, parts)))
        handles[-1].launch()
    return [dict(handle.wait().sampled_token_ids) for handle in handles]


def test_steps_of_all_kinds_take_turns(kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runner(Backend(), None)
    want = run_steps(plain)
    recording = runner(Backend(), FakeGraphs())
    list(recording.warm_up())
    assert run_steps(recording) == want
    assert recording.dispatch_counts() == {"recorded": 2}
    assert plain.dispatch_counts() == {"compiled": 2}


@pytest.mark.parametrize("refuse_after", [0, 2])
def test_a_refused_recording_leaves_compiled_steps(
    kernels_on_host: None, caplog: pytest.LogCaptureFixture, refuse_after: int
) -> None:
    refused = runner(Backend(), FakeGraphs(refuse_after))
    with caplog.at_level(logging.WARNING):
        assert list(refused.warm_up())[-1] == 1.0
    assert "compiled but not recorded" in caplog.text
    assert "out of memory" in caplog.text
    assert run_steps(refused) == run_steps(runner(Backend(), None))
    assert refused.dispatch_counts() == {"compiled": 2}
