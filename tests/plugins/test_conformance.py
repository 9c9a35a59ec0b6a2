"""Every built-in passes the kit, and the kit fails schedulers that misbehave (see test_seeded_faults for the rest)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_engine.interfaces import Drafter, KVCacheManager, SchedulerPolicy
from mlx_engine.types import RequestView, ScheduledRequest, SchedulerView
from plugins.conformance import check_drafter, check_kv_manager, check_prefix_cache, check_scheduler
from plugins.drafters.ngram import NgramDrafter
from plugins.registry import DRAFTERS, KV_MANAGERS, PREFIX_CACHES, SCHEDULERS, create, installed
from plugins.schedulers.fcfs import FCFSScheduler


def names(group: str) -> list[str]:
    """The built-ins of a group."""
    return [policy.name for policy in installed(group) if policy.distribution == "mlx-quire"]


@pytest.mark.parametrize("name", names(SCHEDULERS))
def test_builtin_scheduler_conforms(name: str) -> None:
    check_scheduler(lambda: create(SCHEDULERS, name, kwargs={}, options={}))


@pytest.mark.parametrize("name", names(PREFIX_CACHES))
def test_builtin_prefix_cache_conforms(name: str) -> None:
    check_prefix_cache(lambda block_size: create(PREFIX_CACHES, name, kwargs={"block_size": block_size}, options={}))


@pytest.mark.parametrize(
    ("manager", "cache"), [("paged", "radix"), ("paged", "hash_chain"), ("paged", "none"), ("contiguous", "none")]
)
def test_builtin_kv_manager_conforms(manager: str, cache: str) -> None:
    def build(num_blocks: int, block_size: int, max_model_len: int) -> KVCacheManager:
        prefix_cache = create(PREFIX_CACHES, cache, kwargs={"block_size": block_size}, options={})
        kwargs: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "prefix_cache": prefix_cache,
            "max_model_len": max_model_len,
        }
        built: KVCacheManager = create(KV_MANAGERS, manager, kwargs=kwargs, options={})
        return built

    check_kv_manager(build)


@pytest.mark.parametrize("name", names(DRAFTERS))
def test_builtin_drafter_conforms(name: str) -> None:
    check_drafter(lambda: create(DRAFTERS, name, kwargs={}, options={}))


class TooMany(NgramDrafter):
    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        return super().propose(request_id, token_ids, max_tokens + 1, num_pending)


class Unheard(NgramDrafter):
    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        return [len(token_ids)]


class Iterates(NgramDrafter):
    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Any:
        return iter(super().propose(request_id, token_ids, max_tokens, num_pending))


class Strings(NgramDrafter):
    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Any:
        return "1"


class Changes(NgramDrafter):
    def propose(self, request_id: str, token_ids: Any, max_tokens: int, num_pending: int) -> Sequence[int]:
        token_ids[-1] = 0 if token_ids[-1] else 1
        return []


class Dice(Drafter):
    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        return [random.SystemRandom().randrange(4)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (TooMany, "tokens when asked for"),
        (Unheard, "for a vocabulary of 4"),
        (Iterates, "not a sequence"),
        (Strings, "'1', which is no token id"),
        (Changes, "changed the token ids"),
        (Dice, "two runs with the same requests differ"),
    ],
)
def test_a_misbehaving_drafter_fails(broken: type[Drafter], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_drafter(broken)


class UnknownRequest(FCFSScheduler):
    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        return [*super().schedule(view), ScheduledRequest("nobody", 1)]


class Repeats(FCFSScheduler):
    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        return [*super().schedule(view), *super().schedule(view)]


class NoTokens(FCFSScheduler):
    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        return [ScheduledRequest(request.request_id, 0) for request in view.running] + list(super().schedule(view))


class Generator(FCFSScheduler):
    def schedule(self, view: SchedulerView) -> Any:
        return iter(super().schedule(view))


class WaitingVictim(FCFSScheduler):
    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        return view.waiting[-1].request_id if view.waiting else None


class IdlesAfterTheFirst(FCFSScheduler):
    """Starts nobody new once a request has finished."""

    def __init__(self) -> None:
        self.done = False

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        return [p for p in super().schedule(view) if not self.done or view.is_running(p.request_id)]

    def on_request_finished(self, request: RequestView) -> None:
        self.done = True


class PingPong(FCFSScheduler):
    """A waiting request always takes the place of the oldest running one."""

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        return view.running[0].request_id if view.running else None


class NeverPreempts(FCFSScheduler):
    """Requests that all want another block wait for each other."""

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        return None


class Random(FCFSScheduler):
    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        proposals = list(super().schedule(view))
        random.SystemRandom().shuffle(proposals)
        return proposals


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (UnknownRequest, "'nobody' twice, or it isn't there"),
        (Repeats, "twice"),
        (NoTokens, "proposed 0 tokens"),
        (Generator, "not a sequence"),
        (WaitingVictim, "which isn't running"),
        (IdlesAfterTheFirst, "nothing ran in"),
        (PingPong, "preempted"),
        (NeverPreempts, "nothing ran in"),
        (Random, "two runs with the same requests differ"),
    ],
)
def test_a_misbehaving_scheduler_fails(broken: type[SchedulerPolicy], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_scheduler(broken)
