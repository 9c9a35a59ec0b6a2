"""A request in progress, and its place in a step: the Scheduler's own records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.types import CacheKey, Request, RequestView, Row, SchedulerOutput


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request in progress. Owned by the Scheduler; nobody else keeps one."""

    request: Request
    key: CacheKey
    seed: int
    num_prompt_tokens: int
    max_total_tokens: int  # prompt and output together
    arrival_time: float
    token_ids: list[int]  # prompt and output known to the host
    # Sampled, but the value is still on the device: at most 1 when a step is scheduled, 2 until the step before
    # it has been waited for.
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0  # K/V in the pool, the step in flight included
    running: bool = False
    finished: bool = False
    epoch: int = 0  # counts preemptions: results of an older epoch fill no blocks
    num_cached_tokens: int | None = None  # at first admission
    num_overtakes: int = 0
    first_scheduled_time: float | None = None
    last_scheduled_time: float | None = None
    first_token_time: float | None = None
    view: RequestView | None = None  # cached while nothing changes

    @property
    def num_tokens(self) -> int:
        """Prompt and output, counting tokens whose value is still on the device."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output alone, counted in the same way."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_prompt_tokens

    @property
    def awaits_last_token(self) -> bool:
        """Whether the step in flight gives its last token: nothing more to schedule, only to wait."""
        pending = self.num_pending_tokens
        return pending > 0 and len(self.token_ids) + pending >= self.max_total_tokens

    def to_view(self) -> RequestView:
        """What policies see of it. Whoever changes the state sets `view` to None."""
        if self.view is None:
            request = self.request
            num_prompt_tokens = self.num_prompt_tokens
            num_tokens = len(self.token_ids) + self.num_pending_tokens
            self.view = RequestView(
                request_id=request.request_id,
                arrival_time=self.arrival_time,
                priority=request.priority,
                num_prompt_tokens=num_prompt_tokens,
                num_tokens=num_tokens,
                num_computed_tokens=self.num_computed_tokens,
                num_output_tokens=num_tokens - num_prompt_tokens,
                max_tokens=self.max_total_tokens - num_prompt_tokens,
                num_preemptions=self.epoch,
                last_scheduled_time=self.last_scheduled_time,
            )
        return self.view


class StepSlot(Row, frozen=True):
    """A sequence's place in a step: what is needed to apply the result later."""

    state: SequenceState
    epoch: int
    start: int
    num_tokens: int  # without drafts
    cost: int  # taken from the step's budget
    samples: bool
    draft_token_ids: Sequence[int] = ()  # guesses that the step checks


@dataclass(slots=True)
class Step:
    """A scheduled step and the bookkeeping that its result needs."""

    output: SchedulerOutput
    slots: tuple[StepSlot, ...]
    # How far its sequences come is known when it ends: nothing may be scheduled before.
    has_drafts: bool = False
