"""Whether the kernels are right on the GPU at hand, asked before any request depends on it.

They were written for GPUs that nobody has tried them on, too. What is compiled here is what the engine runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_engine.attention.kernels import reference, texts
from mlx_engine.attention.kernels.paged import MIN_TOKENS, PagedKernels
from mlx_engine.attention.pool import LayerPool
from mlx_engine.errors import KernelError
from mlx_engine.types import LayerKVSpec

logger = logging.getLogger(__name__)

# Tokens of rows in one part, and of rows that need two.
_SHORT = 70
_LONG = 2 * MIN_TOKENS + 20
# The second goes around the ring of steps; its later tokens outweigh those before, so that sums are scaled.
_CHUNKS = ((0, 150), (300, 21))
_GROWTH = 0.2
# Of what the tests allow.
_SLACK = 2.0


def check_kernels(num_heads: int, spec: LayerKVSpec, block_size: int, dtype: mx.Dtype, kv_dtype: mx.Dtype) -> None:
    """Attention of a layer with so many query heads, on random numbers, against float64.

    Raises KernelError, which names the kernel, where one can't be compiled or is wrong. Where that is so only with the
    matrix instructions of four warps, this process goes on with those of one, and a warning.
    """
    heads = (num_heads, spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim)
    kernels, pool = PagedKernels(*heads, block_size, dtype), LayerPool.zeros(spec, 1, block_size, dtype, kv_dtype)
    plain = reference.DecodeCase(
        3, *heads, block_size, _SHORT, dtype, min_span=MIN_TOKENS, quantized=kv_dtype == mx.int8
    )
    decodes = {"decode attention": plain, "decode attention in parts": replace(plain, max_len=_LONG, splits=2)}
    if kernels.rotates(pool):
        decodes["decode attention that rotates"] = replace(plain, rotated=True)
    for name, case in decodes.items():
        _check(name, dtype, partial(reference.decode_error, case))
    if kernels.takes_chunks(pool):
        chunks = reference.ChunkCase(_CHUNKS, *heads, block_size, dtype=dtype, growth=_GROWTH)
        name, measure = "attention of prefill chunks", partial(reference.chunks_error, chunks)
        try:
            _check(name, dtype, measure)
        except KernelError as error:
            if not texts.has_warpgroup_instructions():
                raise
            logger.warning("prefill runs on the instructions of single warps, slower: %s. Please report it", error)
            texts.forgo_warpgroup_instructions()
            _check(name, dtype, measure)


def _check(name: str, dtype: mx.Dtype, measure: Callable[[], float]) -> None:
    try:
        error = measure()
    except RuntimeError as failure:
        # MLX's, with all that the compiler said.
        raise KernelError(f"{name} can't run on this GPU: {failure}") from failure
    allowed = _SLACK * reference.TOLERANCE[dtype]
    if not error < allowed:
        raise KernelError(f"{name} is wrong on this GPU: a relative error of {error:.2g}, and {allowed:.2g} at most")
