"""Paged KV: blocks on demand through a block table, shared with the prefix cache.

A block is free (in the pool), private (in one request's table) or cached (owned by the prefix cache, and in the
tables of the requests that pin it). Blocks move: free -> private on allocation, private -> cached when the cache
adopts a whole computed block, cached -> free by eviction, private -> free when the request ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mlx_engine.block_pool import BlockPool
from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import KVCacheManager, PrefixCache
from mlx_engine.types import CacheKey, KVCacheUsage, PrefixMatch, cdiv


@dataclass(slots=True)
class _Sequence:
    """What one request holds."""

    # Not a list: a step's input takes hundreds of tables, and copies these without a look at their items.
    table: array[int]
    private: set[int] = field(default_factory=set)  # the blocks of the table that the cache doesn't own
    num_tokens: int = 0  # that the table was last asked to cover
    num_offered: int = 0  # leading blocks that were matched in, or offered to, the prefix cache


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The last get_computed_blocks: what `allocate_slots` needs to pin its match."""

    request_id: str
    token_ids: Sequence[int]
    key: CacheKey


class PagedKVManager(KVCacheManager):
    """Block tables over one pool, with eviction of unused cached blocks when the pool runs short."""

    interface_version: ClassVar[int] = 1

    def __init__(self, *, num_blocks: int, block_size: int, prefix_cache: PrefixCache, max_model_len: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._cache = prefix_cache
        self._sequences: dict[str, _Sequence] = {}
        self._num_private = 0
        self._lookup: _Lookup | None = None

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], key: CacheKey) -> PrefixMatch:
        """The longest cached prefix. Moves no block; valid until the next allocation of another request."""
        self._lookup = _Lookup(request_id, token_ids, key)
        return self._cache.match_prefix(key, token_ids)

    def allocate_slots(self, request_id: str, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Grows the table to cover num_tokens tokens; False, and nothing changed, if blocks are short.

        Raises IntegrityError for a match that isn't from the last get_computed_blocks, or that comes with a request
        that holds blocks already.
        """
        seq = self._sequences.get(request_id)
        # Mostly: a decoding request needs a block once in block_size steps.
        if seq is not None and match is None and num_tokens <= len(seq.table) * self._block_size:
            if num_tokens > seq.num_tokens:
                seq.num_tokens = num_tokens
            return True
        matched = match.block_ids if match is not None else ()
        if matched:
            if seq is not None:
                raise IntegrityError(f"request {request_id!r} holds blocks already, so it can't start from a match")
            # Pinned before anything is evicted: the matched blocks may be evictable themselves.
            self._pin(request_id, match)
        num_held = len(seq.table) if seq is not None else len(matched)
        block_ids = self._take(cdiv(num_tokens, self._block_size) - num_held)
        if block_ids is None:
            if matched:
                self._cache.release(request_id)
            return False
        if seq is None:
            seq = self._sequences[request_id] = _Sequence(table=array("i", matched), num_offered=len(matched))
        seq.table.extend(block_ids)
        seq.private.update(block_ids)
        self._num_private += len(block_ids)
        seq.num_tokens = max(seq.num_tokens, num_tokens)
        return True

    def block_table(self, request_id: str) -> Sequence[int]:
        """The request's block ids in order; grows in place, so copy what you keep."""
        return self._get(request_id).table

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], key: CacheKey) -> None:
        """Offers new whole blocks of token_ids to the prefix cache; returns at once when there are none."""
        seq = self._get(request_id)
        num_whole = len(token_ids) // self._block_size
        if num_whole <= seq.num_offered:
            return
        if num_whole > len(seq.table):
            raise IntegrityError(f"request {request_id!r} offers {num_whole} blocks, but holds {len(seq.table)}")
        adopted = self._cache.insert_prefix(request_id, key, token_ids, seq.table[:num_whole])
        if not seq.private.issuperset(adopted):
            raise IntegrityError(f"the prefix cache adopted {adopted}, which are not all private to {request_id!r}")
        seq.private.difference_update(adopted)
        self._num_private -= len(adopted)
        seq.num_offered = num_whole

    def free(self, request_id: str) -> None:
        """Unpins the request's cached blocks and returns its private ones to the pool."""
        seq = self._sequences.pop(request_id, None)
        if self._lookup is not None and self._lookup.request_id == request_id:
            self._lookup = None
        if seq is None:
            return
        self._cache.release(request_id)
        self._pool.free([block_id for block_id in seq.table if block_id in seq.private])
        self._num_private -= len(seq.private)

    def reset_prefix_cache(self) -> int:
        """Returns every cached block that no request uses to the pool; the count."""
        block_ids = self._cache.reset()
        self._pool.free(block_ids)
        return len(block_ids)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks and evictable ones."""
        return self._pool.num_free + self._cache.num_evictable_blocks

    @property
    def max_tokens_per_request(self) -> int:
        """Every slot of the pool."""
        return self._pool.num_blocks * self._block_size

    def usage(self) -> KVCacheUsage:
        """Where the blocks are. Internal fragmentation counts a shared block once for each request that uses it."""
        held = sum(len(seq.table) for seq in self._sequences.values()) * self._block_size
        filled = sum(seq.num_tokens for seq in self._sequences.values())
        return KVCacheUsage(
            num_blocks=self._pool.num_blocks,
            block_size=self._block_size,
            free=self._pool.num_free,
            private=self._num_private,
            cached=self._cache.num_blocks,
            evictable=self._cache.num_evictable_blocks,
            internal_fragmentation=1.0 - filled / held if held else 0.0,
            external_fragmentation=self._pool.external_fragmentation(),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each block has one owner, tables point at held blocks, and counts agree."""
        self._pool.check_integrity()
        self._cache.check_integrity()
        cached = self._cache.cached_block_ids()
        if len(cached) != self._cache.num_blocks:
            raise IntegrityError(f"the cache says {self._cache.num_blocks} blocks, but names {len(cached)}")
        private: list[int] = []
        shared: set[int] = set()
        for request_id, seq in self._sequences.items():
            in_use = set(seq.table)
            if len(in_use) != len(seq.table) or not seq.private <= in_use:
                raise IntegrityError(f"request {request_id!r} has a block twice, or a private one outside its table")
            if not in_use - seq.private <= cached:
                raise IntegrityError(f"request {request_id!r} uses {sorted(in_use - seq.private - cached)}: not cached")
            private += seq.private
            shared |= in_use - seq.private
        if len(private) != self._num_private:
            raise IntegrityError(f"{len(private)} blocks are private, but the count says {self._num_private}")
        owners = [*self._pool.free_ids(), *private, *cached]
        if sorted(owners) != list(range(1, self._pool.num_blocks + 1)):
            raise IntegrityError(f"blocks are not owned exactly once: {_miscounted(owners, self._pool.num_blocks)}")
        if not 0 <= self._cache.num_evictable_blocks <= len(cached) - len(shared):
            raise IntegrityError("the cache would evict blocks that requests use")

    def _get(self, request_id: str) -> _Sequence:
        seq = self._sequences.get(request_id)
        if seq is None:
            raise IntegrityError(f"request {request_id!r} holds no blocks")
        return seq

    def _pin(self, request_id: str, match: PrefixMatch | None) -> None:
        lookup = self._lookup
        if match is None or lookup is None or lookup.request_id != request_id:
            raise IntegrityError(f"the match given for {request_id!r} isn't from the last get_computed_blocks")
        self._cache.acquire(request_id, lookup.key, lookup.token_ids, match)

    def _take(self, num_blocks: int) -> list[int] | None:
        """Takes blocks from the pool, evicting what it lacks; None, and nothing evicted, if that isn't enough."""
        if num_blocks <= 0:
            return []
        if num_blocks > self.num_free_blocks:
            return None
        missing = num_blocks - self._pool.num_free
        if missing > 0:
            self._pool.free(self._cache.evict(missing))
        block_ids = self._pool.allocate(num_blocks)
        if block_ids is None:
            raise IntegrityError(f"{type(self._cache).__name__} evicted fewer blocks than it called evictable")
        return block_ids


def _miscounted(owners: list[int], num_blocks: int) -> list[int]:
    """Block ids that don't appear exactly once."""
    counts = dict.fromkeys(range(1, num_blocks + 1), 0)
    for block_id in owners:
        counts[block_id] = counts.get(block_id, 0) + 1
    return sorted(block_id for block_id, count in counts.items() if count != 1)
