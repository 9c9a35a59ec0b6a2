"""Conformance of a KVCacheManager: a shadow of the pool remembers what was written to each slot.

The shadow value of a slot is the key and all tokens up to it, since that is what its K/V depends on. So a block that
is handed out twice, evicted while in use, or shared between salts shows up as a slot with the wrong value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mlx_engine.interfaces import KVCacheManager
from mlx_engine.types import SCRATCH_BLOCK, CacheKey, KVCacheUsage, cdiv


@dataclass(slots=True)
class _Running:
    """One request as the model sees it."""

    key: CacheKey
    tokens: list[int]
    num_computed: int
    table: list[int] = field(default_factory=list)  # as it was after the last allocation

    def value(self, position: int) -> int:
        """What the slot of this position must hold."""
        return hash((self.key, tuple(self.tokens[: position + 1])))


class KVManagerWorkout:
    """Operations on a manager that check each answer; `check` compares the whole state."""

    def __init__(self, manager: KVCacheManager, num_blocks: int, block_size: int) -> None:
        self.manager = manager
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.running: dict[str, _Running] = {}
        self._shadow: dict[tuple[int, int], int] = {}  # (block, slot) -> value

    def start(self, name: str, key: CacheKey, tokens: list[int], num_new: int) -> bool:
        """Admits a request: looks its prefix up and allocates up to num_new tokens beyond it."""
        before = self._state()
        match = self.manager.get_computed_blocks(name, tokens, key)
        assert self._state() == before, "get_computed_blocks changed something"
        assert match.num_tokens == len(match.block_ids) * self.block_size, f"{match} isn't whole blocks"
        assert match.num_tokens < len(tokens), f"{match} leaves no token of {len(tokens)} to compute"
        request = _Running(key, list(tokens), match.num_tokens, list(match.block_ids))
        self._check_slots(name, request)
        end = min(match.num_tokens + num_new, len(tokens))
        if not self.manager.allocate_slots(name, end, match):
            assert self._state() == before, "a failed allocate_slots changed something"
            self._check_refusal(end, 0)
            return False
        assert list(self.manager.block_table(name))[: len(match.block_ids)] == list(match.block_ids), (
            f"the table of {name} doesn't start with its match {match.block_ids}"
        )
        self.running[name] = request
        self._check_table(name, end)
        self.compute(name, end)
        return True

    def append(self, name: str, tokens: list[int]) -> bool:
        """Appends tokens (sampled ones), allocates for all that the request has, and computes them."""
        request = self.running[name]
        request.tokens += tokens
        before = self._state()
        end = len(request.tokens)
        if not self.manager.allocate_slots(name, end):
            assert self._state() == before, "a failed allocate_slots changed something"
            self._check_refusal(end, len(request.table))
            del request.tokens[end - len(tokens) :]
            return False
        self._check_table(name, end)
        self.compute(name, end)
        return True

    def compute(self, name: str, end: int) -> None:
        """The forward pass: writes slots up to `end`, then offers the computed tokens to the cache."""
        request = self.running[name]
        for position in range(request.num_computed, end):
            slot = (request.table[position // self.block_size], position % self.block_size)
            self._shadow[slot] = request.value(position)
        request.num_computed = max(end, request.num_computed)
        self.manager.cache_blocks(name, request.tokens[: request.num_computed], request.key)
        now = list(self.manager.block_table(name))
        assert now[: len(request.table)] == request.table, f"cache_blocks changed the table of {name}"

    def free(self, name: str) -> None:
        """Ends or preempts a request."""
        self.running.pop(name, None)
        self.manager.free(name)

    def reset(self) -> None:
        """Forgets unused cached blocks: as many become free, and no other."""
        before = self.manager.usage()
        count = self.manager.reset_prefix_cache()
        after = self.manager.usage()
        assert count == before.evictable, f"reset_prefix_cache returned {count}, not {before.evictable}"
        assert after.free == before.free + count, "reset_prefix_cache lost blocks"
        assert after.evictable == 0, "evictable blocks are left after reset_prefix_cache"

    def check(self) -> None:
        """The books balance, and every running request's computed slots hold its own tokens."""
        self.manager.check_integrity()
        usage = self.manager.usage()
        _check_counts(usage, self.num_blocks, self.block_size, self.manager.num_free_blocks)
        for name, request in self.running.items():
            table = list(self.manager.block_table(name))
            assert table[: len(request.table)] == request.table, f"the table of {name} changed by itself"
            self._check_slots(name, request)
        if not self.running:
            assert usage.private == 0, f"{usage.private} blocks are private though nobody runs"
            assert usage.evictable == usage.cached, "cached blocks are pinned though nobody runs"

    def _state(self) -> tuple[KVCacheUsage, int]:
        return self.manager.usage(), self.manager.num_free_blocks

    def _check_table(self, name: str, num_tokens: int) -> None:
        request = self.running[name]
        table = list(self.manager.block_table(name))
        assert len(table) * self.block_size >= num_tokens, f"the table of {name} doesn't cover {num_tokens} tokens"
        assert len(set(table)) == len(table), f"the table of {name} has a block twice: {table}"
        assert all(SCRATCH_BLOCK < block_id <= self.num_blocks for block_id in table), f"{name} has {table}"
        assert table[: len(request.table)] == request.table, f"allocate_slots changed the head of {name}'s table"
        request.table = table

    def _check_slots(self, name: str, request: _Running) -> None:
        for position in range(request.num_computed):
            block_id, slot = request.table[position // self.block_size], position % self.block_size
            assert self._shadow.get((block_id, slot)) == request.value(position), (
                f"slot {slot} of block {block_id} doesn't hold token {position} of {name}"
            )

    def _check_refusal(self, num_tokens: int, num_held: int) -> None:
        """A refusal is right only if blocks were short. Matched blocks may be among the free: an upper bound."""
        free, most = self.manager.num_free_blocks, self.manager.max_tokens_per_request
        needed = cdiv(num_tokens, self.block_size) - num_held
        assert needed > free or num_tokens > most, f"refused {num_tokens} tokens with {free} blocks free"


def _check_counts(usage: KVCacheUsage, num_blocks: int, block_size: int, num_free: int) -> None:
    assert (usage.num_blocks, usage.block_size) == (num_blocks, block_size), f"wrong sizes in {usage}"
    assert usage.free + usage.private + usage.cached == num_blocks, f"the counts don't sum to {num_blocks}: {usage}"
    assert min(usage.free, usage.private, usage.cached, num_free) >= 0, f"negative count in {usage}"
    assert 0 <= usage.evictable <= usage.cached, f"more evictable than cached: {usage}"
    assert num_free <= usage.free + usage.evictable, f"num_free_blocks is {num_free}, but {usage}"
    assert 0 <= usage.internal_fragmentation <= 1, f"internal fragmentation out of range: {usage}"
    assert 0 <= usage.external_fragmentation <= 1, f"external fragmentation out of range: {usage}"


def check_kv_manager(
    factory: Callable[[int, int, int], KVCacheManager], *, seeds: Iterable[int] = range(8), steps: int = 200
) -> None:
    """Works out managers built by factory(num_blocks, block_size, max_model_len).

    Raises AssertionError at the first disagreement, or the IntegrityError that the manager raised.
    """
    for seed in seeds:
        rng = random.Random(seed)
        block_size, num_blocks = rng.choice([1, 2, 4]), rng.choice([6, 12, 30])
        longest = block_size * num_blocks // rng.choice([1, 2, 3])
        workout = KVManagerWorkout(factory(num_blocks, block_size, longest), num_blocks, block_size)
        admitted = 0
        for step in range(steps):
            admitted += _random_operation(workout, rng, step, longest)
            try:
                workout.check()
            except AssertionError as exc:
                raise AssertionError(f"seed {seed}, step {step}: {exc}") from exc
        for name in list(workout.running):
            workout.free(name)
        workout.reset()
        workout.check()
        assert workout.manager.usage().free == num_blocks, "blocks are lost after everything was freed and reset"
        assert admitted, "no request was ever admitted"


def _random_operation(workout: KVManagerWorkout, rng: random.Random, step: int, longest: int) -> bool:
    """One operation with two tokens and few salts, so that prefixes meet often. Whether it admitted a request."""
    operation = rng.choice(["start", "start", "append", "append", "append", "free", "reset"])
    if operation == "start" and len(workout.running) < 5:
        key = CacheKey("model", None, rng.choice([None, None, "salt"]))
        tokens = rng.choices([0, 1], weights=[6, 1], k=rng.randrange(1, longest + 1))
        return workout.start(f"request-{step}", key, tokens, rng.randrange(1, longest + 1))
    if operation == "append" and workout.running:
        name = rng.choice(sorted(workout.running))
        room = longest - len(workout.running[name].tokens)
        workout.append(name, rng.choices([0, 1], k=min(room, rng.choice([1, 1, 1, 2 * workout.block_size]))))
    elif operation == "free" and workout.running:
        workout.free(rng.choice([*sorted(workout.running), "nobody"]))
    elif operation == "reset" and rng.random() < 0.2:
        workout.reset()
    return False
