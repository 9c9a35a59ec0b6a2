"""Static batches: a wave is admitted when nothing runs, and nobody joins until all of it has finished.

The baseline that continuous batching is measured against: a short answer waits for the longest one of its wave, and
a request that just missed a wave waits for the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.types import RequestView, ScheduledRequest, SchedulerView, cdiv
from plugins.schedulers.base import by_arrival, last_not_before, propose, split_running


class WaveScheduler(SchedulerPolicy):
    """Runs waves of up to max_num_seqs requests, sized so that a wave fits the free blocks to its end."""

    interface_version: ClassVar[int] = 1

    def __init__(self) -> None:
        self._wave: set[str] = set()  # of the current wave, those that haven't finished

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        """Everyone of the wave: decodes, then prefills; a new wave when the last one has finished."""
        if not self._wave and not view.running:
            self._wave = {request.request_id for request in _next_wave(view)}
        decodes, prefills = split_running(view)
        # Members that wait haven't had their first chunk yet, or were preempted: they still belong to the wave.
        members = [request for request in view.waiting if request.request_id in self._wave]
        return propose([*decodes, *sorted(prefills, key=by_arrival), *sorted(members, key=by_arrival)])

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        """The running request that arrived last, which may be the requester; None for a waiting one."""
        return last_not_before(view, request_id, by_arrival)

    def on_request_finished(self, request: RequestView) -> None:
        """Takes it out of the wave. A view may leave out a request whose last token is in flight, so this counts."""
        self._wave.discard(request.request_id)


def _next_wave(view: SchedulerView) -> list[RequestView]:
    """The oldest requests that fit together when each grows to its max_tokens; at least one."""
    wave: list[RequestView] = []
    free = view.num_free_blocks
    for request in sorted(view.waiting, key=by_arrival)[: view.max_num_seqs]:
        free -= cdiv(request.num_prompt_tokens + request.max_tokens, view.block_size)
        if wave and free < 0:
            break
        wave.append(request)
    return wave
