"""Hypothesis state machines over KV managers; the seeded-fault tests run the same ones over broken managers."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_engine.interfaces import KVCacheManager
from mlx_engine.types import CacheKey
from plugins.conformance import KVManagerWorkout

# (num_blocks, block_size, max_model_len) -> manager
Factory = Callable[[int, int, int], KVCacheManager]

_KEYS = st.sampled_from([CacheKey("model"), CacheKey("model", None, "salt"), CacheKey("model", "adapter", None)])


class KVMachine(RuleBasedStateMachine):
    """Random requests in a tiny pool. Tokens are mostly zeros, so that prefixes meet."""

    factory: Factory

    @initialize(num_blocks=st.integers(2, 10), block_size=st.integers(1, 3))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.longest = num_blocks * block_size // 2 + 1
        manager = type(self).factory(num_blocks, block_size, self.longest)
        self.workout = KVManagerWorkout(manager, num_blocks, block_size)
        self.count = 0

    @rule(key=_KEYS, length=st.integers(1, 16), ones=st.sets(st.integers(0, 15), max_size=2), chunk=st.integers(1, 16))
    def start(self, key: CacheKey, length: int, ones: set[int], chunk: int) -> None:
        self.count += 1
        tokens = [int(position in ones) for position in range(min(length, self.longest))]
        self.workout.start(f"request-{self.count}", key, tokens, chunk)

    @precondition(lambda self: self.workout.running)
    @rule(data=st.data(), length=st.integers(1, 4), token=st.integers(0, 1))
    def append(self, data: st.DataObject, length: int, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.workout.running)))
        room = self.longest - len(self.workout.running[name].tokens)
        self.workout.append(name, [token] * min(length, room))

    @precondition(lambda self: self.workout.running)
    @rule(data=st.data(), again=st.booleans())
    def free(self, data: st.DataObject, again: bool) -> None:
        """Ends a request, or preempts it: then it starts over with the tokens that it has."""
        name = data.draw(st.sampled_from(sorted(self.workout.running)))
        request = self.workout.running[name]
        self.workout.free(name)
        if again:
            self.workout.start(name, request.key, request.tokens, len(request.tokens))

    @rule()
    def reset(self) -> None:
        self.workout.reset()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "workout"):
            self.workout.check()

    def teardown(self) -> None:
        if hasattr(self, "workout"):
            for name in list(self.workout.running):
                self.workout.free(name)
            self.workout.reset()
            self.workout.check()


def run_kv_machine(factory: Factory, *, max_examples: int = 250, shrink: bool = True) -> None:
    """Runs the machine over a factory's managers; the same examples each time."""
    machine = type("Machine", (KVMachine,), {"factory": staticmethod(factory)})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
