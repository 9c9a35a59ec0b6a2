"""Bugs planted on purpose, one at a time: the state machine and the conformance kit must both find each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlx_engine.block_pool import BlockPool
from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import PrefixCache
from mlx_engine.types import CacheKey, PrefixMatch, cdiv
from plugins.conformance import check_kv_manager, check_prefix_cache
from plugins.kv_managers.contiguous import ContiguousKVManager
from plugins.kv_managers.paged import PagedKVManager, _Sequence
from plugins.prefix_caches.hash_chain import HashChainPrefixCache, _root_digest
from plugins.prefix_caches.radix import RadixPrefixCache, _Node
from tests.plugins.builders import contiguous, paged
from tests.plugins.kv_managers.machines import run_kv_machine

# What a found bug looks like: a disagreement, a broken invariant, or the structure falling apart.
FOUND = (AssertionError, IntegrityError, KeyError, IndexError)
Patch = Callable[[pytest.MonkeyPatch], None]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """A patch that replaces owner.name by make(original)."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return patch


def _without_salt(key: CacheKey) -> CacheKey:
    return CacheKey(key.model, key.adapter, None)


def _radix_forgets_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    match, acquire, insert = (getattr(RadixPrefixCache, name) for name in ("match_prefix", "acquire", "insert_prefix"))
    monkeypatch.setattr(RadixPrefixCache, "match_prefix", lambda self, key, t: match(self, _without_salt(key), t))
    monkeypatch.setattr(
        RadixPrefixCache, "acquire", lambda self, holder, key, t, m: acquire(self, holder, _without_salt(key), t, m)
    )
    monkeypatch.setattr(
        RadixPrefixCache,
        "insert_prefix",
        lambda self, holder, key, t, ids: insert(self, holder, _without_salt(key), t, ids),
    )


def _match_to_the_last_token(original: Any) -> Any:
    def match_prefix(self: PrefixCache, key: CacheKey, token_ids: Sequence[int]) -> PrefixMatch:
        match: PrefixMatch = original(self, key, [*token_ids, 0])
        return match

    return match_prefix


def _pin_keeps_it_evictable(self: RadixPrefixCache, node: _Node) -> None:
    if node.refs == 0:
        self._num_evictable -= len(node.block_ids)
    node.refs += 1


def _pin_without_count(self: RadixPrefixCache, node: _Node) -> None:
    self._lru.pop(node, None)


def _release_without_evictable(original: Any) -> Any:
    def release(self: RadixPrefixCache, holder: str) -> None:
        count = self._num_evictable
        original(self, holder)
        self._num_evictable = count

    return release


def _release_never(self: PrefixCache, holder: str) -> None:
    self._pins.pop(holder, None)  # type: ignore[attr-defined]


def _block_by_first_token(original: Any) -> Any:
    def block(self: RadixPrefixCache, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = original(self, token_ids, index)
        return tokens[:1]

    return block


def _evict_front_first(self: RadixPrefixCache, num_blocks: int) -> tuple[int, ...]:
    """Takes a node's first blocks instead of its last."""
    evicted: list[int] = []
    while self._lru and len(evicted) < num_blocks:
        node = next(iter(self._lru))
        first = node.tokens[0]
        evicted.append(node.block_ids.pop(0))
        node.tokens.pop(0)
        if not node.block_ids:
            self._remove(node, first)
    self._num_evictable -= len(evicted)
    self._owned.difference_update(evicted)
    return tuple(evicted)


RADIX_FAULTS: dict[str, Patch] = {
    "skips the reference count": _replace(RadixPrefixCache, "_pin_node", lambda _: _pin_without_count),
    "evicts pinned nodes": _replace(RadixPrefixCache, "_pin_node", lambda _: _pin_keeps_it_evictable),
    "forgets the salt": _radix_forgets_the_salt,
    "matches the last token too": _replace(RadixPrefixCache, "match_prefix", _match_to_the_last_token),
    "never unpins": _replace(RadixPrefixCache, "release", lambda _: _release_never),
    "miscounts evictable blocks": _replace(RadixPrefixCache, "release", _release_without_evictable),
    "compares the first token only": _replace(RadixPrefixCache, "_block", _block_by_first_token),
    "evicts from the front of an edge": _replace(RadixPrefixCache, "evict", lambda _: _evict_front_first),
}


def _digest_without_parent(original: Any) -> Any:
    return lambda self, parent, token_ids, index: original(self, b"", token_ids, index)


def _insert_without_pin(original: Any) -> Any:
    def insert_prefix(self: HashChainPrefixCache, holder: str, *args: Any) -> tuple[int, ...]:
        adopted: tuple[int, ...] = original(self, holder, *args)
        for entry in self._table.values():
            if entry.block_id in adopted:
                entry.refs = 0
        return adopted

    return insert_prefix


def _lru_in_prefix_order(self: HashChainPrefixCache, holder: str) -> None:
    """Appends a released chain from its first block on, so that heads are evicted before tails."""
    pin = self._pins.pop(holder, None)
    for digest in pin.digests if pin else []:
        self._table[digest].refs -= 1
        if self._table[digest].refs == 0:
            self._lru[digest] = None


def _hash_forgets_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "plugins.prefix_caches.hash_chain._root_digest"
    monkeypatch.setattr(name, lambda key: _root_digest(_without_salt(key)))


HASH_FAULTS: dict[str, Patch] = {
    "forgets the salt": _hash_forgets_the_salt,
    "forgets the parent": _replace(HashChainPrefixCache, "_digest", _digest_without_parent),
    "matches the last token too": _replace(HashChainPrefixCache, "match_prefix", _match_to_the_last_token),
    "doesn't pin what it inserts": _replace(HashChainPrefixCache, "insert_prefix", _insert_without_pin),
    "never unpins": _replace(HashChainPrefixCache, "release", lambda _: _release_never),
    "evicts heads before tails": _replace(HashChainPrefixCache, "release", lambda _: _lru_in_prefix_order),
}


def _free_cached_too(original: Any) -> Any:
    def free(self: PagedKVManager, request_id: str) -> None:
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.private = set(seq.table)
        original(self, request_id)

    return free


def _free_leaks_last(original: Any) -> Any:
    def free(self: PagedKVManager, request_id: str) -> None:
        seq = self._sequences.get(request_id)
        if seq is not None and seq.table[-1] in seq.private:
            seq.private.remove(seq.table[-1])
            self._num_private -= 1
        original(self, request_id)

    return free


def _double_free_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frees everything twice, on a pool that doesn't mind."""

    def pool_free(self: BlockPool, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._state[block_id] = 1
            self._stack += [block_id, block_id]

    monkeypatch.setattr(BlockPool, "free", pool_free)


def _cache_one_block_early(original: Any) -> Any:
    """Offers the block that is being filled, before its last tokens are computed."""

    def cache_blocks(self: PagedKVManager, request_id: str, token_ids: Sequence[int], key: CacheKey) -> None:
        whole = cdiv(len(token_ids), self._block_size) * self._block_size
        original(self, request_id, [*token_ids, *[0] * (whole - len(token_ids))], key)

    return cache_blocks


def _allocate_keeps_pin(
    self: PagedKVManager, request_id: str, num_tokens: int, match: PrefixMatch | None = None
) -> bool:
    """allocate_slots that forgets to unpin its match when blocks are short."""
    seq = self._sequences.get(request_id)
    matched = match.block_ids if match is not None and seq is None else ()
    if matched:
        self._pin(request_id, match)
    block_ids = self._take(cdiv(num_tokens, self._block_size) - len(seq.table if seq else matched))
    if block_ids is None:
        return False
    seq = self._sequences.setdefault(request_id, _Sequence(table=list(matched), num_offered=len(matched)))
    seq.table += block_ids
    seq.private.update(block_ids)
    self._num_private += len(block_ids)
    seq.num_tokens = max(seq.num_tokens, num_tokens)
    return True


PAGED_FAULTS: dict[str, Patch] = {
    "frees blocks that the cache owns": _replace(PagedKVManager, "free", _free_cached_too),
    "leaks the last block": _replace(PagedKVManager, "free", _free_leaks_last),
    "swallows double frees": _double_free_swallowed,
    "doesn't pin its match": _replace(PagedKVManager, "_pin", lambda _: lambda self, request_id, match: None),
    "caches a block before it is computed": _replace(PagedKVManager, "cache_blocks", _cache_one_block_early),
    "keeps the pin of a failed admission": _replace(PagedKVManager, "allocate_slots", lambda _: _allocate_keeps_pin),
}


def _mark_nothing_used(original: Any) -> Any:
    return lambda self, ids, state: original(self, ids, state) if state == b"\1" else None


def _mark_all_but_last(original: Any) -> Any:
    return lambda self, ids, state: original(self, ids if state == b"\0" else ids[:-1], state)


CONTIGUOUS_FAULTS: dict[str, Patch] = {
    "hands a slab out twice": _replace(ContiguousKVManager, "_mark", _mark_nothing_used),
    "gives a slab back short": _replace(ContiguousKVManager, "_mark", _mark_all_but_last),
}


def _paged_radix(num_blocks: int, block_size: int, _: int) -> PagedKVManager:
    return paged(num_blocks, block_size, RadixPrefixCache(block_size=block_size))


def _paged_hash(num_blocks: int, block_size: int, _: int) -> PagedKVManager:
    return paged(num_blocks, block_size, HashChainPrefixCache(block_size=block_size))


CASES = [
    pytest.param(factory, fault, id=f"{seam}: {name}")
    for seam, factory, faults in [
        ("radix", _paged_radix, RADIX_FAULTS),
        ("hash_chain", _paged_hash, HASH_FAULTS),
        ("paged", _paged_radix, PAGED_FAULTS),
        ("contiguous", contiguous, CONTIGUOUS_FAULTS),
    ]
    for name, fault in faults.items()
]


@pytest.mark.parametrize(("factory", "fault"), CASES)
def test_the_state_machine_finds_it(factory: Any, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(FOUND):
        run_kv_machine(factory, max_examples=200, shrink=False)


@pytest.mark.parametrize(("factory", "fault"), CASES)
def test_the_kv_kit_finds_it(factory: Any, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(FOUND):
        check_kv_manager(factory)


@pytest.mark.parametrize(
    ("cache", "fault"),
    [pytest.param(RadixPrefixCache, fault, id=f"radix: {name}") for name, fault in RADIX_FAULTS.items()]
    + [pytest.param(HashChainPrefixCache, fault, id=f"hash_chain: {name}") for name, fault in HASH_FAULTS.items()],
)
def test_the_prefix_cache_kit_finds_it(
    cache: type[RadixPrefixCache | HashChainPrefixCache], fault: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    # From the outside only: a third party's cache need not have such a check.
    monkeypatch.setattr(cache, "check_integrity", PrefixCache.check_integrity)
    with pytest.raises(FOUND):
        check_prefix_cache(lambda block_size: cache(block_size=block_size))
