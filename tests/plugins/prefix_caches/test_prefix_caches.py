"""What both real prefix caches promise: sharing, keys, pins, order of eviction, and cheap growth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from mlx_engine.errors import IntegrityError
from mlx_engine.types import CacheKey, PrefixMatch
from plugins.prefix_caches.hash_chain import HashChainPrefixCache
from plugins.prefix_caches.none import NoPrefixCache
from plugins.prefix_caches.radix import RadixPrefixCache

KEY = CacheKey("model")
Cache = RadixPrefixCache | HashChainPrefixCache


@pytest.fixture(params=[RadixPrefixCache, HashChainPrefixCache])
def cache(request: pytest.FixtureRequest) -> Cache:
    """An empty cache with blocks of two tokens."""
    built: Cache = request.param(block_size=2)
    return built


def put(cache: Cache, tokens: Sequence[int], block_ids: Sequence[int], key: CacheKey = KEY) -> None:
    """Inserts a prefix that nobody pins afterwards."""
    cache.insert_prefix("put", key, tokens, block_ids)
    cache.release("put")


def test_match_leaves_a_token_to_compute(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match_prefix(KEY, [1, 2, 3, 4]) == PrefixMatch((10,), 2)
    assert cache.match_prefix(KEY, [1, 2, 3, 4, 5]) == PrefixMatch((10, 11), 4)
    assert cache.match_prefix(KEY, [1]) == PrefixMatch()
    assert cache.match_prefix(KEY, []) == PrefixMatch()


def test_match_is_whole_blocks_only(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4, 5], [10, 11, 12])
    assert cache.num_blocks == 2, "the third block isn't full"
    assert cache.match_prefix(KEY, [1, 2, 3, 9, 9]) == PrefixMatch((10,), 2)


@pytest.mark.parametrize(
    "other",
    [CacheKey("other"), CacheKey("model", "adapter"), CacheKey("model", None, "salt"), CacheKey("model", None, "None")],
)
def test_nothing_is_shared_between_keys(cache: Cache, other: CacheKey) -> None:
    put(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match_prefix(other, [1, 2, 3, 4, 5]) == PrefixMatch()
    put(cache, [1, 2, 3, 4], [20, 21], other)
    assert cache.match_prefix(other, [1, 2, 3, 4, 5]).block_ids == (20, 21)
    assert cache.match_prefix(KEY, [1, 2, 3, 4, 5]).block_ids == (10, 11)


def test_same_block_after_another_prefix_is_another_block(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match_prefix(KEY, [9, 9, 3, 4, 5]) == PrefixMatch()


def test_duplicates_are_not_adopted_but_what_follows_is(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4], [10, 11])
    assert cache.insert_prefix("b", KEY, [1, 2, 3, 4, 5, 6], [20, 21, 22]) == (22,)
    assert cache.match_prefix(KEY, [1, 2, 3, 4, 5, 6, 7]).block_ids == (10, 11, 22)
    assert cache.num_evictable_blocks == 0, "the inserter pins the whole path, the others' blocks too"


def test_sequences_that_diverge_share_their_common_blocks(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    put(cache, [1, 2, 3, 4, 7, 8], [20, 21, 22])
    assert cache.cached_block_ids() == {10, 11, 12, 22}
    assert cache.match_prefix(KEY, [1, 2, 3, 4, 7, 8, 0]).block_ids == (10, 11, 22)
    assert cache.match_prefix(KEY, [1, 2, 3, 4, 5, 6, 0]).block_ids == (10, 11, 12)
    cache.check_integrity()


def test_pinned_blocks_are_never_evicted(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    tokens = [1, 2, 3, 4, 9]
    cache.acquire("a", KEY, tokens, cache.match_prefix(KEY, tokens))
    assert cache.num_evictable_blocks == 1
    assert cache.evict(5) == (12,)
    assert cache.reset() == ()
    cache.release("a")
    assert sorted(cache.reset()) == [10, 11]
    assert cache.num_blocks == 0


def test_a_pin_of_one_holder_outlives_the_release_of_another(cache: Cache) -> None:
    put(cache, [1, 2], [10])
    for holder in ("a", "b"):
        cache.acquire(holder, KEY, [1, 2, 3], cache.match_prefix(KEY, [1, 2, 3]))
    cache.release("a")
    assert cache.evict(1) == ()
    cache.release("b")
    assert cache.evict(1) == (10,)


def test_eviction_takes_the_least_recently_used_leaf_from_its_tail(cache: Cache) -> None:
    put(cache, [1, 1, 2, 2], [10, 11])
    put(cache, [3, 3, 4, 4], [20, 21])
    cache.acquire("a", KEY, [1, 1, 2, 2, 0], cache.match_prefix(KEY, [1, 1, 2, 2, 0]))
    cache.release("a")  # used now: 20 and 21 are older
    assert cache.evict(3) == (21, 20, 11)
    assert cache.match_prefix(KEY, [1, 1, 2, 2, 0]).block_ids == (10,)
    cache.check_integrity()


def test_parent_outlives_its_children_even_if_it_was_released_first(cache: Cache) -> None:
    cache.insert_prefix("a", KEY, [1, 1], [10])
    cache.insert_prefix("b", KEY, [1, 1, 2, 2], [20, 11])
    cache.release("a")
    cache.release("b")
    assert cache.evict(2) == (11, 10)


def test_second_acquire_of_a_holder_raises(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4], [10, 11])
    match = cache.match_prefix(KEY, [1, 2, 3])
    cache.acquire("a", KEY, [1, 2, 3], match)
    with pytest.raises(IntegrityError, match="while it pins one"):
        cache.acquire("a", KEY, [1, 2, 3], match)


def test_stale_match_raises_and_pins_nothing(cache: Cache) -> None:
    put(cache, [1, 2, 3, 4], [10, 11])
    match = cache.match_prefix(KEY, [1, 2, 3, 4, 5])
    cache.evict(1)
    with pytest.raises(IntegrityError, match="no longer cached"):
        cache.acquire("a", KEY, [1, 2, 3, 4, 5], match)
    assert cache.num_evictable_blocks == 1
    cache.check_integrity()


def test_blocks_owned_already_or_missing_are_refused(cache: Cache) -> None:
    put(cache, [1, 2], [10])
    with pytest.raises(IntegrityError, match="missing or owned"):
        cache.insert_prefix("a", KEY, [3, 4], [10])
    with pytest.raises(IntegrityError, match="missing or owned"):
        cache.insert_prefix("b", KEY, [3, 4, 5, 6], [11])


def test_holder_can_not_change_its_key(cache: Cache) -> None:
    cache.insert_prefix("a", KEY, [1, 2], [10])
    with pytest.raises(IntegrityError, match="inserts under"):
        cache.insert_prefix("a", CacheKey("other"), [1, 2, 3, 4], [10, 11])


def test_releasing_an_unknown_holder_does_nothing(cache: Cache) -> None:
    cache.release("nobody")
    assert cache.insert_prefix("short", KEY, [1], [10]) == ()
    cache.check_integrity()


class CountingTokens(Sequence[int]):
    """A token sequence that counts how many tokens are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        positions = range(self.length)[index]
        self.read += len(positions) if isinstance(positions, range) else 1
        return list(positions) if isinstance(positions, range) else positions

    def __iter__(self) -> Iterator[int]:
        self.read += self.length
        return iter(range(self.length))


def test_growing_reads_only_new_blocks(cache: Cache) -> None:
    """A generating sequence offers a block every few tokens: reading all of it each time would be quadratic."""
    tokens = CountingTokens(2)
    for length in range(2, 2001, 2):
        tokens.length = length
        cache.insert_prefix("a", KEY, tokens, range(1, length // 2 + 1))
    assert cache.num_blocks == 1000
    assert tokens.read < 4 * 2000


def test_radix_keeps_a_growing_sequence_in_one_edge() -> None:
    cache = RadixPrefixCache(block_size=2)
    for length in range(2, 41, 2):
        cache.insert_prefix("a", KEY, range(length), range(1, length // 2 + 1))
    assert [len(node.block_ids) for node in cache._nodes()] == [0, 20]


def test_radix_forgets_empty_roots() -> None:
    """Salts are as many as users: what they leave behind must not grow."""
    cache = RadixPrefixCache(block_size=2)
    for user in range(50):
        put(cache, [1, 2, 3, 4], [2 * user + 1, 2 * user + 2], CacheKey("model", None, f"user-{user}"))
    assert len(cache.reset()) == 100
    assert not cache._roots


def test_none_shares_nothing() -> None:
    cache = NoPrefixCache(block_size=2)
    assert cache.insert_prefix("a", KEY, [1, 2, 3, 4], [1, 2]) == ()
    assert cache.match_prefix(KEY, [1, 2, 3, 4]) == PrefixMatch()
    assert (cache.num_blocks, cache.num_evictable_blocks, cache.evict(3), cache.reset()) == (0, 0, (), ())
