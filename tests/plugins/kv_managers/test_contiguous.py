"""ContiguousKVManager: slabs, what they waste, and what they refuse."""

from __future__ import annotations

import pytest

from mlx_engine.errors import ConfigError, IntegrityError
from mlx_engine.types import CacheKey, PrefixMatch
from plugins.kv_managers.contiguous import ContiguousKVManager
from plugins.prefix_caches.none import NoPrefixCache
from plugins.prefix_caches.radix import RadixPrefixCache
from tests.plugins.builders import contiguous


def test_a_request_gets_consecutive_blocks_for_its_whole_life() -> None:
    kv = contiguous(10, 2, 6)
    assert kv.allocate_slots("a", 1)
    assert list(kv.block_table("a")) == [1, 2, 3]
    assert kv.allocate_slots("a", 6)
    assert list(kv.block_table("a")) == [1, 2, 3]
    assert not kv.allocate_slots("a", 7)


def test_first_fit_reuses_the_lowest_gap() -> None:
    kv = contiguous(10, 2, 6)
    for request_id in ("a", "b", "c"):
        assert kv.allocate_slots(request_id, 1)
    assert not kv.allocate_slots("d", 1), "one block is left over, a slab takes three"
    kv.free("b")
    assert kv.allocate_slots("d", 1)
    assert list(kv.block_table("d")) == [4, 5, 6]
    kv.check_integrity()


def test_both_kinds_of_fragmentation_show() -> None:
    kv = contiguous(10, 2, 6)
    for request_id in ("a", "b", "c"):
        kv.allocate_slots(request_id, 2)
    kv.free("b")
    usage = kv.usage()
    assert usage.internal_fragmentation == pytest.approx(8 / 12)
    assert usage.external_fragmentation == pytest.approx(1 / 4)
    assert (usage.free, usage.private, usage.cached) == (4, 6, 0)
    assert kv.num_free_blocks == 3, "the block left over can't be reserved"


def test_slab_tokens_overrides_the_context_length() -> None:
    kv = ContiguousKVManager(
        num_blocks=10, block_size=2, prefix_cache=NoPrefixCache(block_size=2), max_model_len=20, slab_tokens=3
    )
    assert kv.max_tokens_per_request == 4
    assert kv.num_free_blocks == 10


@pytest.mark.parametrize(("slab_tokens", "message"), [(0, "at least 1"), (21, "takes 11 blocks, but the pool has 10")])
def test_impossible_slabs_are_refused(slab_tokens: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContiguousKVManager(
            num_blocks=10,
            block_size=2,
            prefix_cache=NoPrefixCache(block_size=2),
            max_model_len=20,
            slab_tokens=slab_tokens,
        )


def test_a_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="set prefix_cache to 'none'"):
        ContiguousKVManager(num_blocks=10, block_size=2, prefix_cache=RadixPrefixCache(block_size=2), max_model_len=20)


def test_misuse_raises() -> None:
    kv = contiguous(10, 2, 6)
    with pytest.raises(IntegrityError, match="share nothing"):
        kv.allocate_slots("a", 4, PrefixMatch((1,), 2))
    with pytest.raises(IntegrityError, match="holds no blocks"):
        kv.block_table("a")
    with pytest.raises(IntegrityError, match="holds no blocks"):
        kv.cache_blocks("a", [1, 2], CacheKey("model"))
    assert kv.reset_prefix_cache() == 0
