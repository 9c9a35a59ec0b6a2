"""Contiguous KV: one slab of consecutive blocks per sequence, reserved for the longest it may become.

What serving engines did before paging, kept to measure what paging saves: most of a slab stays empty (internal
fragmentation), free blocks lie in gaps between slabs (external fragmentation), and nothing can be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.block_pool import external_fragmentation, free_runs
from mlx_engine.errors import ConfigError, IntegrityError
from mlx_engine.interfaces import KVCacheManager, PrefixCache
from mlx_engine.types import SCRATCH_BLOCK, CacheKey, KVCacheUsage, PrefixMatch, cdiv
from plugins.prefix_caches.none import NoPrefixCache

_USED, _FREE = b"\0", b"\1"


@dataclass(slots=True)
class _Slab:
    """What one request holds: consecutive blocks, and how many of their slots it has asked for."""

    block_ids: range
    num_tokens: int


class ContiguousKVManager(KVCacheManager):
    """First-fit slabs of `slab_tokens` tokens each (max_model_len if None), rounded up to whole blocks."""

    interface_version: ClassVar[int] = 1

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache,
        max_model_len: int,
        slab_tokens: int | None = None,
    ) -> None:
        if not isinstance(prefix_cache, NoPrefixCache):
            raise ConfigError(
                f"kv_manager 'contiguous' can't share blocks, so it can't use {type(prefix_cache).__name__}: "
                "set prefix_cache to 'none'."
            )
        slab_tokens = max_model_len if slab_tokens is None else slab_tokens
        if slab_tokens < 1:
            raise ConfigError(f"slab_tokens must be at least 1, not {slab_tokens}.")
        self._slab_blocks = cdiv(slab_tokens, block_size)
        if self._slab_blocks > num_blocks:
            raise ConfigError(
                f"a slab of {slab_tokens} tokens takes {self._slab_blocks} blocks, but the pool has {num_blocks}: "
                "lower max_model_len or slab_tokens, or raise num_blocks."
            )
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free_map = bytearray(_USED + _FREE * num_blocks)  # by id, scratch included
        self._slabs: dict[str, _Slab] = {}

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], key: CacheKey) -> PrefixMatch:
        """Always empty: slabs share nothing."""
        return PrefixMatch()

    def allocate_slots(self, request_id: str, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Reserves a slab on the first call; False if no run of free blocks is long enough, or num_tokens too many."""
        if match is not None and match.block_ids:
            raise IntegrityError(f"request {request_id!r} brings a prefix match, but slabs share nothing")
        if num_tokens > self.max_tokens_per_request:
            return False
        slab = self._slabs.get(request_id)
        if slab is None:
            start = self._free_map.find(_FREE * self._slab_blocks)
            if start < 0:
                return False
            slab = self._slabs[request_id] = _Slab(range(start, start + self._slab_blocks), 0)
            self._mark(slab.block_ids, _USED)
        slab.num_tokens = max(slab.num_tokens, num_tokens)
        return True

    def block_table(self, request_id: str) -> Sequence[int]:
        """The whole slab, from the first call on."""
        return self._get(request_id).block_ids

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], key: CacheKey) -> None:
        """Does nothing: slabs share nothing. Raises IntegrityError for a request without a slab."""
        self._get(request_id)

    def free(self, request_id: str) -> None:
        """Gives the request's slab back."""
        slab = self._slabs.pop(request_id, None)
        if slab is not None:
            self._mark(slab.block_ids, _FREE)

    def reset_prefix_cache(self) -> int:
        """There is nothing to forget: 0."""
        return 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the slabs that could be reserved now; free blocks in gaps too small for one don't count."""
        return sum(run // self._slab_blocks for run in free_runs(self._free_map)) * self._slab_blocks

    @property
    def max_tokens_per_request(self) -> int:
        """The slots of one slab."""
        return self._slab_blocks * self._block_size

    def usage(self) -> KVCacheUsage:
        """Where the blocks are; a reserved slab counts as private as a whole."""
        held = len(self._slabs) * self._slab_blocks * self._block_size
        filled = sum(slab.num_tokens for slab in self._slabs.values())
        return KVCacheUsage(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            free=self._free_map.count(_FREE),
            private=len(self._slabs) * self._slab_blocks,
            cached=0,
            evictable=0,
            internal_fragmentation=1.0 - filled / held if held else 0.0,
            external_fragmentation=external_fragmentation(self._free_map),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slabs are disjoint and exactly the rest is free."""
        owners = [block_id for slab in self._slabs.values() for block_id in slab.block_ids]
        owners += [block_id for block_id, state in enumerate(self._free_map) if state == _FREE[0]]
        if sorted(owners) != list(range(SCRATCH_BLOCK + 1, self._num_blocks + 1)):
            raise IntegrityError("slabs overlap, or a block is neither free nor in a slab")
        for request_id, slab in self._slabs.items():
            if not 0 <= slab.num_tokens <= self.max_tokens_per_request:
                raise IntegrityError(f"request {request_id!r} holds {slab.num_tokens} tokens in a smaller slab")

    def _get(self, request_id: str) -> _Slab:
        slab = self._slabs.get(request_id)
        if slab is None:
            raise IntegrityError(f"request {request_id!r} holds no blocks")
        return slab

    def _mark(self, block_ids: range, state: bytes) -> None:
        self._free_map[block_ids.start : block_ids.stop] = state * len(block_ids)
