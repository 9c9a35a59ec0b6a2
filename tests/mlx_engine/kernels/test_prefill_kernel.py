"""Attention of prefill chunks by matrix instructions, emulated on the host, and on a GPU if any."""

from __future__ import annotations

import pytest

from mlx_engine.attention.kernels.reference import CHUNK_CASES, TOLERANCE, ChunkCase, chunks_error


@pytest.mark.parametrize("case", CHUNK_CASES, ids=str)
def test_each_row_attends_to_its_sequence_up_to_itself(products: str, case: ChunkCase) -> None:
    assert chunks_error(case) < TOLERANCE[case.dtype]
