"""The gather backend on random block tables, against attention written out in float64.

Every pool row that belongs to no sequence of the step holds large garbage: reading one would show.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlx_engine.attention.gather import GatherBackend
from mlx_engine.attention.kernels import reference
from mlx_engine.attention.pool import LayerPool, dequantize, quantize
from mlx_engine.input_batch import build_input_batch
from mlx_engine.types import LayerKVSpec, SamplingParams, ScheduledSequence, SchedulerOutput, cdiv

Array = npt.NDArray[np.float64]
GARBAGE = 3e4  # finite, and representable in float16
# Relative to values of about 1; the reference starts from the rounded inputs.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """What a step of attention depends on."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    dtype: mx.Dtype = mx.float32
    decode: str = "gather_sdpa"
    window: int | None = None  # of the layer
    model_window: int | None = None  # that the model asks for in make_mask
    sinks: bool = False
    quantized: bool = False
    # (tokens before the step, tokens in the step) of each sequence
    sequences: tuple[tuple[int, int], ...] = ((0, 1), (5, 1), (15, 1), (16, 1), (40, 1), (200, 1))


def expected_rows(case: Case, queries: Array, keys: Array, values: Array, start: int, sinks: Array | None) -> Array:
    """Attention [n, heads, value_dim] of n queries from position `start` on over keys [length, kv_heads, dim]."""
    windows = [w for w in (case.window, case.model_window) if w is not None]
    out = np.zeros((*queries.shape[:2], values.shape[-1]))
    for row in range(len(queries)):
        last = start + row
        first = max(last + 1 - min(windows), 0) if windows else 0
        for head in range(case.heads):
            kv = head // (case.heads // case.kv_heads)
            scores = keys[first : last + 1, kv] @ queries[row, head] / np.sqrt(case.head_dim)
            top = max(scores.max(), sinks[head]) if sinks is not None else scores.max()
            weights = np.exp(scores - top)
            total = weights.sum() + (np.exp(sinks[head] - top) if sinks is not None else 0.0)
            out[row, head] = weights @ values[first : last + 1, kv] / total
    return out


def check(case: Case, seed: int = 0) -> GatherBackend:
    """Runs one step of one layer on scattered blocks, and compares every row."""
    rng = np.random.default_rng(seed)
    value_dim = case.value_dim or case.head_dim

    def rounded(*shape: int) -> tuple[mx.array, Array]:
        array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(case.dtype)
        return array, np.array(array.astype(mx.float32), np.float64)

    sizes = [cdiv(before + now, case.block_size) for before, now in case.sequences]
    num_blocks = sum(sizes) + 5
    blocks = iter((rng.permutation(num_blocks) + 1).tolist())
    tables = [[next(blocks) for _ in range(size)] for size in sizes]
    backend = GatherBackend(decode=case.decode)  # type: ignore[arg-type]
    backend.initialize(
        [LayerKVSpec(case.kv_heads, case.head_dim, value_dim, case.window)],
        num_blocks,
        case.block_size,
        case.dtype,
        mx.int8 if case.quantized else None,
    )
    for pool in backend.state():
        # 8-bit integers and their scales make the garbage together.
        number = 100 if pool.dtype == mx.int8 else GARBAGE / 100 if case.quantized else GARBAGE
        pool[:] = mx.full(pool.shape, number, pool.dtype)

    step, truth = [], {}
    history_keys, history_values, history_slots = [], [], []
    for index, ((before, now), table) in enumerate(zip(case.sequences, tables, strict=True)):
        length = before + now
        keys, keys64 = rounded(length, case.kv_heads, case.head_dim)
        values, values64 = rounded(length, case.kv_heads, value_dim)
        if case.quantized:
            # What the pool holds is what attention must see, the step's own tokens included.
            keys64, values64 = (as_stored(numbers) for numbers in (keys64, values64))
        slots = [table[p // case.block_size] * case.block_size + p % case.block_size for p in range(before)]
        history_slots += slots
        history_keys.append(keys[:before])
        history_values.append(values[:before])
        truth[str(index)] = (keys[before:], values[before:], keys64, values64)
        step.append(ScheduledSequence(str(index), before, now, [0] * now, table, True, 0, SamplingParams(), 0))
    _fill_history(backend.pool(0), case, history_slots, history_keys, history_values)

    step = [step[i] for i in rng.permutation(len(step))]
    batch = build_input_batch(SchedulerOutput(0, tuple(step)), case.block_size)
    # The batch's own order: decode rows first, then chunks.
    ordered = [s for s in step if s.num_tokens == 1] + [s for s in step if s.num_tokens > 1]
    queries, queries64 = rounded(batch.num_rows, case.heads, 1, case.head_dim)
    sinks, sinks64 = rounded(case.heads) if case.sinks else (None, None)
    view = backend.begin_step(batch)[0]
    mask = view.make_mask(1, window_size=case.model_window)
    view.update_and_fetch(
        mx.concatenate([truth[s.request_id][0] for s in ordered])[:, :, None],
        mx.concatenate([truth[s.request_id][1] for s in ordered])[:, :, None],
    )
    out = view.attend(queries, scale=case.head_dim**-0.5, mask=mask, sinks=sinks)
    assert out.shape == (batch.num_rows, case.heads, 1, value_dim)
    got = np.array(out.astype(mx.float32), np.float64)[:, :, 0]
    row = 0
    for seq in ordered:
        _, _, keys64, values64 = truth[seq.request_id]
        rows = slice(row, row + seq.num_tokens)
        expected = expected_rows(case, queries64[rows, :, 0], keys64, values64, seq.start, sinks64)
        np.testing.assert_allclose(got[rows], expected, atol=TOLERANCE[case.dtype], err_msg=f"start {seq.start}")
        row += seq.num_tokens
    return backend


def as_stored(numbers: Array) -> Array:
    """Numbers [..., n] after they were rounded to 8 bits."""
    integers, worth = reference.quantize(numbers)
    return integers * worth[..., None]


def _fill_history(pool: LayerPool, case: Case, slots: list[int], keys: list[mx.array], values: list[mx.array]) -> None:
    """Writes what earlier steps would have written, straight to the pool."""
    if not slots:
        return
    where = np.array(slots)
    for parts, stored, scales in ((keys, pool.keys, pool.key_scales), (values, pool.values, pool.value_scales)):
        new = mx.concatenate(parts)
        pairs = [(stored, new)]
        if case.quantized:
            integers, worth = quantize(new)
            pairs = [(stored, integers), (scales, worth)]
        for array, entries in pairs:
            dense = np.array(array.astype(mx.float32)).reshape(*pool.shape, -1)
            put = np.array(entries.astype(mx.float32)).reshape(len(where), case.kv_heads, -1)
            dense[where // case.block_size, :, where % case.block_size] = put
            array[:] = mx.array(dense.reshape(array.shape)).astype(array.dtype)


def test_quantizing_loses_half_a_step_at_most_and_repeats_itself() -> None:
    rng = np.random.default_rng(3)
    numbers = mx.array(
        (rng.standard_normal((50, 3, 64)) * 10.0 ** rng.integers(-20, 20, (50, 3, 1))).astype(np.float32)
    )
    integers, worth = quantize(numbers)
    for got, expected in zip((integers, worth), reference.quantize(np.array(numbers)), strict=True):
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)), expected)
    error = np.abs(np.array(dequantize(integers, worth, mx.float32)) - np.array(numbers))
    assert (error <= 0.5001 * np.array(worth)[..., None]).all()
    again = quantize(mx.array(np.array(numbers)))
    np.testing.assert_array_equal(np.array(again[0]), np.array(integers))
    np.testing.assert_array_equal(np.array(again[1]), np.array(worth))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_nothing_but_zeros_stays_zeros_and_tiny_numbers_do_no_harm(dtype: mx.Dtype) -> None:
    for number in (0.0, 1e-38):
        integers, worth = quantize(mx.full((2, 16), number).astype(dtype))
        assert integers.tolist() == [[0] * 16] * 2
        assert mx.abs(dequantize(integers, worth, dtype)).max().item() == 0


CHUNKS = ((0, 7), (16, 16), (33, 20), (100, 3), (0, 64))
MIXED = ((5, 1), (0, 30), (90, 1), (17, 15), (0, 1), (64, 33), (31, 1))
PATHS = ["gather_sdpa", "paged_matmul"]


@pytest.mark.parametrize("decode", PATHS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
def test_mixed_steps_for_every_head_layout(decode: str, head_dim: int, heads: int, kv_heads: int) -> None:
    check(Case(heads=heads, kv_heads=kv_heads, head_dim=head_dim, decode=decode, sequences=MIXED))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sequences", [Case.sequences, CHUNKS, MIXED], ids=["decode", "prefill", "mixed"])
def test_every_type(dtype: mx.Dtype, sequences: tuple[tuple[int, int], ...]) -> None:
    check(Case(dtype=dtype, sequences=sequences, sinks=True))
    check(Case(dtype=dtype, sequences=sequences, window=20))


@pytest.mark.parametrize("decode", PATHS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sequences", [Case.sequences, CHUNKS, MIXED], ids=["decode", "prefill", "mixed"])
def test_8_bits_are_read_as_they_are_stored(
    decode: str, dtype: mx.Dtype, sequences: tuple[tuple[int, int], ...]
) -> None:
    if decode == "paged_matmul" and dtype != mx.float32:
        pytest.skip("a path for float32")
    check(Case(dtype=dtype, decode=decode, sequences=sequences, sinks=True, quantized=True))
    check(Case(dtype=dtype, decode=decode, sequences=sequences, window=20, quantized=True, value_dim=48))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 256])
@pytest.mark.parametrize("decode", PATHS)
def test_every_block_size(block_size: int, decode: str) -> None:
    check(Case(block_size=block_size, decode=decode, sequences=MIXED, window=None))
    check(Case(block_size=block_size, decode=decode, sequences=MIXED, window=18))


@pytest.mark.parametrize("decode", PATHS)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 500])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_shorter_and_longer_than_blocks_chunks_and_sequences(decode: str, window: int, sinks: bool) -> None:
    check(Case(decode=decode, window=window, sinks=sinks, sequences=MIXED))
    check(Case(decode=decode, window=window, sinks=sinks))


@pytest.mark.parametrize(("window", "model_window"), [(None, 12), (12, 40), (40, 12)])
def test_the_narrower_of_the_layers_and_the_models_window_counts(window: int | None, model_window: int) -> None:
    for decode in PATHS:
        check(Case(decode=decode, window=window, model_window=model_window, sequences=MIXED))


@pytest.mark.parametrize("decode", PATHS)
def test_values_of_another_size_than_keys(decode: str) -> None:
    check(Case(decode=decode, head_dim=64, value_dim=48, sequences=MIXED))


@pytest.mark.parametrize("decode", PATHS)
def test_decode_rows_of_very_different_lengths(decode: str) -> None:
    """They run in groups of similar length; their order in the batch must come out as it went in."""
    lengths = ((900, 1), (3, 1), (450, 1), (0, 1), (899, 1), (40, 1), (1, 1), (17, 1), (500, 1))
    check(Case(decode=decode, sequences=lengths))
    check(Case(decode=decode, sequences=(*lengths, (30, 9)), window=100, sinks=True))


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2, 3]))
    sequences = [(int(rng.integers(0, 150)), int(rng.choice([1, 1, 1, 2, 31]))) for _ in range(rng.integers(1, 9))]
    case = Case(
        heads=kv_heads * int(rng.choice([1, 2, 5])),
        kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 80, 128])),
        block_size=int(rng.choice([2, 5, 16, 64])),
        decode=str(rng.choice(PATHS)),
        window=int(rng.integers(1, 120)) if rng.random() < 0.5 else None,
        sinks=bool(rng.random() < 0.5),
        quantized=bool(rng.random() < 0.5),
        sequences=tuple(sequences),
    )
    check(case, seed)


def test_auto_takes_paged_matmul_on_a_cpu_in_float32_only() -> None:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert set(check(Case(decode="auto")).dispatch_counts()) == {"paged_matmul" if on_cpu else "gather_sdpa"}
    assert set(check(Case(decode="auto", dtype=mx.float16)).dispatch_counts()) == {"gather_sdpa"}


def test_an_unknown_decode_path_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="auto, gather_sdpa or paged_matmul"):
        GatherBackend(decode="fast")  # type: ignore[arg-type]


def test_the_comparison_would_notice_one_token_too_many_or_too_few() -> None:
    """The reference is exact enough to tell a window of 20 from one of 21: a check of the check."""
    case = Case(window=20, sequences=((60, 1),))
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.standard_normal(s) for s in ((1, 4, 64), (61, 2, 64), (61, 2, 64)))
    right = expected_rows(case, queries, keys, values, 60, None)
    wrong = expected_rows(Case(window=21), queries, keys, values, 60, None)
    assert np.abs(right - wrong).max() > 10 * TOLERANCE[mx.float32]
