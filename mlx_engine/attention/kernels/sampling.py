"""Calls the kernels that choose a step's tokens and hand them on."""

from __future__ import annotations

import mlx.core as mx

from mlx_engine.attention.kernels import texts

# Warps of a threadgroup of `sample`, and how often each reads before it computes. With more to read its registers are
# too few for 1,024 threads; Metal doesn't promise those.
SAMPLE_WARPS = 16 if mx.metal.is_available() else 32
SAMPLE_UNROLL = 2
_THREADS = 128


def sample_rows(logits: mx.array, options: mx.array) -> mx.array:
    """The next token of each row [B] uint32, for logits [B, V] and options [B, 5 or more] float32.

    The first columns of options are those of `sampler.sampling_options`; rows whose temperature is 0 take the best
    token.
    """
    num_rows, vocab_size = logits.shape
    threads = 32 * SAMPLE_WARPS
    out: mx.array = texts.kernel("sample")(
        inputs=[logits, texts.padded(options)],
        template=[
            ("T", logits.dtype),
            ("VOCAB_SIZE", vocab_size),
            ("WARPS", SAMPLE_WARPS),
            ("UNROLL", SAMPLE_UNROLL),
        ],
        grid=(num_rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(num_rows,)],
        output_dtypes=[mx.uint32],
    )[0]
    return out


def publish(sampled: mx.array, samples: mx.array) -> mx.array:
    """Puts sampled [n] uint32 into the first places of samples [8 or more], in place; returns a ticket [8] of zeros.

    Up to 8 places may be overwritten whatever n is.
    """
    ticket: mx.array = texts.kernel("publish")(
        inputs=[texts.padded(sampled), samples],
        template=[],
        grid=(_THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(texts.MIN_SIZE,)],
        output_dtypes=[mx.int32],
    )[0]
    return ticket
