"""The sampling kernel draws what sampler.py draws, and what float64 says, in each dialect."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlx_engine.attention.kernels import sampling, texts
from mlx_engine.attention.kernels.sampling import sample_rows
from mlx_engine.sampler import SamplingBatch, sample, sampling_options
from tests.mlx_engine.test_sampler import probabilities, sequence

Array = npt.NDArray[Any]
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_CHOICES: dict[str, list[float]] = {
    "temperature": [0.25, 0.7, 1.0, 1.9],
    "top_k": [-1, 0, 1, 2, 5, 38, 10**9],
    "top_p": [1.0, 0.97, 0.6, 0.31, 0.07],
    "min_p": [0.0, 0.021, 0.33, 1.0],
}


def options_of(rows: list[dict[str, Any]], uniforms: Array) -> Array:
    """The kernel's options of rows with these ones and these uniform numbers."""
    options = sampling_options([sequence(i, 0, **row) for i, row in enumerate(rows)])
    options[:, 1] = uniforms
    return options


def kernel(logits: Array, options: Array, dtype: mx.Dtype = mx.float32) -> list[int]:
    """The tokens that the kernel gives."""
    tokens: list[int] = sample_rows(mx.array(logits).astype(dtype), mx.array(options)).tolist()  # type: ignore[assignment]
    return tokens


def by_operations(logits: Array, options: Array, dtype: mx.Dtype = mx.float32) -> list[int]:
    """The tokens that MLX's operations give."""
    vocab_size = logits.shape[1]
    temperature, uniforms, top_k, top_p, log_min_p = (mx.array(column[:, None]) for column in options.T.copy())
    top_k = mx.where((top_k > 0) & (top_k < vocab_size), top_k, float(vocab_size))
    rows = mx.arange(len(logits), dtype=mx.uint32)
    batch = SamplingBatch(rows, uniforms, temperature, top_k, top_p, log_min_p)
    tokens: list[int] = sample(mx.array(logits).astype(dtype), batch).tolist()  # type: ignore[assignment]
    return tokens


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [40, 1003, 2048])
def test_draws_follow_the_exact_distribution(dialect: str, vocab_size: int, dtype: mx.Dtype) -> None:
    """Many ties, some at the cuts; each row has options of its own; vocabularies that don't end in a whole piece."""
    rng = np.random.default_rng(vocab_size)
    rows, logits, uniforms, expected = [], [], [], []
    while len(rows) < 120:
        row = {name: rng.choice(choices).item() for name, choices in _CHOICES.items()}
        row["top_k"] = int(row["top_k"])
        # Exact in 16 bits, and differences of 1/16 are far above rounding.
        x = rng.integers(-120, 120, vocab_size) / 16
        before = np.sort(probabilities(x, **{**row, "top_p": 1.0}))[::-1]
        if row["top_p"] < 1 and np.abs(np.cumsum(before) - row["top_p"]).min() < 2e-5:
            continue  # rounding decides which side of the cut this is
        exact = probabilities(x, **row)
        ends = np.cumsum(exact)
        token = rng.choice(np.flatnonzero(exact > 2e-5))
        rows.append(row)
        logits.append(x)
        uniforms.append(ends[token] - exact[token] / 2)
        expected.append(int(token))
    options = options_of(rows, np.array(uniforms))
    stacked = np.array(logits, np.float32)
    assert kernel(stacked, options, dtype) == expected
    assert by_operations(stacked, options, dtype) == expected


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [8, 1003, 2048])
def test_greedy_rows_take_the_first_of_the_best_tokens(dialect: str, vocab_size: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(1)
    logits = rng.integers(-20, 3, (40, vocab_size)).astype(np.float32)
    logits[1] = -np.inf
    logits[2, :-1] = -np.inf
    logits[3] = 7.0
    logits[4, vocab_size // 2] = np.inf
    options = options_of([{"temperature": 0.0, "top_k": 5}] * 40, rng.random(40))
    assert kernel(logits, options, dtype) == np.argmax(logits, axis=1).tolist()


def test_a_row_is_drawn_the_same_beside_greedy_rows_and_others(dialect: str) -> None:
    rng = np.random.default_rng(2)
    rows: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 7},
        {"top_p": 0.8, "top_k": 50},
        {"min_p": 0.1},
    ]
    logits = rng.normal(0, 3, (5, 1003)).astype(np.float32)
    options = options_of(rows, rng.random(5))
    together = kernel(logits, options)
    assert together == [kernel(logits[i : i + 1], options[i : i + 1])[0] for i in range(5)]
    assert together[0] == np.argmax(logits[0])
    order = rng.permutation(5)
    assert kernel(logits[order], options[order]) == [together[i] for i in order]


@pytest.mark.parametrize(
    "row",
    [
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 0.0},
        {"top_p": 1e-12},
        {"temperature": 1e-9},
        {"temperature": 1e-3},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 100.0, "top_p": 1e-5},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [1003, 2048])
def test_options_that_leave_only_the_best_token(dialect: str, vocab_size: int, row: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 2, (33, vocab_size)).astype(np.float32)
    best = np.argmax(logits, axis=1)
    logits[np.arange(33), best] += 0.5
    assert kernel(logits, options_of([row] * 33, np.linspace(0, 1, 33))) == best.tolist()


def test_one_token_may_hold_all_the_mass(dialect: str) -> None:
    logits = np.full((9, 1003), -90.0, np.float32)
    logits[np.arange(9), np.arange(9) * 125] = 10.0
    rows: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.999999}] * 3
    assert kernel(logits, options_of(rows, np.linspace(0, 1, 9))) == [i * 125 for i in range(9)]


@pytest.mark.parametrize(
    "row", [{}, {"top_k": 30}, {"top_p": 0.95}, {"top_p": 0.9999999}, {"min_p": 0.01}, {"temperature": 1e-9}], ids=str
)
def test_tokens_of_probability_zero_are_never_drawn(dialect: str, row: dict[str, Any]) -> None:
    """-inf logits (a bias, a grammar) stay out, also when fewer tokens are left than top_k asks for."""
    rng = np.random.default_rng(4)
    logits = np.where(rng.random(1003) < 0.02, rng.normal(0, 1, 1003), -np.inf).astype(np.float32)
    tokens = kernel(np.tile(logits, (65, 1)), options_of([row] * 65, np.linspace(0, 1, 65)))
    assert np.isfinite(logits[tokens]).all()


def test_a_draw_where_two_parts_meet_is_of_a_token_with_weight(dialect: str) -> None:
    """The vocabulary is summed in parts; all but some tokens are e^-60 of the best one's weight, which is none."""
    rng = np.random.default_rng(6)
    logits = np.full(2048, -200.0, np.float32)
    likely = rng.choice(2048, 60, replace=False)
    logits[likely] = rng.normal(0, 1.5, 60)
    weights = np.exp(np.maximum(logits - logits.max(), -60.0).astype(np.float64))
    edges = np.cumsum(weights.reshape(-1, 64).sum(axis=1)) / weights.sum()
    near = np.float32(edges[:-1])
    uniforms = [near]
    for towards in (0.0, 1.0):
        beside = near
        for _ in range(3):
            beside = np.nextafter(beside, np.float32(towards), dtype=np.float32)
            uniforms.append(beside)
    drawn = np.concatenate(uniforms)
    tokens = kernel(np.tile(logits, (len(drawn), 1)), options_of([{}] * len(drawn), drawn))
    assert np.isin(tokens, likely).all()


def test_a_nan_hides_no_other_token(dialect: str) -> None:
    logits = np.zeros((8, 1003), np.float32)
    logits[np.arange(8), np.arange(8)] = np.nan
    logits[:, 11] = 9.0
    logits[0, 1] = 10.0
    assert kernel(logits, options_of([{"temperature": 0.0}] * 8, np.zeros(8))) == [1, *[11] * 7]


@pytest.mark.parametrize("row", [{}, {"top_k": 900}, {"top_p": 0.5}], ids=str)
def test_whatever_the_logits_the_token_is_one_of_the_vocabulary(dialect: str, row: dict[str, Any]) -> None:
    logits = np.zeros((6, 1003), np.float32)
    logits[1] = -np.inf
    logits[2, 5] = np.nan
    logits[3] = np.nan
    logits[4, 1002] = np.inf
    logits[5] = np.finfo(np.float32).min
    for uniform in (0.0, 2.0**-30, 1 - 2.0**-24, 1.0):
        assert max(kernel(logits, options_of([row] * 6, np.full(6, uniform)))) < 1003
        assert max(kernel(logits, options_of([{"temperature": 0.0}] * 6, np.full(6, uniform)))) < 1003


@pytest.mark.parametrize(("top", "step"), [(0.0, 2.0**-21), (-2.0, 2.0**-21), (-13.0, 2.0**-20), (-41.0, 2.0**-18)])
def test_cuts_tell_neighbouring_numbers_apart(dialect: str, top: float, step: float) -> None:
    """One token at 0 and 300 far below that are as close together as float32 holds them: exactly k tokens are left."""
    logits = np.concatenate([[0.0], top - 0.5 - np.arange(300) * step]).astype(np.float32)
    assert len(np.unique(logits)) == 301
    logits = np.random.default_rng(5).permutation(logits)
    order = np.argsort(-logits)
    for k in (2, 57, 300):
        # The least likely one that is left, if it alone has what is asked of the rest.
        weights = np.exp(logits[order[:k]].astype(np.float64))
        kept = np.zeros(301)
        kept[order[:k]] = weights / weights.sum()
        ends = np.cumsum(kept)
        last = order[:k].max()
        # A uniform number at the end gives the last token that is left, in the order of the vocabulary.
        token = kernel(logits[None], options_of([{"top_k": k}], np.ones(1)))[0]
        assert token in order[:k]
        if kept[last] > 1e-5:
            assert token == last
        # And a mass that needs exactly k tokens leaves k.
        share = (weights.sum() - weights[-1] / 2) / np.exp(logits.astype(np.float64)).sum()
        if weights[-1] / weights.sum() > 1e-4:
            middles = ends - kept / 2
            rows = options_of([{"top_p": share}] * k, middles[order[:k]])
            assert kernel(np.tile(logits, (k, 1)), rows) == order[:k].tolist()


def test_a_cut_by_mass_weighs_tokens_where_they_lie_in_a_bucket(dialect: str) -> None:
    """Half of the tokens lie just above 1/16 below the best one and half just there: much the same weight."""
    logits = np.array([0.0] + [-0.062] * 50 + [-0.0625] * 50, np.float32)
    first = 1 + 50 * np.exp(-0.062)
    total = first + 50 * np.exp(-0.0625)
    rows = [{"top_p": first / total - 0.003}, {"top_p": first / total + 0.003}]
    assert kernel(np.tile(logits, (2, 1)), options_of(rows, np.ones(2))) == [50, 100]


@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_large_vocabularies(dialect: str, vocab_size: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(6)
    rows: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 50},
        {"temperature": 1.5, "top_k": 20_000, "top_p": 0.95, "min_p": 1e-6},
        {"top_p": 0.99},
        {"temperature": 0.0},
    ]
    logits = np.array(mx.array(rng.normal(0, 2.5, (6, vocab_size))).astype(dtype).astype(mx.float32))
    options = options_of(rows, rng.random(6))
    tokens = kernel(logits, options, dtype)
    for x, row, uniform, token in zip(logits.astype(np.float64), rows, options[:, 1], tokens, strict=True):
        if row.get("temperature") == 0.0:
            assert token == np.argmax(x)
            continue
        exact = probabilities(x, **row)
        ends = np.cumsum(exact)
        assert exact[token] > 0
        # Cumulated in float32.
        assert ends[token] - exact[token] - 2e-5 <= uniform <= ends[token] + 2e-5


@pytest.mark.parametrize("warps", [2, 32])
def test_any_number_of_threads_and_options_in_a_wider_matrix(
    dialect: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine calls it."""
    logits = np.random.default_rng(7).normal(0, 3, (3, 2048)).astype(np.float32)
    options = options_of([{"temperature": 0.7}, {"top_k": 9}, {"temperature": 0.0}], np.array([0.2, 0.5, 0.9]))
    wide = mx.array(np.concatenate([options, np.full((3, 9), np.nan, np.float32)], axis=1))
    expected = kernel(logits, options)
    assert expected[:2] == by_operations(logits[:2], options[:2])
    monkeypatch.setattr(sampling, "SAMPLE_WARPS", warps)
    assert sample_rows(mx.array(logits), wide).tolist() == expected


def test_a_cut_at_the_wrong_side_is_noticed(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: with the last bucket left out, the token that reaches top_k is not drawn."""
    if dialect == "gpu":
        pytest.skip("the kernel is compiled once there")
    real = texts.kernel_text

    def broken(name: str, which: Any) -> str:
        text = real(name, which)
        assert "float(bucket + 1)" in text
        return text.replace("float(bucket + 1)", "float(bucket)")

    monkeypatch.setattr(texts, "kernel_text", broken)
    # No other test has 17 tokens: the text for Metal is made once for each shape.
    logits = np.arange(17, dtype=np.float32)[None]
    assert kernel(logits, options_of([{"top_k": 3}], np.zeros(1))) != [14]
