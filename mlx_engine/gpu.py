"""Cheaper forms of a model's modules for GPUs: fewer and larger products."""

from __future__ import annotations

import logging

import mlx.nn as nn

from mlx_engine.linear import GATE_UP, QUERY_KEY_VALUE, fuse_projections

logger = logging.getLogger(__name__)


def adapt_for_gpu(model: nn.Module) -> None:
    """Makes one product each of the query, key and value projections, and of an MLP's gate and up projections.

    The weights are put together and the parts let go, a module at a time.
    """
    count = 0
    for _, module in list(model.named_modules()):
        for names in (QUERY_KEY_VALUE, GATE_UP):
            count += fuse_projections(module, names)
    logger.info("GPU: %d groups of linear layers fused", count)
