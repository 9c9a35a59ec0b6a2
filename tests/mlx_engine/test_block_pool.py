"""BlockPool: what it hands out, what it refuses, and what its figures say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_engine.block_pool import BlockPool, external_fragmentation
from mlx_engine.errors import ConfigError, IntegrityError
from mlx_engine.types import SCRATCH_BLOCK


def test_hands_out_every_id_but_scratch_in_ascending_order() -> None:
    pool = BlockPool(5)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert SCRATCH_BLOCK == 0
    assert pool.num_free == 0


def test_last_freed_is_handed_out_first_in_the_order_given() -> None:
    pool = BlockPool(5)
    pool.allocate(5)
    pool.free([4, 2])
    pool.free([5])
    assert pool.allocate(3) == [5, 4, 2]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    assert pool.allocate(-2) == []
    assert pool.num_free == 3


def test_double_free_raises() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.free([1])
    with pytest.raises(IntegrityError, match="block 1 freed twice"):
        pool.free([1])


@pytest.mark.parametrize("block_id", [SCRATCH_BLOCK, -1, 4])
def test_freeing_an_id_that_is_no_block_raises(block_id: int) -> None:
    with pytest.raises(IntegrityError, match="ids go from 1 to 3"):
        BlockPool(3).free([block_id])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(0)


@pytest.mark.parametrize(
    ("free_map", "expected"),
    [("0", 0.0), ("0000", 0.0), ("01111", 0.0), ("01010", 0.5), ("0110100", 1 / 3), ("0101011", 0.5)],
)
def test_external_fragmentation_is_the_share_outside_the_largest_run(free_map: str, expected: float) -> None:
    assert external_fragmentation(bytes(int(state) for state in free_map)) == pytest.approx(expected)


def test_pool_reports_fragmentation_of_its_free_ids() -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    pool.free([1, 2, 4])
    assert pool.external_fragmentation() == pytest.approx(1 / 3)


def test_integrity_check_notices_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(3)
    pool._stack.pop()
    with pytest.raises(IntegrityError, match=r"disagree about blocks \[1\]"):
        pool.check_integrity()
    pool._stack += [2, 1]
    with pytest.raises(IntegrityError, match="twice"):
        pool.check_integrity()


@given(st.integers(1, 12), st.lists(st.integers(-6, 6)))
def test_held_and_free_ids_always_partition_the_pool(num_blocks: int, steps: list[int]) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for step in steps:
        if step >= 0:
            taken = pool.allocate(step)
            assert (taken is None) == (step > num_blocks - len(held))
            held += taken or []
        else:
            pool.free(held[step:])
            del held[step:]
        assert len(set(held)) == len(held)
        assert pool.free_ids() | set(held) == set(range(1, num_blocks + 1))
        assert pool.num_free == num_blocks - len(held)
        pool.check_integrity()
