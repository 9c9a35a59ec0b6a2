"""Conformance of a PrefixCache: every call compared with a dictionary from whole prefixes to blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlx_engine.interfaces import PrefixCache
from mlx_engine.types import CacheKey, PrefixMatch

_Prefix = tuple[CacheKey, tuple[int, ...]]  # a key and the tokens from the start to the end of a block


@dataclass(slots=True)
class _Holder:
    """What the model knows of one holder."""

    key: CacheKey
    tokens: tuple[int, ...]
    blocks: list[int]  # of its whole blocks, in order
    private: set[int]  # those that the cache doesn't own


class PrefixCacheWorkout:
    """Operations on a cache that check each answer; `check` compares the whole state.

    The model follows what the cache adopts, so a cache may adopt less than it is offered (or nothing at all), but
    what it adopts it must find, keep while pinned, and give back in order.
    """

    def __init__(self, cache: PrefixCache, block_size: int, num_blocks: int) -> None:
        self.cache = cache
        self.block_size = block_size
        self.free = list(range(num_blocks, 0, -1))
        self.holders: dict[str, _Holder] = {}
        self._cached: dict[_Prefix, int] = {}
        self._last_used: dict[_Prefix, int] = {}
        self._clock = 0

    def match(self, key: CacheKey, tokens: tuple[int, ...]) -> PrefixMatch:
        """match_prefix, twice: it is pure, and finds exactly the longest cached prefix that leaves a token over."""
        match = self.cache.match_prefix(key, tokens)
        expected = self._longest(key, tokens, max(len(tokens) - 1, 0))
        assert match.num_tokens == len(match.block_ids) * self.block_size, f"{match} isn't whole blocks"
        assert match.num_tokens < max(len(tokens), 1), f"{match} leaves no token of {len(tokens)} to compute"
        assert match.block_ids == tuple(expected), f"match_prefix({key}, {tokens}) = {match.block_ids}, not {expected}"
        again = self.cache.match_prefix(key, tokens)
        assert again == match, f"match_prefix isn't pure: first {match}, then {again}"
        return match

    def start(self, name: str, key: CacheKey, tokens: tuple[int, ...]) -> None:
        """A new holder: matches, acquires what is cached, and inserts the rest as far as blocks go."""
        match = self.match(key, tokens)
        if match.block_ids:
            self.cache.acquire(name, key, tokens, match)
        self.holders[name] = _Holder(key, tokens[: match.num_tokens], list(match.block_ids), set())
        self.grow(name, tokens[match.num_tokens :])

    def grow(self, name: str, more: tuple[int, ...]) -> None:
        """Adds tokens to a holder, as many as there are free blocks for, and inserts its whole blocks."""
        holder = self.holders[name]
        room = (len(holder.blocks) + len(self.free)) * self.block_size
        holder.tokens = (holder.tokens + more)[:room]
        num_whole = len(holder.tokens) // self.block_size
        new = [self.free.pop() for _ in range(num_whole - len(holder.blocks))]
        holder.blocks += new
        holder.private |= set(new)
        adopted = self.cache.insert_prefix(name, holder.key, holder.tokens, tuple(holder.blocks))
        for block_id in adopted:
            assert block_id in holder.private, f"{name} got block {block_id} adopted, which it doesn't own"
            index = holder.blocks.index(block_id)
            prefix = (holder.key, holder.tokens[: (index + 1) * self.block_size])
            assert prefix not in self._cached, f"block {block_id} was adopted though its prefix is cached already"
            assert index == 0 or self._parent(prefix) in self._cached, f"block {block_id} adopted without its parent"
            self._cached[prefix] = block_id
            holder.private.remove(block_id)

    def release(self, name: str) -> None:
        """Releases a holder, and takes its own blocks back."""
        holder = self.holders.pop(name)
        self._clock += 1
        for prefix in self._pinned(holder):
            self._last_used[prefix] = self._clock
        self.cache.release(name)
        self.free += holder.private

    def evict(self, num_blocks: int) -> None:
        """evict gives exactly what it can, unpinned leaves only, least recently used first."""
        expected = min(num_blocks, len(self._evictable()))
        evicted = self.cache.evict(num_blocks)
        assert len(evicted) == expected, f"evict({num_blocks}) gave {len(evicted)} blocks, not {expected}"
        self._forget(evicted, in_order=True)

    def reset(self) -> None:
        """reset gives back everything unpinned."""
        evictable = {self._cached[prefix] for prefix in self._evictable()}
        given = self.cache.reset()
        assert sorted(given) == sorted(evictable), f"reset gave {sorted(given)}, not {sorted(evictable)}"
        self._forget(given, in_order=False)

    def check(self) -> None:
        """Counts and owned blocks agree with the model."""
        self.cache.check_integrity()
        owned = frozenset(self._cached.values())
        assert self.cache.cached_block_ids() == owned, f"owns {self.cache.cached_block_ids()}, not {owned}"
        assert self.cache.num_blocks == len(owned), f"num_blocks is {self.cache.num_blocks}, not {len(owned)}"
        evictable = len(self._evictable())
        said = self.cache.num_evictable_blocks
        assert said == evictable, f"num_evictable_blocks is {said}, but {evictable} blocks are not pinned"

    def _longest(self, key: CacheKey, tokens: tuple[int, ...], limit: int) -> list[int]:
        found: list[int] = []
        for end in range(self.block_size, limit + 1, self.block_size):
            block_id = self._cached.get((key, tokens[:end]))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _parent(self, prefix: _Prefix) -> _Prefix:
        return (prefix[0], prefix[1][: -self.block_size])

    def _pinned(self, holder: _Holder) -> list[_Prefix]:
        ends = range(self.block_size, len(holder.tokens) + 1, self.block_size)
        prefixes = [(holder.key, holder.tokens[:end]) for end in ends]
        return [prefix for prefix in prefixes if prefix in self._cached]

    def _evictable(self) -> set[_Prefix]:
        pinned = {prefix for holder in self.holders.values() for prefix in self._pinned(holder)}
        return set(self._cached) - pinned

    def _forget(self, block_ids: Iterable[int], *, in_order: bool) -> None:
        by_id = {block_id: prefix for prefix, block_id in self._cached.items()}
        for block_id in block_ids:
            assert block_id in by_id, f"gave back block {block_id}, which it doesn't own"
            prefix = by_id.pop(block_id)
            evictable = self._evictable()
            assert prefix in evictable, f"gave back block {block_id}, which a holder pins"
            if in_order:
                parents = {self._parent(other) for other in self._cached}
                assert prefix not in parents, f"evicted block {block_id} before the blocks that follow it"
                oldest = min(self._last_used[leaf] for leaf in evictable - parents)
                assert self._last_used[prefix] == oldest, f"evicted block {block_id} before one used less recently"
            del self._cached[prefix], self._last_used[prefix]
            self.free.append(block_id)


def check_prefix_cache(
    factory: Callable[[int], PrefixCache], *, seeds: Iterable[int] = range(8), steps: int = 250
) -> None:
    """Works out caches built by factory(block_size). Raises AssertionError at the first disagreement."""
    for seed in seeds:
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4])
        workout = PrefixCacheWorkout(factory(block_size), block_size, num_blocks=rng.choice([6, 20, 60]))
        for step in range(steps):
            name = _random_operation(workout, rng, step)
            try:
                workout.check()
            except Exception as exc:
                raise AssertionError(f"seed {seed}, step {step}, after {name}: {exc}") from exc
        for holder in list(workout.holders):
            workout.release(holder)
        workout.reset()
        workout.check()
        assert workout.cache.num_blocks == 0, "blocks are left after all holders released and the cache was reset"


def _random_operation(workout: PrefixCacheWorkout, rng: random.Random, step: int) -> str:
    """One operation with two tokens and few keys, so that prefixes meet often."""
    key = CacheKey("model", rng.choice([None, "adapter"]), rng.choice([None, "salt"]))
    tokens = tuple(rng.choices([0, 1], weights=[5, 1], k=rng.randrange(1, 10 * workout.block_size)))
    operation = rng.choice(["start", "start", "grow", "grow", "grow", "release", "evict", "match", "reset"])
    if operation == "start" and len(workout.holders) < 6:
        workout.start(f"holder-{step}", key, tokens)
    elif operation == "grow" and workout.holders:
        workout.grow(rng.choice(sorted(workout.holders)), tokens[: rng.randrange(1, 2 * workout.block_size + 1)])
    elif operation == "release" and workout.holders:
        workout.release(rng.choice(sorted(workout.holders)))
    elif operation == "evict":
        workout.evict(rng.randrange(0, 6))
    elif operation == "match":
        workout.match(key, tokens)
        workout.cache.release("nobody")
    elif operation == "reset" and rng.random() < 0.2:
        workout.reset()
    return operation
