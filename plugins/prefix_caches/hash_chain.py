"""A flat table of blocks by chained hash: each block's digest covers its tokens and the digest of the block before.

    root(model, adapter, salt) ─> h1 = H(root, tokens 0..B-1) ─> h2 = H(h1, tokens B..2B-1) ─> ...
    table: {h1: block 4, h2: block 7, ...}

So one digest stands for a whole prefix under its key, and a lookup is one dictionary access per block. The hash is
BLAKE2b with 256 bits: finding two prefixes with one digest is out of reach, so tokens are not kept to compare.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar

from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import PrefixCache
from mlx_engine.types import CacheKey, PrefixMatch

_DIGEST_BYTES = 32


@dataclass(slots=True)
class _Entry:
    """One cached block."""

    block_id: int
    parent: bytes  # digest of the block before, or of the root
    refs: int = 0  # holders that pin it


@dataclass(slots=True)
class _Pin:
    """What one holder pins: the digests of its prefix, in order."""

    root: bytes
    digests: list[bytes] = field(default_factory=list)


class HashChainPrefixCache(PrefixCache):
    """Prefix cache over a hash table. insert_prefix looks only at blocks the holder doesn't pin yet."""

    interface_version: ClassVar[int] = 1

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size
        self._table: dict[bytes, _Entry] = {}
        self._pins: dict[str, _Pin] = {}
        self._owned: set[int] = set()
        # Every unpinned block, in the order to evict. A release appends its blocks from the last to the first, so
        # a block always comes before the one it follows, and no chain is ever cut in the middle.
        self._lru: OrderedDict[bytes, None] = OrderedDict()

    def match_prefix(self, key: CacheKey, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix, at most len(token_ids) - 1 tokens. Pure; O(prefix)."""
        digest = _root_digest(key)
        block_ids: list[int] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            digest = self._digest(digest, token_ids, index)
            entry = self._table.get(digest)
            if entry is None:
                break
            block_ids.append(entry.block_id)
        return PrefixMatch(tuple(block_ids), len(block_ids) * self.block_size)

    def acquire(self, holder: str, key: CacheKey, token_ids: Sequence[int], match: PrefixMatch) -> None:
        """Pins the match. Raises IntegrityError if the holder pins something, or the match is no longer cached."""
        if holder in self._pins:
            raise IntegrityError(f"{holder!r} acquires a prefix while it pins one")
        if not match.block_ids:
            return
        pin = self._pins[holder] = _Pin(_root_digest(key))
        self._pin_cached(pin, token_ids, len(match.block_ids))
        if tuple(self._table[digest].block_id for digest in pin.digests) != match.block_ids:
            self.release(holder)
            raise IntegrityError(f"the prefix matched for {holder!r} is no longer cached")

    def release(self, holder: str) -> None:
        """Unpins the holder's prefix; what nobody pins now is the last to be evicted."""
        pin = self._pins.pop(holder, None)
        for digest in reversed(pin.digests if pin else []):
            entry = self._table[digest]
            entry.refs -= 1
            if entry.refs == 0:
                self._lru[digest] = None

    def insert_prefix(
        self, holder: str, key: CacheKey, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Adds and pins the whole blocks of token_ids; O(blocks that the holder doesn't pin yet).

        Raises IntegrityError if block_ids is too short, holds a block that the cache owns elsewhere, or the holder
        changes its key.
        """
        root = _root_digest(key)
        stop = len(token_ids) // self.block_size
        pin = self._pins.get(holder)
        if pin is None:
            if stop == 0:
                return ()
            pin = self._pins[holder] = _Pin(root)
        elif pin.root != root:
            raise IntegrityError(f"{holder!r} inserts under {key}, but pins another key's prefix")
        self._pin_cached(pin, token_ids, stop)
        start = len(pin.digests)
        if start >= stop:
            return ()
        adopted = tuple(block_ids[start:stop])
        if len(adopted) != stop - start or not self._owned.isdisjoint(adopted):
            raise IntegrityError(f"{holder!r} offers {stop - start} blocks, but brings {adopted}: missing or owned")
        parent = self._tip(pin)
        for index, block_id in enumerate(adopted, start):
            digest = self._digest(parent, token_ids, index)
            self._table[digest] = _Entry(block_id, parent, refs=1)
            pin.digests.append(digest)
            parent = digest
        self._owned.update(adopted)
        return adopted

    def evict(self, num_blocks: int) -> tuple[int, ...]:
        """Gives back up to num_blocks blocks, least recently used first, ends of chains first; O(blocks)."""
        evicted: list[int] = []
        while self._lru and len(evicted) < num_blocks:
            digest, _ = self._lru.popitem(last=False)
            evicted.append(self._table.pop(digest).block_id)
        self._owned.difference_update(evicted)
        return tuple(evicted)

    def reset(self) -> tuple[int, ...]:
        """Gives back every block that no holder pins."""
        return self.evict(len(self._lru))

    def cached_block_ids(self) -> frozenset[int]:
        """Every block in the table."""
        return frozenset(self._owned)

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return len(self._table)

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that no holder pins."""
        return len(self._lru)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, pins, chains and the eviction order agree. Walks the whole table."""
        refs = dict.fromkeys(self._table, 0)
        for holder, pin in self._pins.items():
            parent = pin.root
            for digest in pin.digests:
                if digest not in refs or self._table[digest].parent != parent:
                    raise IntegrityError(f"{holder!r} pins a prefix that is not one cached chain")
                refs[digest] += 1
                parent = digest
        position = {digest: index for index, digest in enumerate(self._lru)}
        for digest, entry in self._table.items():
            if entry.refs != refs[digest]:
                raise IntegrityError(f"block {entry.block_id} counts {entry.refs} pins, but has {refs[digest]}")
            if (digest in position) != (entry.refs == 0):
                raise IntegrityError(f"block {entry.block_id} is wrongly in or out of the eviction order")
            # A parent outside the table must be a root; a missing block would leave its children unreachable.
            if position.get(entry.parent, len(position)) <= position.get(digest, -1):
                raise IntegrityError(f"block {entry.block_id} would be evicted after the one it follows")
        if {entry.block_id for entry in self._table.values()} != self._owned or len(self._owned) != len(self._table):
            raise IntegrityError("the blocks in the table are not those that the cache owns")

    def _digest(self, parent: bytes, token_ids: Sequence[int], index: int) -> bytes:
        start = index * self.block_size
        tokens = array("q", token_ids[start : start + self.block_size])
        return blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES, person=b"block").digest()

    def _tip(self, pin: _Pin) -> bytes:
        return pin.digests[-1] if pin.digests else pin.root

    def _pin_cached(self, pin: _Pin, token_ids: Sequence[int], stop: int) -> None:
        """Extends a pin over the blocks of token_ids below `stop` that are cached."""
        for index in range(len(pin.digests), stop):
            digest = self._digest(self._tip(pin), token_ids, index)
            entry = self._table.get(digest)
            if entry is None:
                return
            if entry.refs == 0:
                del self._lru[digest]
            entry.refs += 1
            pin.digests.append(digest)


def _root_digest(key: CacheKey) -> bytes:
    # repr quotes and escapes each field, so no two keys share a text; None differs from 'None'.
    text = repr((key.model, key.adapter, key.salt))
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=b"root").digest()
