"""First come, first served: continuous batching with chunked prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.types import ScheduledRequest, SchedulerView
from plugins.schedulers.base import (
    admissible,
    by_arrival,
    free_after_running,
    last_not_before,
    propose,
    split_running,
)


class FCFSScheduler(SchedulerPolicy):
    """Decodes first, so that nobody's stream stops for a prompt; then prefill, oldest first; then admissions."""

    interface_version: ClassVar[int] = 1

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        """Running decodes, running prefills by arrival, and as many waiting requests as there are slots."""
        decodes, prefills = split_running(view)
        # With no block to spare, a newcomer would only be preempted by those ahead of it, its prefill wasted.
        has_room = not view.running or free_after_running(view) > 0
        waiting = sorted(view.waiting, key=by_arrival) if has_room else []
        return propose([*decodes, *sorted(prefills, key=by_arrival), *admissible(view, waiting)])

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        """The running request that arrived last, which may be the requester; None for a waiting one."""
        return last_not_before(view, request_id, by_arrival)
