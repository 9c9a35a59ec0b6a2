"""Recorded steps with prefill chunks, without a GPU: launches call the recorded step itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlx_engine import memory, recorded_chunks
from mlx_engine.attention.fused import FusedBackend
from mlx_engine.attention.kernels import texts
from mlx_engine.attention.kernels.paged import ChunkPlan
from mlx_engine.compiled_decode import CompiledDecode
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.gpu import adapt_for_gpu
from mlx_engine.input_batch import build_input_batch
from mlx_engine.model_runner import MLXModelRunner
from mlx_engine.paged_model import PagedModel
from mlx_engine.recorded_chunks import RecordedChunks
from mlx_engine.recorded_decode import RecordedDecode
from mlx_engine.types import Request, SamplingParams, ScheduledSequence, SchedulerOutput, cdiv
from plugins import build as build_module
from tests.mlx_engine.kernels.fake_graphs import FakeGraphs
from tests.mlx_engine.kernels.test_recorded_decode import (
    BLOCK_SIZE,
    MAX_PAGES,
    OPTIONS,
    VOCAB,
    Backend,
    Model,
    decoding,
    expected_tokens,
)
from tests.parity.tiny_models import TINY, build

TILE_SHAPE = (16, 2)
MAX_ROWS = 12
# Decode rows and chunk tokens of the recordings, in their order.
SHAPES = [(0, 8), (3, 8), (12, 8), (0, 32), (3, 32), (12, 32), (0, 64), (12, 64)]


@dataclass
class Step:
    """What a step's kernels are given."""

    tables: np.ndarray
    lens: list[int]
    positions: list[int]
    slots: list[int]
    table: list[int]
    chunks: list[list[int]]
    tiles: list[list[int]]

    @property
    def shape(self) -> tuple[int, int]:
        """Decode rows and chunk tokens."""
        return len(self.lens), len(self.positions)


@dataclass
class ChunkBackend(Backend):
    """The same cache of lengths, which notes steps with chunks."""

    steps: list[Step] = field(default_factory=list)
    last: Any = None

    def __post_init__(self) -> None:
        super().__init__()

    def chunk_views(
        self,
        block_tables: mx.array,
        seq_lens: mx.array,
        positions: mx.array,
        slots: mx.array,
        tile_shape: tuple[int, int],
        plan: ChunkPlan,
    ) -> Any:
        """See FusedBackend."""
        assert tile_shape == TILE_SHAPE
        lists: list[Any] = [a.tolist() for a in (seq_lens, positions, slots, plan.block_table, plan.chunks, plan.tiles)]
        self.steps.append(Step(np.array(block_tables), *lists))
        self.last = mx.concatenate([seq_lens, positions + 1])
        return self.last

    def lead(self, output: mx.array | None) -> None:
        self.last = output


def chunk(name: int, tokens: Sequence[int], start: int = 0, samples: bool = True) -> ScheduledSequence:
    """A sequence's tokens from `start` on."""
    table = [(7 * name + i) % 97 + 1 for i in range(cdiv(start + len(tokens), BLOCK_SIZE))]
    return ScheduledSequence(str(name), start, len(tokens), tuple(tokens), table, samples, 0, OPTIONS[name % 4], name)


def tokens_after(parts: Sequence[ScheduledSequence]) -> list[int]:
    """What the parts that sample must give: decode rows first, as in a batch."""
    parts = sorted((part for part in parts if part.samples), key=lambda part: part.num_tokens > 1)
    # The same as decode rows of the last tokens.
    lone = [
        msgspec.structs.replace(part, start=part.start + part.num_tokens - 1, token_ids=part.token_ids[-1:])
        for part in parts
    ]
    return expected_tokens(lone, [part.token_ids[0] for part in lone]) if lone else []


@pytest.fixture
def backend() -> ChunkBackend:
    return ChunkBackend()


@pytest.fixture(autouse=True)
def _small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_TOKENS", (8, 32)), ("_MORE_TOKENS", (64, 512)), ("_SOME_DECODES", 3)):
        monkeypatch.setattr(recorded_chunks, name, value)


def make(backend: ChunkBackend, graphs: FakeGraphs, samples: mx.array, max_bytes: int = 1 << 40) -> RecordedChunks:
    """Not warmed up."""
    return RecordedChunks(
        Model(),  # type: ignore[arg-type]
        backend,  # type: ignore[arg-type]
        graphs,  # type: ignore[arg-type]
        samples,
        tile_shape=TILE_SHAPE,
        max_num_batched_tokens=64,
        max_pages=MAX_PAGES,
        block_size=BLOCK_SIZE,
        max_bytes=max_bytes,
    )


@pytest.fixture
def recorded(kernels_on_host: None, backend: ChunkBackend) -> RecordedChunks:
    """Warmed up."""
    samples = mx.array(np.arange(MAX_ROWS, dtype=np.uint32) + 20)
    mx.eval(samples)
    chunks = make(backend, FakeGraphs(), samples)
    assert list(chunks.warm_up())[-1] == 1.0
    return chunks


def launch(chunks: RecordedChunks, parts: Sequence[ScheduledSequence], last: Sequence[str] = ()) -> list[int] | None:
    """The samples of a recorded step; None where it isn't taken."""
    fetch = chunks.launch(build_input_batch(SchedulerOutput(1, tuple(parts)), BLOCK_SIZE, last))
    return None if fetch is None else fetch.wait()


def test_shapes_are_recorded_on_padding(recorded: RecordedChunks, backend: ChunkBackend) -> None:
    """Once run and once recorded; larger ones than a step of the engine can be are left out."""
    assert [step.shape for step in backend.steps] == [shape for shape in SHAPES for _ in range(2)]
    for step in backend.steps:
        assert not any([*step.lens, *step.slots, *step.table, *step.tables.reshape(-1)])
        assert all(step.chunks[number][1] == 0 for number, _ in step.tiles)
    assert backend.last is None


@pytest.mark.parametrize(
    ("num_decodes", "chunks", "shape"),
    [
        (0, [5], (0, 8)),
        (0, [8], (0, 8)),
        (2, [8], (3, 8)),
        (4, [3], (12, 8)),
        (0, [9], (0, 32)),
        (0, [3, 3], (0, 32)),  # two chunks: a recording of 8 tokens has one
        (3, [20, 12], (3, 32)),
        (12, [2], (12, 8)),
        (1, [33], (12, 64)),
        (0, [64], (0, 64)),
        (0, [8] * 8, (0, 64)),
        (0, [65], None),
        (12, [65], None),
        (0, [2] * 9, None),  # nine chunks, few as their tokens are
    ],
)
def test_the_smallest_recording_that_holds_a_step_is_taken(
    recorded: RecordedChunks, backend: ChunkBackend, num_decodes: int, chunks: list[int], shape: tuple[int, int] | None
) -> None:
    parts = [decoding(i, 6 + i, 11 * i % VOCAB, i, OPTIONS[i % 4]) for i in range(num_decodes)]
    # No more samples than there is room for.
    samples = num_decodes + len(chunks) <= MAX_ROWS
    parts += [chunk(20 + i, [(i + t) % VOCAB for t in range(n)], 0, samples) for i, n in enumerate(chunks)]
    num_steps = len(backend.steps)
    got = launch(recorded, parts)
    assert got == (None if shape is None else tokens_after(parts))
    assert [step.shape for step in backend.steps[num_steps:]] == ([] if shape is None else [shape])


def test_a_step_with_more_samples_than_there_is_room_for_is_not_taken(recorded: RecordedChunks) -> None:
    decodes = [decoding(i, 9, 5) for i in range(11)]
    assert launch(recorded, [*decodes, chunk(20, range(5)), chunk(21, range(5))]) is None
    assert launch(recorded, [*decodes, chunk(20, range(5)), chunk(21, range(5), samples=False)]) is not None


def test_chunks_of_long_sequences_fit_as_far_as_their_block_tables_do(recorded: RecordedChunks) -> None:
    """Any one sequence, and another: a recording of 64 tokens has 84 places for blocks."""
    longest = MAX_PAGES * BLOCK_SIZE
    assert launch(recorded, [chunk(1, range(60), longest - 60), chunk(2, (1, 2), longest - 2)]) is not None
    assert launch(recorded, [chunk(i, (1, 2), longest - 2) for i in range(3)]) is None


def test_kernels_are_given_the_step_and_beyond_it_padding(recorded: RecordedChunks, backend: ChunkBackend) -> None:
    """Whatever a larger step before has left in the recording."""
    launch(recorded, [*(decoding(i, 100, 5) for i in range(12)), *(chunk(i, range(8), 20, False) for i in range(4))])
    decodes = [decoding(i, length, 5) for i, length in enumerate((9, 2, 30, 1))]
    chunks = [chunk(5, range(7), 13), chunk(6, range(11))]
    launch(recorded, [decodes[0], chunks[0], *decodes[1:3], chunks[1], decodes[3]])
    first, step = backend.steps[-2:]
    assert first.shape == step.shape == (12, 32)
    assert step.lens == [9, 2, 30, 1] + [0] * 8
    for row, length in enumerate(step.lens[:4]):
        used = cdiv(length, BLOCK_SIZE)
        assert step.tables[row, :used].tolist() == list(range(1, used + 1))
    assert step.positions[:18] == [*range(13, 20), *range(11)]
    assert step.slots == [
        *(chunks[0].block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(13, 20)),
        *(chunks[1].block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(11)),
        *[0] * 14,  # the scratch block's first
    ]
    # First row, tokens, first position, where the block table begins; one more than there can be for tiles of nothing.
    assert step.chunks == [[0, 7, 13, 0], [7, 11, 0, 5], *[[0, 0, 0, 0]] * 3]
    assert step.table[:8] == [*chunks[0].block_table, *chunks[1].block_table]
    assert sorted(tile for tile in step.tiles if tile[0] != 4) == [[0, 0], [1, 0], [1, 16]]


def test_rows_that_are_drawn_and_rows_that_arent_are_sampled_together(recorded: RecordedChunks) -> None:
    """Some chunks end a prompt, others don't."""
    parts = [decoding(i, 6 + i, 11 * i, i, OPTIONS[i % 4]) for i in range(5)]
    parts += [chunk(i, range(i, 2 * i), samples=i != 6) for i in (9, 6, 7, 8)]
    got = launch(recorded, parts)
    assert got == tokens_after(parts)
    assert len(got) == 8


def test_a_step_may_have_no_samples(recorded: RecordedChunks) -> None:
    assert launch(recorded, [chunk(1, range(5), samples=False), chunk(2, range(9), samples=False)]) == []
    parts = [chunk(3, range(5))]
    assert launch(recorded, parts) == tokens_after(parts)


def test_decode_rows_feed_on_the_samples_of_the_step_before(recorded: RecordedChunks) -> None:
    """In another order than theirs, and beside one whose token the host has."""
    first = [decoding(0, 5, 3), chunk(1, range(6)), chunk(2, range(10, 14))]
    samples = launch(recorded, first)
    assert samples == tokens_after(first)
    second = [decoding(2, 5, None, 1, OPTIONS[2]), decoding(7, 9, 41), decoding(0, 6, None, 1), chunk(3, range(7))]
    known = [msgspec.structs.replace(second[0], token_ids=(samples[2],)), second[1]]
    known += [msgspec.structs.replace(second[2], token_ids=(samples[0],)), second[3]]
    assert launch(recorded, second, ["0", "1", "2"]) == tokens_after(known)


def test_recordings_end_where_their_memory_does(
    kernels_on_host: None,
    monkeypatch: pytest.MonkeyPatch,
    backend: ChunkBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of them takes 10 bytes here."""
    graphs = FakeGraphs()
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1000 + 10 * graphs.num_recorded)
    chunks = make(backend, graphs, mx.zeros((MAX_ROWS,), mx.uint32), max_bytes=25)
    with caplog.at_level(logging.INFO):
        assert list(chunks.warm_up())[-1] == 1.0
    assert graphs.num_recorded == 3
    assert "3 of 8 shapes" in caplog.text
    assert launch(chunks, [chunk(1, range(8))]) is not None
    assert launch(chunks, [chunk(1, range(9))]) is None


def runner(backend: ChunkBackend, graphs: FakeGraphs, decode_bytes: int = 1 << 40) -> MLXModelRunner:
    """Not warmed up. Up to 8 decode rows."""
    compiled = CompiledDecode(Model(), backend, 8, MAX_PAGES, has_drafter=True)  # type: ignore[arg-type]
    recorded = RecordedDecode(compiled, graphs, BLOCK_SIZE, decode_bytes)  # type: ignore[arg-type]
    return MLXModelRunner(
        Model(),  # type: ignore[arg-type]
        backend,  # type: ignore[arg-type]
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        compiled=compiled,
        recorded=recorded,
        recorded_chunks=make(backend, graphs, recorded.samples),
    )


def run_step(model_runner: MLXModelRunner, *parts: ScheduledSequence) -> dict[str, int]:
    """Its samples by request."""
    return dict(model_runner.execute_model(SchedulerOutput(1, parts)).wait().sampled_token_ids)


def by_name(*parts: ScheduledSequence) -> dict[str, int]:
    """What the parts must sample, which are in the batch's order."""
    names = [part.request_id for part in parts if part.samples]
    return dict(zip(names, tokens_after(parts), strict=True))


def test_a_step_takes_the_first_path_that_holds_it(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, backend: ChunkBackend
) -> None:
    """A recording of decode rows, one with chunks, a compiled function, MLX's own operations."""
    graphs = FakeGraphs()
    # Recordings for up to two decode rows, then there is no memory.
    monkeypatch.setattr(mx, "get_active_memory", lambda: graphs.num_recorded)
    model_runner = runner(backend, graphs, decode_bytes=1)
    compiled_rows = []
    warm_up = CompiledDecode.warm_up

    def watched(self: CompiledDecode, rows: Sequence[int] | None = None) -> Iterator[float]:
        compiled_rows.append(rows)
        return warm_up(self, rows)

    monkeypatch.setattr(CompiledDecode, "warm_up", watched)
    shares = list(model_runner.warm_up())
    assert compiled_rows == [[4, 8]], "sizes that memory didn't reach for are compiled"
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    drafted = ScheduledSequence("1", 4, 1, (7,), list(range(1, 9)), True, 0, OPTIONS[0], 101, (8, 9))
    decodes = [decoding(i, 5 + i, 9 + i, 0, OPTIONS[i % 4]) for i in range(4)]
    steps: list[tuple[list[ScheduledSequence], str | None]] = [
        (decodes[:1], "recorded"),
        ([*decodes[:2], chunk(5, range(9))], "recorded_chunks"),
        ([chunk(5, range(9), samples=False)], "recorded_chunks"),
        (decodes[:2], "recorded"),
        (decodes, "compiled"),
        ([*decodes, chunk(5, range(3))], "recorded_chunks"),
        ([decodes[1], chunk(5, [*range(60), *range(5)])], None),
        ([chunk(5, [*range(60), *range(5)], samples=False)], None),
        (decodes[2:], "recorded"),
        ([drafted], "compiled"),
    ]
    counts: dict[str, int] = {}
    for parts, path in steps:
        got = run_step(model_runner, *parts)
        # What drafts give is told apart in tests/mlx_engine/test_drafts.py.
        assert drafted in parts or got == by_name(*parts)
        if path is not None:
            counts[path] = counts.get(path, 0) + 1
        assert model_runner.dispatch_counts() == counts


@pytest.mark.parametrize("refuse_after", [0, 3])
def test_where_chunks_cant_be_recorded_decode_steps_still_are(
    kernels_on_host: None, backend: ChunkBackend, caplog: pytest.LogCaptureFixture, refuse_after: int
) -> None:
    num_decode_recordings = 4 * 1  # of 1, 2, 4 and 8 rows, all of one width
    model_runner = runner(backend, FakeGraphs(num_decode_recordings + refuse_after))
    with caplog.at_level(logging.WARNING):
        list(model_runner.warm_up())
    assert "steps with prefill chunks are not recorded" in caplog.text
    assert "out of memory" in caplog.text
    # Nothing of it is left that the next step would follow.
    assert backend.last is None
    parts = [decoding(0, 5, 9), chunk(5, range(7))]
    assert run_step(model_runner, *parts) == by_name(*parts)
    assert run_step(model_runner, decoding(0, 5, 9)) == by_name(decoding(0, 5, 9))
    assert model_runner.dispatch_counts() == {"recorded": 1}


# With a tiny model, and the kernels on the host.


@pytest.fixture
def recording_engine(gpu_path_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have recordings, of steps with chunks too."""
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build_module, "load_graphs", FakeGraphs)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(build_module, "adapt_for_cpu", lambda model, native: adapt_for_gpu(model))
    monkeypatch.setattr(recorded_chunks, "_TOKENS", (16,))
    monkeypatch.setattr(recorded_chunks, "_MORE_TOKENS", ())


_LAYERS = 1


def _engine(**options: Any) -> Engine:
    config = EngineConfig(
        model="tiny",
        num_blocks=20,
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=22,
        cpu_backend="blas",
        attention_backend="fused",
        **options,
    )
    return build_module.build_engine_for(config, build({**TINY["llama_bfloat16"], "num_hidden_layers": _LAYERS}))


def _answers(engine: Engine) -> tuple[dict[str, list[int]], int]:
    """Of greedy requests and a drawn one, a new one every step; then how many tokens of prompts were cached.

    Two share a prompt of more than two blocks.
    """
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(3, 90, length).tolist()) for length in (12, 3, 36, 9)]
    todo = list(enumerate([*prompts, prompts[2]]))
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    while todo or engine.has_unfinished_requests():
        if todo:
            i, prompt = todo.pop(0)
            sampling = SamplingParams(max_tokens=3, temperature=0.9 if i == 3 else 0.0, seed=i, ignore_eos=True)
            engine.add_request(Request(str(i), prompt, sampling))
            tokens[str(i)] = []
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            cached[output.request_id] = output.num_cached_tokens
    engine.check_idle()
    return tokens, sum(cached.values())


def test_requests_get_the_same_tokens_from_recordings(recording_engine: None) -> None:
    """Some steps have more chunk tokens than a recording, and a prompt is partly cached."""
    eager = _engine(compile_decode=False)
    expected = _answers(eager)
    assert expected[1] == 32
    engine = _engine()
    assert _answers(engine) == expected
    counts, eager_counts = engine.stats().dispatch, eager.stats().dispatch
    assert 4 <= counts["recorded_chunks"] < eager_counts["chunk_paged"]
    assert counts["recorded"] > 0
    assert "compiled" not in counts
    assert not {"recorded", "recorded_chunks", "compiled"} & set(eager_counts)


def test_recorded_steps_write_the_slots_of_their_tokens_and_of_the_scratch_block(recording_engine: None) -> None:
    loaded = build({**TINY["llama_bfloat16"], "num_hidden_layers": _LAYERS})
    model, backend = PagedModel(loaded, adapt_for_gpu), FusedBackend()
    backend.initialize(model.layers, 12, 16, mx.bfloat16)
    tile_shape = backend.tile_shape(model.num_heads)
    assert tile_shape is not None
    chunks = RecordedChunks(
        model,
        backend,
        FakeGraphs(),  # type: ignore[arg-type]
        mx.zeros((8,), mx.uint32),
        tile_shape=tile_shape,
        max_num_batched_tokens=22,
        max_pages=4,
        block_size=16,
        max_bytes=1 << 40,
    )
    for array in (array for pool in backend._pools for array in pool.arrays()):
        array[:] = mx.full(array.shape, 5, array.dtype)
        mx.eval(array)
    list(chunks.warm_up())
    assert all(mx.all(array[1:] == 5).item() for pool in backend._pools for array in pool.blocks())
    parts = (
        ScheduledSequence("a", 17, 1, (9,), [3, 7], True, 0, OPTIONS[0], 0),
        ScheduledSequence("b", 14, 5, (1, 2, 3, 4, 5), [2, 9], True, 0, OPTIONS[0], 0),
    )
    batch = build_input_batch(SchedulerOutput(1, parts), 16)
    fetch = chunks.launch(batch)
    assert fetch is not None
    assert len(fetch.wait()) == 2
    for pool in backend._pools:
        for array in pool.blocks():
            changed = np.array((array != 5).any(axis=(1, 3)))[1:]
            written = {16 * (block + 1) + slot for block, slot in np.argwhere(changed).tolist()}
            assert written == set(batch.slot_mapping.tolist())
