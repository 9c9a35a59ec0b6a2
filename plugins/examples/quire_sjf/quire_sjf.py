"""Shortest job first: the request with the fewest tokens left to compute and generate goes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.types import RequestView, ScheduledRequest, SchedulerView


class ShortestJobFirstScheduler(SchedulerPolicy):
    """Good for the mean waiting time; a long request may wait for as long as short ones keep coming.

    Option: prompt_weight, how much of a generated token a prompt token costs (prefill is cheaper than decoding).
    """

    interface_version: ClassVar[int] = 1

    def __init__(self, *, prompt_weight: float = 0.1) -> None:
        self._prompt_weight = prompt_weight

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        """Running decodes first, then everyone else by size; the Scheduler stops at max_num_seqs and the budget."""
        decodes = [request for request in view.running if request.is_decoding]
        others = [request for request in (*view.running, *view.waiting) if not request.is_decoding]
        order = [*decodes, *sorted(others, key=self._size)]
        return [ScheduledRequest(request.request_id, request.num_uncomputed_tokens) for request in order]

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        """A running requester takes the blocks of whoever arrived last; a waiting one waits.

        The order must not change while requests run, or two of them could preempt each other for ever: so it is
        that of arrival here, not of size.
        """
        if not view.is_running(request_id):
            return None
        return max(view.running, key=lambda request: (request.arrival_time, request.request_id)).request_id

    def _size(self, request: RequestView) -> tuple[float, float, str]:
        left = request.max_tokens - request.num_output_tokens
        cost = left + self._prompt_weight * request.num_uncomputed_tokens
        return (cost, request.arrival_time, request.request_id)
