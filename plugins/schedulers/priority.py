"""Priorities with ageing: lower numbers run sooner, and waiting counts for as much as priority in the end.

A request's effective priority is `priority - waited / ageing_seconds`, with waited = now - arrival. Two requests age
at the same rate, so their order is that of `arrival + priority * ageing_seconds`, which never changes: only the
finitely many requests that come before that moment can ever pass it, so nobody starves and no two requests can
preempt each other in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.types import RequestView, ScheduledRequest, SchedulerView
from plugins.schedulers.base import (
    admissible,
    held_blocks,
    last_not_before,
    missing_blocks,
    propose,
    split_running,
)


class PriorityScheduler(SchedulerPolicy):
    """Decodes first; then prefills and admissions by effective priority.

    Options:
        ageing_seconds: waiting this long is worth one step of priority.
        max_preemptions: a request preempted this often gives way to waiting ones no more (running ones that come
            before it still may take its blocks, or they could not go on).
    """

    interface_version: ClassVar[int] = 1

    def __init__(self, *, ageing_seconds: float = 30.0, max_preemptions: int = 3) -> None:
        if not 0 < ageing_seconds < math.inf:
            raise ValueError(f"ageing_seconds must be positive and finite, not {ageing_seconds}")
        if max_preemptions < 0:
            raise ValueError(f"max_preemptions must not be negative, but is {max_preemptions}")
        self._ageing_seconds = ageing_seconds
        self._max_preemptions = max_preemptions

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        """Running decodes, then running prefills and waiting requests merged by effective priority."""
        decodes, prefills = split_running(view)
        waiting = admissible(view, sorted(view.waiting, key=self._key))
        return propose([*sorted(decodes, key=self._key), *sorted([*prefills, *waiting], key=self._key)])

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        """The running request that comes last; for a waiting requester only if that makes room and is fair."""
        if view.is_running(request_id):
            return last_not_before(view, request_id, self._key)
        requester = view.get(request_id)
        if requester is None:
            return None
        candidates = [request for request in view.running if self._may_preempt(requester, request)]
        room = view.num_free_blocks + sum(held_blocks(view, request) for request in candidates)
        # Preempting somebody without getting in would waste the victim's work, each step again.
        if not candidates or room < missing_blocks(view, requester):
            return None
        return max(candidates, key=self._key).request_id

    def _key(self, request: RequestView) -> tuple[float, float, str]:
        virtual_arrival = request.arrival_time + request.priority * self._ageing_seconds
        return (virtual_arrival, request.arrival_time, request.request_id)

    def _may_preempt(self, waiting: RequestView, running: RequestView) -> bool:
        """Whether a waiting request may take the place of a running one: worse as given, worse aged, spared so far."""
        return (
            running.priority > waiting.priority
            and self._key(running) > self._key(waiting)
            and running.num_preemptions < self._max_preemptions
        )
