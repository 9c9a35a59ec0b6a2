"""The Scheduler: turns a policy's proposals into a step, and a step's results into finished requests.

Policies propose over frozen views; this class disposes. It clamps proposals to the budget and to what each request
needs, gets blocks from the KVCacheManager, asks the policy for victims when they run out, and drops what makes no
sense, so that a bad policy is slow but never corrupting.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlx_engine.drafts import DraftSource
from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import KVCacheManager, SchedulerPolicy
from mlx_engine.sequence import SequenceState, Step, StepSlot
from mlx_engine.types import (
    CacheKey,
    EngineStats,
    FinishReason,
    ModelRunnerOutput,
    PrefixMatch,
    Request,
    RequestOutput,
    ScheduledRequest,
    ScheduledSequence,
    SchedulerOutput,
    SchedulerView,
)

logger = logging.getLogger(__name__)

# A waiting request that can't get its blocks may be overtaken by this many admissions of later proposals; after
# that nobody is admitted before it. Small requests use the gaps, and large ones don't starve.
MAX_OVERTAKES = 32
# A request that was preempted this often keeps its blocks: a policy whose victims take each other's place in turn would
# otherwise compute for ever and never sample a token.
MAX_PREEMPTIONS = 64
# A prefill token costs no more than this many at the start of a prompt: in shorter chunks a step's fixed work would
# outweigh what they save.
MAX_TOKEN_COST = 8.0


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    wasted_tokens: int = 0
    rejected_proposals: int = 0
    stalled_steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(slots=True)
class _Plan:
    """The step being put together."""

    budget: int  # in tokens at the start of a prompt
    slots: dict[str, StepSlot] = field(default_factory=dict)
    blocked: SequenceState | None = None  # the first waiting request that got no blocks in this step
    num_drafts: int = 0


class Scheduler:
    """Owns every request from arrival to end, and decides each step."""

    def __init__(
        self,
        policy: SchedulerPolicy,
        kv: KVCacheManager,
        *,
        model_name: str,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_chunk: int | None = None,
        chunk_halving_context: int | None = None,
        drafts: DraftSource | None = None,
        seed: int = 0,
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._model_name = model_name
        self._eos = eos_token_ids
        self._max_total = min(max_model_len, kv.max_tokens_per_request)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._chunk = max_prefill_chunk or max_num_batched_tokens
        self._halving_context = chunk_halving_context
        self._drafts = drafts
        self._random = random.Random(seed)
        self._states: dict[str, SequenceState] = {}
        self._running: dict[str, SequenceState] = {}
        self._waiting: dict[str, SequenceState] = {}
        self._counters = _Counters()

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def max_total_tokens(self) -> int:
        """Tokens, prompt and output together, that one request may reach."""
        return self._max_total

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add_request(self, request: Request, now: float) -> None:
        """Queues a request that fits: its prompt leaves room for one token, and its id is new."""
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        self._states[request.request_id] = self._waiting[request.request_id] = SequenceState(
            request=request,
            key=CacheKey(self._model_name, None, request.cache_salt),
            seed=sampling.seed if sampling.seed is not None else self._random.getrandbits(63),
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=min(num_prompt_tokens + sampling.max_tokens, self._max_total),
            arrival_time=request.arrival_time if request.arrival_time is not None else now,
            token_ids=list(request.prompt_token_ids),
        )

    def abort_request(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks; False if there is none of that id."""
        state = self._states.get(request_id)
        if state is None:
            return False
        self._finish(state)
        self._counters.aborted += 1
        return True

    # -- the step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float, *, must_progress: bool = True) -> Step | None:
        """Decides the next step, or None when nothing can run now.

        Not called while a step with drafts is in flight.

        `must_progress` says that no step is in flight: if the policy then starts nothing, its proposals are replaced
        by arrival order, and blocks are taken from the last admitted, so that no policy can hang the engine. Raises
        IntegrityError if even that starts nothing: the KV manager can't hold a request that it said would fit.
        """
        view = self._view(now)
        if not view.running and not view.waiting:
            return None
        plan = self._fill(self._policy.schedule(view) or (), now)
        if not plan.slots and must_progress:
            plan = self._fill_stalled(now)
        if not plan.slots:
            return None
        self._counters.steps += 1
        if self._drafts is not None:
            self._add_drafts(plan, self._drafts)
        return self._commit(plan, now)

    def _fill_stalled(self, now: float) -> _Plan:
        self._counters.stalled_steps += 1
        logger.warning("the scheduler policy moved no request although none is in flight; using arrival order")
        while True:
            view = self._view(now)
            plan = self._fill(
                [ScheduledRequest(r.request_id, r.num_tokens) for r in (*view.running, *view.waiting)], now
            )
            if plan.slots:
                return plan
            if not self._running:
                raise IntegrityError(
                    f"no request can start in an empty pool of {self._num_blocks} blocks: the KV manager refuses "
                    "an allocation within its own max_tokens_per_request"
                )
            self._preempt(next(reversed(self._running.values())), plan)

    def _view(self, now: float) -> SchedulerView:
        return SchedulerView(
            now=now,
            step=self._counters.steps,
            waiting=tuple([s.to_view() for s in self._waiting.values()]),
            running=tuple([s.to_view() for s in self._running.values() if not s.awaits_last_token]),
            token_budget=self._budget,
            max_num_seqs=self._max_num_seqs,
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )

    def _fill(self, proposals: Sequence[ScheduledRequest], now: float) -> _Plan:
        plan = _Plan(self._budget)
        states = self._states
        seen: set[SequenceState] = set()
        for proposal in proposals:
            if plan.budget == 0:
                break
            is_proposal = isinstance(proposal, ScheduledRequest) and isinstance(proposal.num_tokens, int)
            state = states.get(proposal.request_id) if is_proposal else None
            if state is None or state in seen or proposal.num_tokens < 1:
                self._counters.rejected_proposals += 1
                continue
            seen.add(state)
            # Preempted while its token is on the device: it can come back once the host knows the token.
            if state.awaits_last_token or (not state.running and state.num_pending_tokens):
                continue
            if not state.running and not self._admit(state, plan, now):
                continue
            self._take(state, proposal.num_tokens, plan, now)
        return plan

    def _admit(self, state: SequenceState, plan: _Plan, now: float) -> bool:
        """Gives a waiting request its blocks, enough for all tokens it has so far. False: it stays waiting."""
        if len(self._running) >= self._max_num_seqs:
            return False
        if plan.blocked is not None and plan.blocked.num_overtakes >= MAX_OVERTAKES:
            return False
        request_id = state.request.request_id
        # Matched again after each preemption: a victim's own blocks may have been evicted for this allocation.
        while True:
            match = self._kv.get_computed_blocks(request_id, state.token_ids, state.key)
            if self._kv.allocate_slots(request_id, state.num_tokens, match):
                break
            if not self._preempt_for(request_id, plan, now):
                if plan.blocked is None:
                    plan.blocked = state
                return False
        if plan.blocked is not None:
            plan.blocked.num_overtakes += 1
        self._start(state, match)
        return True

    def _start(self, state: SequenceState, match: PrefixMatch) -> None:
        request_id = state.request.request_id
        del self._waiting[request_id]
        self._running[request_id] = state
        state.running = True
        state.view = None
        state.num_computed_tokens = match.num_tokens
        if state.num_cached_tokens is None:
            state.num_cached_tokens = match.num_tokens
            self._counters.prompt_tokens += state.num_prompt_tokens
            self._counters.prefix_hit_tokens += match.num_tokens

    def _take(self, state: SequenceState, wanted: int, plan: _Plan, now: float) -> None:
        """Puts a running request into the step, if blocks can be had for it."""
        request_id = state.request.request_id
        start = state.num_computed_tokens
        total = state.num_tokens
        num_tokens, cost = 1, 1.0  # a decode row
        if total - start > 1:
            cost = self._token_cost(start)
            num_tokens = min(wanted, total - start, max(1, int(min(plan.budget, self._chunk) / cost)))
        end = start + num_tokens
        while not self._kv.allocate_slots(request_id, end):
            if not self._preempt_for(request_id, plan, now) or not state.running:
                return
        # A lone token may cost more than is left.
        charged = min(math.ceil(num_tokens * cost), plan.budget) if cost > 1.0 else num_tokens
        plan.slots[request_id] = StepSlot(state, state.epoch, start, num_tokens, charged, samples=end == total)
        plan.budget -= charged

    def _token_cost(self, context: int) -> float:
        """What a prefill token costs after so many others, in tokens at the start of a prompt.

        Attention over the context adds to a token's fixed work. Without this a chunk late in a long prompt would take
        several times as long as its first, and so would every other request's step.
        """
        if self._halving_context is None:
            return 1.0
        return min(1.0 + context / self._halving_context, MAX_TOKEN_COST)

    def _preempt_for(self, request_id: str, plan: _Plan, now: float) -> bool:
        """Lets the policy name a victim, and preempts it. False: nobody is to make room."""
        victim_id = self._policy.select_victim(self._view(now), request_id)
        if victim_id is None:
            return False
        victim = self._running.get(victim_id)
        if victim is None or victim.awaits_last_token:
            self._counters.rejected_proposals += 1
            return False
        if victim.epoch >= MAX_PREEMPTIONS and victim_id != request_id:
            return False
        self._preempt(victim, plan)
        return True

    def _preempt(self, victim: SequenceState, plan: _Plan) -> None:
        """Takes a running request's blocks and puts it at the head of the queue, to be computed again."""
        victim_id = victim.request.request_id
        slot = plan.slots.pop(victim_id, None)
        if slot is not None:
            plan.budget += slot.cost
        self._kv.free(victim_id)
        del self._running[victim_id]
        victim.running = False
        victim.num_computed_tokens = 0
        victim.epoch += 1
        victim.view = None
        self._waiting = {victim_id: victim, **self._waiting}
        self._counters.preemptions += 1

    def _add_drafts(self, plan: _Plan, source: DraftSource) -> None:
        """Lets greedy requests that decode check guesses, out of what all others left of the budget and the blocks."""
        for request_id, slot in plan.slots.items():
            state = slot.state
            room = min(plan.budget, state.max_total_tokens - state.num_tokens - 1)
            if self._waiting:
                # They need the free blocks more than a guess does.
                held = len(self._kv.block_table(request_id)) * self._block_size
                room = min(room, held - slot.start - 1)
            if room < 1 or slot.num_tokens > 1 or not slot.samples or not state.request.sampling.is_greedy:
                continue
            drafts = source.drafts(state, room)
            if not drafts or not self._kv.allocate_slots(request_id, slot.start + 1 + len(drafts)):
                continue
            plan.slots[request_id] = StepSlot(
                state, slot.epoch, slot.start, slot.num_tokens, slot.cost, slot.samples, drafts
            )
            plan.budget -= len(drafts)
            plan.num_drafts += len(drafts)
        self._counters.draft_tokens += plan.num_drafts

    def _commit(self, plan: _Plan, now: float) -> Step:
        sequences = []
        for request_id, slot in plan.slots.items():
            state, start, samples = slot.state, slot.start, slot.samples
            token_ids = state.token_ids
            end = start + slot.num_tokens
            sequences.append(
                ScheduledSequence(
                    request_id=request_id,
                    start=start,
                    num_tokens=slot.num_tokens,
                    token_ids=token_ids[start:end] if start < len(token_ids) else (),
                    block_table=self._kv.block_table(request_id),
                    samples=samples,
                    num_output_tokens=state.num_output_tokens,
                    sampling=state.request.sampling,
                    seed=state.seed,
                    draft_token_ids=slot.draft_token_ids,
                )
            )
            if end <= state.num_prompt_tokens:
                self._counters.prefill_tokens += slot.num_tokens
            state.num_computed_tokens = end
            state.num_pending_tokens += samples
            state.last_scheduled_time = now
            if state.first_scheduled_time is None:
                state.first_scheduled_time = now
            state.view = None
        output = SchedulerOutput(self._counters.steps, tuple(sequences))
        return Step(output, tuple(plan.slots.values()), has_drafts=plan.num_drafts > 0)

    # -- results ---------------------------------------------------------------------------------------------------

    def update_from_output(self, step: Step, result: ModelRunnerOutput, now: float) -> list[RequestOutput]:
        """Applies a step's samples: appends tokens, caches whole blocks, ends what is done."""
        outputs = []
        for slot in step.slots:
            state = slot.state
            if state.finished:  # ended or aborted after the step was built: its sample is dropped
                self._counters.wasted_tokens += slot.samples
                continue
            if slot.samples:
                outputs.append(self._append(slot, result, now))
            else:
                self._cache(slot)
        self._counters.generation_tokens += len(outputs)
        return outputs

    def _append(self, slot: StepSlot, result: ModelRunnerOutput, now: float) -> RequestOutput:
        state = slot.state
        request_id = state.request.request_id
        token = result.sampled_token_ids[request_id]
        state.token_ids.append(token)
        reason = self._end_reason(state, token)
        new_token_ids: tuple[int, ...] = (token,)
        if slot.draft_token_ids and reason is None:
            more, reason = self._accept(slot, result.after_drafts[request_id])
            new_token_ids += more
        state.num_pending_tokens -= 1
        state.view = None
        if state.first_token_time is None:
            state.first_token_time = now
        self._cache(slot, len(new_token_ids) - 1)
        if reason is not None:
            self._finish(state)
            self._counters.finished += 1
        return RequestOutput(
            request_id=request_id,
            new_token_ids=new_token_ids[:-1] if reason is FinishReason.STOP else new_token_ids,
            finish_reason=reason,
            num_prompt_tokens=state.num_prompt_tokens,
            num_cached_tokens=state.num_cached_tokens or 0,
            num_output_tokens=len(state.token_ids) - state.num_prompt_tokens,
            arrival_time=state.arrival_time,
            first_scheduled_time=state.first_scheduled_time,
            first_token_time=state.first_token_time,
            num_preemptions=state.epoch,
        )

    def _accept(self, slot: StepSlot, after_drafts: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends what the model gave after each draft, up to the first that was wrong or the request's end."""
        state = slot.state
        num_before = len(state.token_ids)
        reason = None
        for draft, token in zip(slot.draft_token_ids, after_drafts, strict=True):
            if draft != state.token_ids[-1] or reason is not None:
                break
            state.token_ids.append(token)
            reason = self._end_reason(state, token)
        tokens = tuple(state.token_ids[num_before:])
        self._counters.generation_tokens += len(tokens)
        self._counters.accepted_draft_tokens += len(tokens)
        if slot.epoch == state.epoch:
            state.num_computed_tokens += len(tokens)
        return tokens, reason

    def _end_reason(self, state: SequenceState, token: int) -> FinishReason | None:
        """Why a request ends with this token, its latest; None if it goes on."""
        sampling = state.request.sampling
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(state.token_ids) >= state.max_total_tokens else None

    def _cache(self, slot: StepSlot, num_accepted: int = 0) -> None:
        state = slot.state
        num_tokens = slot.num_tokens + num_accepted
        fills_block = slot.start % self._block_size + num_tokens >= self._block_size
        if slot.epoch == state.epoch and fills_block:
            end = slot.start + num_tokens
            self._kv.cache_blocks(state.request.request_id, state.token_ids[:end], state.key)

    def _finish(self, state: SequenceState) -> None:
        request_id = state.request.request_id
        view = state.to_view()
        state.finished = True
        del self._states[request_id]
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)
        self._kv.free(request_id)
        self._policy.on_request_finished(view)
        if self._drafts is not None:
            self._drafts.forget(request_id)

    # -- figures ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError if the KV memory's books don't balance."""
        self._kv.check_integrity()

    def stats(self, dispatch: Mapping[str, int]) -> EngineStats:
        """The figures of this moment."""
        c = self._counters
        return EngineStats(
            steps=c.steps,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv=self._kv.usage(),
            num_preemptions=c.preemptions,
            num_finished=c.finished,
            num_aborted=c.aborted,
            prompt_tokens=c.prompt_tokens,
            prefix_hit_tokens=c.prefix_hit_tokens,
            prefill_tokens=c.prefill_tokens,
            generation_tokens=c.generation_tokens,
            wasted_tokens=c.wasted_tokens,
            rejected_proposals=c.rejected_proposals + (self._drafts.num_rejected if self._drafts is not None else 0),
            stalled_steps=c.stalled_steps,
            dispatch=dict(dispatch),
            draft_tokens=c.draft_tokens,
            accepted_draft_tokens=c.accepted_draft_tokens,
        )
