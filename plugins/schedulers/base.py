"""What the built-in schedulers share: block estimates, a total order by age, and who goes when blocks are short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mlx_engine.types import RequestView, ScheduledRequest, SchedulerView, cdiv

# Every policy orders requests by a key that never changes while the request lives. The first in that order is
# never preempted, so it finishes; then the next is first: no livelock, whatever the pool's size.
Key = Callable[[RequestView], tuple[Any, ...]]


def by_arrival(request: RequestView) -> tuple[float, str]:
    """Oldest first; ties by id, so that the order is total."""
    return (request.arrival_time, request.request_id)


def propose(requests: Iterable[RequestView]) -> list[ScheduledRequest]:
    """All that is left of each request, in order; the Scheduler cuts to budget and chunk."""
    return [
        ScheduledRequest(request.request_id, num_tokens)
        for request in requests
        if (num_tokens := request.num_uncomputed_tokens) > 0
    ]


def split_running(view: SchedulerView) -> tuple[list[RequestView], list[RequestView]]:
    """The running requests that decode, and those still in prefill, each in order of admission."""
    decodes: list[RequestView] = []
    prefills: list[RequestView] = []
    for request in view.running:
        (decodes if request.is_decoding else prefills).append(request)
    return decodes, prefills


def missing_blocks(view: SchedulerView, request: RequestView) -> int:
    """Blocks that the request's known tokens still need. An upper bound: a prefix match would lower it."""
    return cdiv(request.num_tokens, view.block_size) - cdiv(request.num_computed_tokens, view.block_size)


def held_blocks(view: SchedulerView, request: RequestView) -> int:
    """Blocks that a running request holds, about: the table may be ahead of what is computed."""
    return cdiv(request.num_computed_tokens, view.block_size)


def free_after_running(view: SchedulerView) -> int:
    """Free blocks beyond those that the running requests need for their known tokens; may be negative."""
    return view.num_free_blocks - sum(missing_blocks(view, request) for request in view.running)


def admissible(view: SchedulerView, waiting: Sequence[RequestView]) -> Iterator[RequestView]:
    """The waiting requests to propose, in the order given, for the slots that are free.

    The first is always proposed; those behind it if they fit into the blocks that are left. So small requests use the
    gap that a large one in front of them can't, and it is the Scheduler that bounds how often one is overtaken.
    """
    slots = view.max_num_seqs - len(view.running)
    if slots <= 0 or not waiting:
        return
    free = free_after_running(view)
    for index, request in enumerate(waiting):
        if slots <= 0:
            return
        missing = missing_blocks(view, request)
        if missing <= free:
            free -= missing
        elif index > 0:
            continue
        slots -= 1
        yield request


def last_not_before(view: SchedulerView, request_id: str, key: Key) -> str | None:
    """The victim that lets a running request grow: the last in order, never one ahead of it, maybe itself.

    None if the request isn't running: whoever waits goes on waiting.
    """
    requester = next((request for request in view.running if request.request_id == request_id), None)
    if requester is None:
        return None
    return max(view.running, key=key).request_id
