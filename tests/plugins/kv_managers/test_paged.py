"""PagedKVManager: on-demand blocks, sharing, eviction, roll-back, and the figures."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_engine.errors import IntegrityError
from mlx_engine.types import CacheKey, PrefixMatch
from plugins.kv_managers.paged import PagedKVManager
from plugins.prefix_caches.radix import RadixPrefixCache
from tests.plugins.builders import paged

KEY = CacheKey("model")


def radix_paged(num_blocks: int) -> PagedKVManager:
    """A pool with blocks of two tokens and a radix cache."""
    return paged(num_blocks, 2, RadixPrefixCache(block_size=2))


def run(kv: PagedKVManager, request_id: str, tokens: list[int], key: CacheKey = KEY) -> bool:
    """Admits a request with all its tokens and computes them; False if blocks are short."""
    match = kv.get_computed_blocks(request_id, tokens, key)
    if not kv.allocate_slots(request_id, len(tokens), match):
        return False
    kv.cache_blocks(request_id, tokens, key)
    return True


def test_blocks_are_taken_only_when_a_token_needs_one() -> None:
    kv = radix_paged(4)
    for num_tokens, num_blocks in [(1, 1), (2, 1), (3, 2), (3, 2), (7, 4)]:
        assert kv.allocate_slots("a", num_tokens)
        assert len(kv.block_table("a")) == num_blocks
    assert not kv.allocate_slots("a", 9)
    assert len(kv.block_table("a")) == 4


def test_second_request_starts_from_the_first_ones_blocks() -> None:
    kv = radix_paged(8)
    run(kv, "a", [1, 2, 3, 4, 5])
    assert run(kv, "b", [1, 2, 3, 4, 6])
    assert kv.block_table("b")[:2] == kv.block_table("a")[:2]
    assert kv.block_table("b")[2] != kv.block_table("a")[2]
    usage = kv.usage()
    assert (usage.free, usage.private, usage.cached, usage.evictable) == (4, 2, 2, 0)
    kv.check_integrity()


def test_salts_separate_requests() -> None:
    kv = radix_paged(8)
    run(kv, "a", [1, 2, 3, 4, 5])
    assert kv.get_computed_blocks("b", [1, 2, 3, 4, 5], CacheKey("model", None, "b")) == PrefixMatch()


def test_free_keeps_cached_blocks_and_returns_private_ones() -> None:
    kv = radix_paged(8)
    run(kv, "a", [1, 2, 3, 4, 5])
    kv.free("a")
    usage = kv.usage()
    assert (usage.free, usage.private, usage.cached, usage.evictable) == (6, 0, 2, 2)
    assert kv.num_free_blocks == 8
    kv.free("a")
    kv.check_integrity()


def test_allocation_evicts_what_it_lacks_and_no_more() -> None:
    kv = radix_paged(4)
    run(kv, "a", [1, 2, 3, 4, 5, 6])
    kv.free("a")
    assert kv.allocate_slots("b", 4)
    assert kv.usage().cached == 2
    kv.check_integrity()


def test_matched_blocks_survive_the_eviction_that_their_own_request_needs() -> None:
    """They are evictable until they are pinned, and the least recently used ones at that."""
    kv = radix_paged(4)
    run(kv, "old", [1, 2, 3, 4])
    old = list(kv.block_table("old"))
    kv.free("old")
    run(kv, "new", [7, 7, 8, 8])
    kv.free("new")
    assert run(kv, "b", [1, 2, 3, 4, 5, 6, 7, 8])
    assert list(kv.block_table("b"))[:2] == old
    assert len(set(kv.block_table("b"))) == 4
    kv.check_integrity()


def test_a_refused_admission_changes_nothing() -> None:
    kv = radix_paged(4)
    run(kv, "a", [1, 2, 3, 4])
    run(kv, "busy", [9, 9, 8, 8])
    kv.free("a")
    before = kv.usage()
    assert not run(kv, "b", [1, 2, 3, 4, 5])
    assert kv.usage() == before
    kv.check_integrity()
    with pytest.raises(IntegrityError, match="holds no blocks"):
        kv.block_table("b")


def test_a_match_from_another_lookup_is_refused() -> None:
    kv = radix_paged(8)
    run(kv, "a", [1, 2, 3, 4, 5])
    match = kv.get_computed_blocks("b", [1, 2, 3, 4, 5], KEY)
    kv.get_computed_blocks("c", [1, 2, 3, 4, 5], KEY)
    with pytest.raises(IntegrityError, match="last get_computed_blocks"):
        kv.allocate_slots("b", 5, match)
    with pytest.raises(IntegrityError, match="holds blocks already"):
        kv.allocate_slots("a", 5, match)


def test_duplicate_blocks_stay_private_and_come_back() -> None:
    """Two requests compute the same prompt at once: the second one's copies are its own."""
    kv = radix_paged(8)
    tokens = [1, 2, 3, 4]
    for request_id in ("a", "b"):
        assert kv.allocate_slots(request_id, 4, kv.get_computed_blocks(request_id, tokens, KEY))
    for request_id in ("a", "b"):
        kv.cache_blocks(request_id, tokens, KEY)
    assert (kv.usage().private, kv.usage().cached) == (2, 2)
    kv.check_integrity()
    kv.free("a")
    assert kv.usage().evictable == 0, "b pins the path of its tokens, though its own blocks are others"
    kv.free("b")
    assert (kv.usage().free, kv.usage().evictable) == (6, 2)
    kv.check_integrity()


def test_cache_is_called_only_when_a_block_became_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixPrefixCache(block_size=2)
    kv = paged(8, 2, cache)
    calls: list[int] = []
    insert = cache.insert_prefix

    def count(holder: str, key: CacheKey, token_ids: Any, block_ids: Any) -> tuple[int, ...]:
        calls.append(len(token_ids))
        return insert(holder, key, token_ids, block_ids)

    monkeypatch.setattr(cache, "insert_prefix", count)
    for length in range(1, 8):
        kv.allocate_slots("a", length)
        kv.cache_blocks("a", list(range(length)), KEY)
    assert calls == [2, 4, 6]


def test_caching_more_than_the_table_holds_raises() -> None:
    kv = radix_paged(8)
    kv.allocate_slots("a", 2)
    with pytest.raises(IntegrityError, match="offers 2 blocks, but holds 1"):
        kv.cache_blocks("a", [1, 2, 3, 4], KEY)


def test_reset_forgets_only_unused_blocks() -> None:
    kv = radix_paged(8)
    run(kv, "a", [1, 2, 3, 4])
    run(kv, "b", [5, 6, 7, 8])
    kv.free("a")
    assert kv.reset_prefix_cache() == 2
    assert (kv.usage().cached, kv.usage().free) == (2, 6)


def test_a_cache_that_evicts_less_than_it_promised_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixPrefixCache(block_size=2)
    kv = paged(2, 2, cache)
    run(kv, "a", [1, 2, 3, 4])
    kv.free("a")
    monkeypatch.setattr(cache, "evict", lambda num_blocks: ())
    with pytest.raises(IntegrityError, match="RadixPrefixCache evicted fewer"):
        kv.allocate_slots("b", 4)


def test_internal_fragmentation_is_the_unfilled_share() -> None:
    kv = paged(8, 4)
    kv.allocate_slots("a", 5)
    assert kv.usage().internal_fragmentation == pytest.approx(3 / 8)
    kv.allocate_slots("a", 8)
    assert kv.usage().internal_fragmentation == 0.0
    assert kv.max_tokens_per_request == 32
