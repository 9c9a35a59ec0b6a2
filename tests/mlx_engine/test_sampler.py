"""The batched sampler draws from exactly the distribution that its options describe, whatever else is in the batch."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.sampler import SamplingBatch, build_sampling_batch, sample, uniforms
from mlx_engine.types import SamplingParams, ScheduledSequence

Array = npt.NDArray[np.float64]


def probabilities(
    logits: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """What each token's probability must be, by sorting, in float64. Ties at a cut are all kept."""
    x = logits / temperature
    p = np.exp(x - x.max())
    p[p < min_p] = 0.0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0.0
    if top_p < 1.0:
        order = np.sort(p)[::-1]
        last = int(np.searchsorted(np.cumsum(order), top_p * p.sum()))
        p[p < order[min(last, len(order) - 1)]] = 0.0
    return p / p.sum()  # type: ignore[no-any-return]


def sequence(seed: int, position: int, **options: Any) -> ScheduledSequence:
    """A row that samples."""
    return ScheduledSequence(f"{seed}-{position}", 0, 1, (0,), (1,), True, position, SamplingParams(**options), seed)


def draw_at(logits: Array, uniforms: Array, **options: Any) -> npt.NDArray[np.int64]:
    """The tokens that the given uniform numbers lead to, one row each."""
    built = build_sampling_batch([sequence(0, 0, **options)] * len(uniforms), len(logits))
    assert built is not None
    batch = SamplingBatch(
        built.rows,
        mx.array(uniforms[:, None].astype(np.float32)),
        built.temperatures,
        built.top_k,
        built.top_p,
        built.log_min_p,
    )
    rows = mx.broadcast_to(mx.array(logits.astype(np.float32)), (len(uniforms), len(logits)))
    return np.array(sample(rows, batch))


def assert_draws(logits: Array, **options: Any) -> None:
    """Every uniform number leads to the token in whose stretch of the cumulated probability it lies."""
    expected = probabilities(logits, **options)
    ends = np.cumsum(expected)
    middles = ends - expected / 2
    kept = expected > 1e-5  # narrower stretches are lost in the uniform number's own rounding
    got = draw_at(logits, middles[kept], **options)
    assert got.tolist() == np.flatnonzero(kept).tolist()
    grid = draw_at(logits, np.linspace(0.0, 1.0, 257), **options)
    assert (expected[grid] > 0).all(), f"drew {set(grid[expected[grid] == 0].tolist())}, which the options exclude"


# Far enough apart that no two different ones are closer than rounding, equal ones included.
LOGITS = st.lists(st.integers(-160, 160), min_size=2, max_size=40).map(lambda v: np.array(v, np.float64) / 16)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 10**9]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.31, 0.07]),
    min_p=st.sampled_from([0.0, 0.021, 0.33, 1.0]),
)
def test_draws_follow_the_exact_distribution(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    plain = probabilities(logits, temperature=temperature, top_k=top_k, min_p=min_p)
    reached = np.cumsum(np.sort(plain)[::-1])
    if np.abs(reached - top_p).min() < 1e-4 and top_p < 1:
        return  # rounding decides which side of the cut this is
    assert_draws(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def test_frequencies_pass_a_chi_square_test() -> None:
    """Through seeds and positions, as the engine draws: the hash is as good as random numbers."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -1.5, 3.0, -2.0])
    expected = probabilities(logits, temperature=1.3)
    count = 20000
    rows = [sequence(seed, position, temperature=1.3) for seed in range(200) for position in range(100)]
    tokens = np.array(sample(mx.array(np.tile(logits, (count, 1)).astype(np.float32)), build_sampling_batch(rows, 8)))
    observed = np.bincount(tokens, minlength=8)
    chi_square = ((observed - count * expected) ** 2 / (count * expected)).sum()
    assert chi_square < 24.3  # 0.999 quantile at 7 degrees of freedom


def test_uniform_numbers_fill_the_unit_interval_and_differ_by_seed_and_position() -> None:
    draws = uniforms([(seed, position) for seed in range(50) for position in range(200)]).reshape(50, 200)
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(np.unique(draws)) == draws.size
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # 0.999 quantile at 19 degrees of freedom
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.05


def test_a_seed_gives_the_same_numbers_in_every_version() -> None:
    assert uniforms([(0, 0), (7, 3), (2**63, 4095)]).tolist() == [
        0.38599261070940977,
        0.5648628684101832,
        0.3542377482242889,
    ]


def test_a_seed_gives_the_same_tokens_alone_and_beside_any_rows_in_any_order() -> None:
    rng = random.Random(5)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2, "temperature": 1.7},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    ]
    rows = [sequence(seed, rng.randrange(50), **options[seed % len(options)]) for seed in range(24)]
    logits = mx.random.normal((24, 300), key=mx.random.key(3)) * 2
    alone = [sample(logits[i : i + 1], build_sampling_batch(rows[i : i + 1], 300)).item() for i in range(24)]
    for _ in range(5):
        order = rng.sample(range(24), rng.randrange(1, 25))
        together = sample(logits[mx.array(order)], build_sampling_batch([rows[i] for i in order], 300))
        assert together.tolist() == [alone[i] for i in order]


def test_greedy_rows_take_the_best_token_beside_rows_that_draw() -> None:
    logits = mx.random.normal((6, 50), key=mx.random.key(1))
    rows = [sequence(i, 0, temperature=0.0 if i % 2 else 5.0, top_p=0.9, top_k=40) for i in range(6)]
    best = mx.argmax(logits, axis=-1).tolist()
    tokens = sample(logits, build_sampling_batch(rows, 50)).tolist()
    assert tokens[1::2] == best[1::2]
    assert tokens[::2] != best[::2]


def test_all_greedy_rows_need_no_sampling_batch() -> None:
    assert build_sampling_batch([sequence(0, 0, temperature=0.0, top_k=5, top_p=0.1)], 50) is None


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 0.0},
        {"top_p": 1e-12},
        {"temperature": 1e-9},
        {"temperature": 1e-3},
        {"temperature": 100.0, "top_k": 1},
    ],
)
def test_options_that_leave_only_the_best_token(options: dict[str, Any]) -> None:
    logits = np.array([0.0, 3.0, 7.5, 7.0, -40.0])
    assert set(draw_at(logits, np.linspace(0, 1, 33), **options).tolist()) == {2}


@pytest.mark.parametrize("options", [{"top_k": 10**9}, {"top_k": -1}, {"top_k": 5}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_options_that_are_off_change_nothing(options: dict[str, Any]) -> None:
    logits = np.array([0.0, 3.0, 2.5, -1.0, 1.0])
    where = np.linspace(0, 0.999, 200)
    assert draw_at(logits, where, **options).tolist() == draw_at(logits, where).tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.95}, {"min_p": 0.01}, {"temperature": 1e-9}])
def test_tokens_of_probability_zero_are_never_drawn(options: dict[str, Any]) -> None:
    """-inf logits (a bias, a grammar) stay out, also when fewer tokens are left than top_k asks for."""
    logits = np.array([-np.inf, 1.0, -np.inf, 0.5, -np.inf, -np.inf])
    drawn = set(draw_at(logits, np.linspace(0, 1, 101), **options).tolist())
    assert drawn <= {1, 3}


@pytest.mark.parametrize("vocab_size", [2, 1000, 50257])
def test_the_ends_of_the_unit_interval_give_tokens_of_the_vocabulary(vocab_size: int) -> None:
    """float32 rounds the largest uniform numbers to 1: that must not run past the last token."""
    logits = np.zeros(vocab_size)
    tokens = draw_at(logits, np.array([0.0, 2.0**-30, 1 - 2.0**-24, 1.0]))
    assert tokens[0] == 0
    assert tokens.max() < vocab_size


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits(dtype: mx.Dtype) -> None:
    logits = mx.array([[1.0, 5.0, 2.0], [9.0, 1.0, 1.0]]).astype(dtype)
    rows = [sequence(0, 0, temperature=0.0), sequence(1, 0, temperature=0.1)]
    assert sample(logits, build_sampling_batch(rows, 3)).tolist() == [1, 0]
