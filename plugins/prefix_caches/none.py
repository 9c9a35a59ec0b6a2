"""No prefix cache: nothing is shared and nothing outlives its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlx_engine.interfaces import PrefixCache
from mlx_engine.types import CacheKey, PrefixMatch


class NoPrefixCache(PrefixCache):
    """Matches nothing and adopts nothing: every block stays its request's own."""

    interface_version: ClassVar[int] = 1

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size

    def match_prefix(self, key: CacheKey, token_ids: Sequence[int]) -> PrefixMatch:
        """Always the empty match."""
        return PrefixMatch()

    def acquire(self, holder: str, key: CacheKey, token_ids: Sequence[int], match: PrefixMatch) -> None:
        """Pins nothing."""

    def release(self, holder: str) -> None:
        """Does nothing."""

    def insert_prefix(
        self, holder: str, key: CacheKey, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Adopts nothing."""
        return ()

    def evict(self, num_blocks: int) -> tuple[int, ...]:
        """There is nothing to evict."""
        return ()

    def reset(self) -> tuple[int, ...]:
        """There is nothing to forget."""
        return ()

    def cached_block_ids(self) -> frozenset[int]:
        """Always empty."""
        return frozenset()

    @property
    def num_blocks(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_evictable_blocks(self) -> int:
        """Always 0."""
        return 0
