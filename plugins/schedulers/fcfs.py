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
        admitted = admissible(view, sorted(view.waiting, key=by_arrival)) if _has_room(view) else ()
        return propose([*decodes, *sorted(prefills, key=by_arrival), *admitted])

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        """The running request that arrived last, which may be the requester; None for a waiting one."""
        return last_not_before(view, request_id, by_arrival)


def _has_room(view: SchedulerView) -> bool:
    """Whether somebody who waits could start and stay."""
    if not view.waiting or len(view.running) >= view.max_num_seqs:
        return False
    # With no block to spare, a newcomer would only be preempted by those ahead of it, its prefill wasted.
    return not view.running or free_after_running(view) > 0
