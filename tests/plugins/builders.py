"""Short ways to build policies and what they look at."""

from __future__ import annotations

from mlx_engine.interfaces import PrefixCache
from mlx_engine.types import RequestView, SchedulerView
from plugins.kv_managers.contiguous import ContiguousKVManager
from plugins.kv_managers.paged import PagedKVManager
from plugins.prefix_caches.none import NoPrefixCache


def paged(num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None) -> PagedKVManager:
    """A paged manager; without a prefix cache unless one is given."""
    cache = prefix_cache or NoPrefixCache(block_size=block_size)
    return PagedKVManager(
        num_blocks=num_blocks, block_size=block_size, prefix_cache=cache, max_model_len=num_blocks * block_size
    )


def contiguous(num_blocks: int, block_size: int, max_model_len: int) -> ContiguousKVManager:
    """A manager of slabs of max_model_len tokens."""
    return ContiguousKVManager(
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=NoPrefixCache(block_size=block_size),
        max_model_len=max_model_len,
    )


def request_view(
    request_id: str,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    prompt: int = 8,
    computed: int = 0,
    output: int = 0,
    max_tokens: int = 8,
    preemptions: int = 0,
) -> RequestView:
    """A request as a policy sees it."""
    return RequestView(
        request_id=request_id,
        arrival_time=arrival,
        priority=priority,
        num_prompt_tokens=prompt,
        num_tokens=prompt + output,
        num_computed_tokens=computed,
        num_output_tokens=output,
        max_tokens=max_tokens,
        num_preemptions=preemptions,
        last_scheduled_time=None,
    )


def decoding(request_id: str, *, arrival: float = 0.0, priority: int = 0, preemptions: int = 0) -> RequestView:
    """A running request past its prefill: 8 tokens computed of 9."""
    return request_view(
        request_id, arrival=arrival, priority=priority, prompt=8, computed=8, output=1, preemptions=preemptions
    )


def scheduler_view(
    *,
    waiting: tuple[RequestView, ...] = (),
    running: tuple[RequestView, ...] = (),
    max_num_seqs: int = 8,
    free: int = 100,
    num_blocks: int = 100,
    block_size: int = 4,
    now: float = 100.0,
) -> SchedulerView:
    """A view with room for everything unless said otherwise."""
    return SchedulerView(
        now=now,
        step=0,
        waiting=waiting,
        running=running,
        token_budget=64,
        max_num_seqs=max_num_seqs,
        num_free_blocks=free,
        num_blocks=num_blocks,
        block_size=block_size,
    )
