"""Cheaper forms of a model's modules for GPUs: fewer and larger products."""

from __future__ import annotations

import logging
import math

import mlx.core as mx
import mlx.nn as nn

from mlx_engine.attention.fused import kernels_run_here
from mlx_engine.attention.kernels import texts
from mlx_engine.attention.kernels.gemv import MAX_SKINNY_ROWS, embed
from mlx_engine.attention.kernels.texts import MIN_SIZE
from mlx_engine.decoder_block import FusedDecoderBlock, RotaryTables
from mlx_engine.linear import GATE_UP, QUERY_KEY_VALUE, fuse_projections
from mlx_engine.modules import inner_first, replace_module

logger = logging.getLogger(__name__)

# Of products in 16 bits: what rounding makes of a layer is a tenth of it.
_MOST_ERROR = 5e-2


def blocks_run_here() -> bool:
    """Whether decoder blocks of our own are known to be faster: on CUDA. On Metal nobody has measured them yet."""
    return kernels_run_here() and bool(mx.cuda.is_available())


class RowEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding of which a kernel of ours copies the rows: MLX's takes an element at a time."""

    def __init__(self, embedding: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.weight = embedding.weight

    @staticmethod
    def takes(module: nn.Module) -> bool:
        """Whether this module can be replaced by one of these."""
        return type(module) is nn.Embedding and module.weight.shape[1] * module.weight.dtype.size % 16 == 0

    def __call__(self, ids: mx.array) -> mx.array:
        """ids of any shape; returns [*ids.shape, d]."""
        if ids.size < MIN_SIZE:
            return super().__call__(ids)  # type: ignore[no-any-return]
        return embed(self.weight, ids)


def _skinny_is_right(block: FusedDecoderBlock) -> bool:
    """Whether skinny_gemm runs on this GPU, and gives what MLX's products give; a warning if not."""
    try:
        error = block.skinny_error()
        reason = f"a relative error of {error:.2g}"
    except RuntimeError as failure:
        # MLX's, with all that the compiler said.
        error, reason = math.inf, str(failure)
    if error < _MOST_ERROR:
        return True
    logger.warning(
        "products of 2 to %d rows are slower: the kernel for them doesn't work on this GPU (%s). Please report it",
        MAX_SKINNY_ROWS,
        reason,
    )
    return False


def adapt_for_gpu(model: nn.Module) -> None:
    """Puts blocks of fewer kernels where the architecture allows it.

    Elsewhere it makes one product each of the query, key and value projections, and of an MLP's gate and up
    projections. The weights are put together and the parts let go a module at a time: the memory for a second copy of
    them all may not be there.
    """
    blocks, checked, tables = 0, False, RotaryTables()
    for name, module in inner_first(model):
        if blocks_run_here() and FusedDecoderBlock.takes(module):
            block = FusedDecoderBlock(module, tables)
            if block.takes_skinny and not checked:
                checked = True
                if not _skinny_is_right(block):
                    texts.forgo_bulk_copies()
                    block.choose_products()
            replace_module(model, name, block)
            blocks += 1
        elif blocks_run_here() and RowEmbedding.takes(module):
            replace_module(model, name, RowEmbedding(module))
    count = 0
    for _, module in inner_first(model):
        for names in (QUERY_KEY_VALUE, GATE_UP):
            count += fuse_projections(module, names)
    logger.info("GPU: %d decoder blocks and %d more groups of linear layers fused", blocks, count)
