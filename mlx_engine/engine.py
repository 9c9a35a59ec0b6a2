"""The engine loop: schedule, run, apply. One thread calls all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_engine.errors import RequestError
from mlx_engine.interfaces import ModelRunner, StepHandle
from mlx_engine.scheduler import Scheduler
from mlx_engine.sequence import Step
from mlx_engine.types import EngineInfo, EngineStats, Request, RequestOutput


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: Step
    handle: StepHandle


class Engine:
    """Serves requests step by step.

    With `overlap`, the next step is scheduled and built while the one before runs; its decode tokens come from the
    device. Stop conditions are then seen one step late, and the extra token is dropped. A step with drafts ends first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        info: EngineInfo,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._clock = clock
        self._in_flight: _InFlight | None = None

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises RequestError when it can never be served, or its id is in use."""
        if request.request_id in self._scheduler:
            raise RequestError(f"A request with the id {request.request_id} is already being served.")
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError("The prompt is empty; give at least one token.", param="prompt")
        limit = self._scheduler.max_total_tokens
        if num_prompt >= limit:
            what = "the model's context length" if limit == self.info.max_model_len else "what the KV pool can hold"
            raise RequestError(
                f"The prompt has {num_prompt} tokens, but {what} is {limit} tokens, prompt and output together. "
                "Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        # One pass in C; a bad id would read outside the embedding table.
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self.info.vocab_size:
            raise RequestError(
                f"Token ids must lie between 0 and {self.info.vocab_size - 1}, the model's vocabulary.", param="prompt"
            )
        self._scheduler.add_request(request, self._clock())

    def abort_request(self, request_id: str) -> bool:
        """Ends a request and frees its blocks at once; False if it is unknown or has ended."""
        return self._scheduler.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything to do."""
        return self._scheduler.has_unfinished_requests() or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Moves every scheduled request on by one step; returns what became known."""
        before, self._in_flight = self._in_flight, None
        outputs: list[RequestOutput] = []
        if before is not None and before.step.has_drafts:
            outputs = self._scheduler.update_from_output(before.step, before.handle.wait(), self._clock())
            before = None
        step = self._scheduler.schedule(self._clock(), must_progress=before is None)
        after = None
        if step is not None:
            after = _InFlight(step, self._runner.execute_model(step.output))
        result = before.handle.wait() if before is not None else None
        if after is not None:
            after.handle.launch()  # before the host's own work, so that the device does not wait for it
            self._in_flight = after
        if before is not None and result is not None:
            outputs += self._scheduler.update_from_output(before.step, result, self._clock())
        if not self._overlap and after is not None:
            self._in_flight = None
            outputs += self._scheduler.update_from_output(after.step, after.handle.wait(), self._clock())
        return outputs

    def stats(self) -> EngineStats:
        """The figures of this moment."""
        return self._scheduler.stats(self._runner.dispatch_counts())

    def check_idle(self) -> None:
        """Raises IntegrityError if the KV memory's books don't balance. Cheap enough to run when idle."""
        self._scheduler.check_integrity()
