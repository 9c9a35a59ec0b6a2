"""The free list of the KV pool: which block ids nobody holds.

    id      0         1         2         3              num_blocks
        +---------+---------+---------+---------+- ... -+---------+
        | scratch | s s s s | s s s s | s s s s |       | s s s s |    s: a slot, the K/V of one token
        +---------+---------+---------+---------+- ... -+---------+
             |     '-------------- capacity: num_blocks ---------'
             '- padding points here; never handed out, never counted

Token `p` of a sequence lives in block `block_table[p // block_size]`, slot `p % block_size`. Every layer has an
array of this shape, and one id means the same block in all of them. The pool knows ids only: no arrays, no owners.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlx_engine.errors import ConfigError, IntegrityError
from mlx_engine.types import SCRATCH_BLOCK

_USED, _FREE = 0, 1
_FREE_RUN = re.compile(rb"\x01+")


class BlockPool:
    """Hands out block ids from 1 to num_blocks and takes them back; O(1) per block.

    Ids come back last freed first (the device may still have such a block in a cache), and in a fresh pool in
    ascending order, so a run is reproducible.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}.")
        self.num_blocks = num_blocks
        self._stack = list(range(num_blocks, SCRATCH_BLOCK, -1))  # the next id to hand out is the last
        self._state = bytearray([_USED]) + bytearray([_FREE]) * num_blocks  # by id, scratch included

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._stack)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes num_blocks blocks, or none at all and returns None when fewer are free."""
        if num_blocks > len(self._stack):
            return None
        if num_blocks <= 0:
            return []
        taken = self._stack[-num_blocks:]
        del self._stack[-num_blocks:]
        taken.reverse()
        for block_id in taken:
            self._state[block_id] = _USED
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes blocks back; the first of them is handed out next. Raises IntegrityError for a block that is free."""
        for block_id in reversed(block_ids):
            if not SCRATCH_BLOCK < block_id <= self.num_blocks:
                raise IntegrityError(f"block {block_id} freed, but ids go from 1 to {self.num_blocks}")
            if self._state[block_id] == _FREE:
                raise IntegrityError(f"block {block_id} freed twice")
            self._state[block_id] = _FREE
            self._stack.append(block_id)

    def free_ids(self) -> frozenset[int]:
        """Every free id. O(free blocks): for integrity checks."""
        return frozenset(self._stack)

    def external_fragmentation(self) -> float:
        """Share of the free blocks outside the largest run of consecutive free ids, 0 to 1."""
        return external_fragmentation(self._state)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the free list holds each free id exactly once."""
        ids = self.free_ids()
        if len(ids) != len(self._stack):
            raise IntegrityError("a block is in the free list twice")
        marked = {block_id for block_id, state in enumerate(self._state) if state == _FREE}
        if ids != marked:
            raise IntegrityError(f"free list and free marks disagree about blocks {sorted(ids ^ marked)}")


def free_runs(free_map: bytes | bytearray) -> list[int]:
    """Lengths of the runs of consecutive free ids in a map that has a 1 for each free id and a 0 for others."""
    # The pattern runs in C: for 20,000 blocks 0.15 ms, 1.5 ms when every second one is free.
    return [match.end() - match.start() for match in _FREE_RUN.finditer(free_map)]


def external_fragmentation(free_map: bytes | bytearray) -> float:
    """Share of the free blocks of a free map outside its longest run of free ids, 0 to 1; 0 when none is free."""
    runs = free_runs(free_map)
    return 1.0 - max(runs) / sum(runs) if runs else 0.0
