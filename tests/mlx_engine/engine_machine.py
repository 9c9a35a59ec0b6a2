"""The state machine over whole engines: any policies, any sizes, requests that come, go and share prefixes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from mlx_engine.config import EngineConfig
from mlx_engine.errors import RequestError
from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.types import ScheduledRequest, SchedulerView
from plugins.simulator import reference_tokens
from tests.mlx_engine.workload import VOCAB, Client

SALTS = st.sampled_from([None, None, None, "a", "b"])
MEMORIES = [("paged", "radix"), ("paged", "hash_chain"), ("paged", "none"), ("contiguous", "none")]


class Garbage(SchedulerPolicy):
    """Proposes whatever comes to its mind, and often nothing."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schedule(self, view: SchedulerView) -> list[ScheduledRequest]:
        names = [r.request_id for r in (*view.running, *view.waiting)] + ["nobody"]
        count = self._rng.choice([0, 0, 1, 2, 8])
        return [ScheduledRequest(self._rng.choice(names), self._rng.choice([-3, 0, 1, 2, 10**9])) for _ in range(count)]

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        waiting = [r.request_id for r in view.waiting]
        running = [r.request_id for r in view.running]
        return self._rng.choice([None, None, "nobody", request_id, *waiting, *running])


class EngineMachine(RuleBasedStateMachine):
    """Each rule checks each answer (see Client); the end checks that all answers came and all blocks went back."""

    memories = MEMORIES
    schedulers = ("fcfs", "wave", "priority", "garbage")
    drafters = ("none", "oracle", "malicious", "ngram")

    @initialize(
        memory=st.sampled_from(range(4)),
        scheduler=st.sampled_from(range(4)),
        drafter=st.sampled_from(range(4)),
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        spare=st.integers(0, 10),
        chunk=st.none() | st.integers(1, 6),
        halving=st.none() | st.integers(1, 20),
        overlap=st.booleans(),
        seed=st.integers(0, 99),
    )
    def build(
        self,
        memory: int,
        scheduler: int,
        drafter: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare: int,
        chunk: int | None,
        halving: int | None,
        overlap: bool,
        seed: int,
    ) -> None:
        kv_manager, prefix_cache = self.memories[memory % len(self.memories)]
        name = self.schedulers[scheduler % len(self.schedulers)]
        # Slabs of half the pool, so that two requests can run.
        slab = {"slab_tokens": max(num_blocks // 2 * block_size, 2)} if kv_manager == "contiguous" else {}
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare,
            max_prefill_chunk=chunk,
            chunk_halving_context=halving,
            overlap=overlap,
            kv_manager=kv_manager,
            kv_manager_options=slab,
            prefix_cache=prefix_cache,
            scheduler="fcfs" if name == "garbage" else name,
        )
        policy = Garbage(seed) if name == "garbage" else None
        self.client = Client(config, policy, self.drafters[drafter % len(self.drafters)], seed)
        self.count = 0

    def _add(self, name: str, prompt: list[int], **options: Any) -> None:
        if len(prompt) < self.client.limit:
            self.client.add(name, prompt, **options)
            return
        with pytest.raises(RequestError):
            self.client.add(name, prompt, **options)
        self.client.seen.pop()

    @rule(
        family=st.integers(0, 2),
        blocks=st.integers(0, 6),
        edge=st.integers(-1, 1),
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        salt=SALTS,
        priority=st.integers(0, 2),
        stop=st.none() | st.integers(0, 8),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        family: int,
        blocks: int,
        edge: int,
        own: int,
        max_tokens: int,
        salt: str | None,
        priority: int,
        stop: int | None,
        ignore_eos: bool,
    ) -> None:
        """A prompt around a block's edge: a prefix of its family's, then tokens of its own."""
        self.count += 1
        length = max(blocks * self.client.config.block_size + edge, 1)
        shared = max(length - own, 0)
        prompt = [(31 * family + position) % VOCAB for position in range(shared)]
        prompt += [(self.count + position) % VOCAB for position in range(length - shared)]
        stop_ids: tuple[int, ...] = ()
        if stop is not None:
            stop_ids = (reference_tokens(prompt, stop + 1, VOCAB, salt or "")[stop],)
        self._add(
            f"r{self.count}",
            prompt,
            max_tokens=max_tokens,
            salt=salt,
            priority=priority,
            stop_token_ids=stop_ids,
            ignore_eos=ignore_eos,
        )

    @precondition(lambda self: self.client.done)
    @rule(data=st.data(), max_tokens=st.integers(1, 6), more=st.integers(0, 3))
    def continue_a_finished_one(self, data: st.DataObject, max_tokens: int, more: int) -> None:
        """The next turn of a conversation: its prompt is a whole earlier exchange, whose blocks are cached."""
        before = data.draw(st.sampled_from(self.client.done))
        self.count += 1
        prompt = [*before.request.prompt_token_ids, *before.tokens, *range(more)]
        self._add(f"r{self.count}", prompt, max_tokens=max_tokens, salt=before.request.cache_salt)

    @precondition(lambda self: self.client.engine.has_unfinished_requests())
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.client.step()

    @precondition(lambda self: self.client.open)
    @rule(data=st.data(), reuse=st.booleans())
    def abort(self, data: st.DataObject, reuse: bool) -> None:
        """The client leaves, and perhaps comes back at once under the same id, its old step still in flight."""
        name = data.draw(st.sampled_from(sorted(self.client.open)))
        salt = self.client.open[name].request.cache_salt
        self.client.abort(name)
        assert not self.client.engine.abort_request(name)
        if reuse:
            self._add(name, [11, 12, 13], max_tokens=4, salt=salt)

    @rule()
    def forget_the_cache(self) -> None:
        self.client.simulated.kv.reset_prefix_cache()

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.finish()


def run_engine_machine(
    *,
    max_examples: int,
    memories: list[tuple[str, str]] | None = None,
    schedulers: tuple[str, ...] = EngineMachine.schedulers,
    drafters: tuple[str, ...] = EngineMachine.drafters,
    shrink: bool = True,
) -> None:
    """Runs the machine over engines of these parts; the same examples each time."""
    parts = {"memories": memories or MEMORIES, "schedulers": schedulers, "drafters": drafters}
    machine = type("Machine", (EngineMachine,), parts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
