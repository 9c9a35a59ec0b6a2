"""The batched sampler: every row's next token in one device computation.

A row draws one uniform number, from a hash of its request's seed and the position in its output, and takes the token
at which the cumulated probability passes it. The draw thus depends on nothing else in the batch. Filters are found as
thresholds on the logits by bisection, which needs no sort of the vocabulary. A GPU does the same in one kernel
(`attention/kernels/sample.inc`), which takes `sampling_options`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_engine.mathops import fast_exp
from mlx_engine.types import ScheduledSequence

# Bisection halves a range of 60 nats this often: what remains is below a float32's rounding of a logit.
_BISECTIONS = 26
_RANGE = 60.0
_LOWEST = 2**-40
_MIN_TEMPERATURE = 1e-5
_MOST_TOKENS = 2**24  # more than any vocabulary has, and exact in float32
NUM_OPTIONS = 5


def uniforms(places: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on a seed and a position in the output only, one for each such pair."""
    digests = b"".join([hashlib.blake2b(b"%d:%d" % place, digest_size=8).digest() for place in places])
    return np.frombuffer(digests, "<u8") / 2.0**64


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The options of the rows of a step that sample, as arrays; rows that are greedy are not in it."""

    rows: mx.array  # [R] indices into the step's samples
    uniforms: mx.array  # [R, 1] float32 in [0, 1)
    temperatures: mx.array  # [R, 1]
    top_k: mx.array | None  # [R, 1] float32 counts; None: no row uses it
    top_p: mx.array | None  # [R, 1]
    log_min_p: mx.array | None  # [R, 1] natural logarithms


def sampling_options(sequences: Sequence[ScheduledSequence]) -> npt.NDArray[np.float32]:
    """[S, NUM_OPTIONS] temperature (0: greedy), uniform number, top_k (0: off), top_p, logarithm of min_p.

    What the sampling kernel takes; rows that are greedy have no other options than that.
    """
    out = np.zeros((len(sequences), NUM_OPTIONS), np.float32)
    rows = [i for i, seq in enumerate(sequences) if not seq.sampling.is_greedy]
    if not rows:
        return out
    chosen = [sequences[i] for i in rows]
    params = [seq.sampling for seq in chosen]
    min_p = np.array([p.min_p for p in params])
    columns = [
        np.maximum([p.temperature for p in params], _MIN_TEMPERATURE),
        uniforms([(seq.seed, seq.num_output_tokens) for seq in chosen]),
        [max(0, min(p.top_k, _MOST_TOKENS)) for p in params],
        [p.top_p for p in params],
        np.log(min_p, out=np.full(len(rows), -2 * _RANGE), where=min_p > 0),
    ]
    out[rows] = np.array(columns).T
    return out


def build_sampling_batch(sequences: Sequence[ScheduledSequence], vocab_size: int) -> SamplingBatch | None:
    """The options of the rows that are not greedy, or None if all are."""
    options = sampling_options(sequences)
    rows = np.flatnonzero(options[:, 0])
    if not len(rows):
        return None
    temperature, draws, top_k, top_p, log_min_p = options[rows].T[:, :, None]
    is_cut = (top_k > 0) & (top_k < vocab_size)
    return SamplingBatch(
        rows=mx.array(rows.astype(np.uint32)),
        uniforms=mx.array(draws),
        temperatures=mx.array(temperature),
        top_k=mx.array(np.where(is_cut, top_k, np.float32(vocab_size))) if is_cut.any() else None,
        top_p=mx.array(top_p) if (top_p < 1).any() else None,
        log_min_p=mx.array(log_min_p) if (log_min_p > -_RANGE).any() else None,
    )


def sample(logits: mx.array, batch: SamplingBatch | None) -> mx.array:
    """Token ids [S] uint32 for logits [S, V]: the best of each row, or a draw for the rows of `batch`.

    Temperature first, then min-p, top-k and top-p, each over what the ones before have left (vLLM's order).
    """
    best = mx.argmax(logits, axis=-1)
    if batch is None:
        return best
    best[batch.rows] = _draw(logits[batch.rows].astype(mx.float32), batch)
    return best


def _draw(logits: mx.array, batch: SamplingBatch) -> mx.array:
    # Centred before scaling, so that a tiny temperature gives -inf beside 0, never inf - inf.
    x = (logits - logits.max(axis=-1, keepdims=True)) / batch.temperatures
    x = mx.maximum(x, -_RANGE)
    weights = fast_exp(x)
    if batch.log_min_p is not None:
        weights = weights * (x >= batch.log_min_p)
    if batch.top_k is not None:
        kept = (weights > 0).astype(mx.float32)
        weights = weights * (x >= _threshold(x, kept, batch.top_k))
    if batch.top_p is not None:
        # Never 0, which no token at all would reach already.
        mass = mx.maximum(batch.top_p, 1e-9) * weights.sum(axis=-1, keepdims=True)
        weights = weights * (x >= _threshold(x, weights, mass))
    cumulated = mx.cumsum(weights, axis=-1)
    total = cumulated[:, -1:]
    # Below the total even when rounding says otherwise, so that the token found always has weight.
    # Above 0 by more than all the tokens together that are left with e**-60 of weight.
    target = mx.minimum(mx.maximum(batch.uniforms, _LOWEST) * total, total * (1 - 2**-22))
    return (cumulated <= target).sum(axis=-1).astype(mx.uint32)


def _threshold(x: mx.array, amounts: mx.array, wanted: mx.array) -> mx.array:
    """The largest t [R, 1] for which the amounts where x >= t sum to `wanted` or more.

    Keeps the fewest tokens that reach the amount; tokens equal to the last one kept are kept too.
    """
    low = mx.full(wanted.shape, -_RANGE)  # everything is at or above it
    high = mx.full(wanted.shape, 1e-3)  # nothing is
    for _ in range(_BISECTIONS):
        middle = (low + high) * 0.5
        enough = (amounts * (x >= middle)).sum(axis=-1, keepdims=True) >= wanted
        low = mx.where(enough, middle, low)
        high = mx.where(enough, high, middle)
    return low
