"""The memory invariants, under random use, for every pair of KV manager and prefix cache."""

from __future__ import annotations

import pytest

from mlx_engine.interfaces import PrefixCache
from plugins.prefix_caches.hash_chain import HashChainPrefixCache
from plugins.prefix_caches.none import NoPrefixCache
from plugins.prefix_caches.radix import RadixPrefixCache
from tests.plugins.builders import contiguous, paged
from tests.plugins.kv_managers.machines import run_kv_machine


@pytest.mark.parametrize("cache", [RadixPrefixCache, HashChainPrefixCache, NoPrefixCache])
def test_paged_never_loses_or_shares_wrongly(cache: type[PrefixCache]) -> None:
    run_kv_machine(lambda num_blocks, block_size, _: paged(num_blocks, block_size, cache(block_size=block_size)))


def test_contiguous_never_loses_or_overlaps() -> None:
    run_kv_machine(contiguous)
