"""Conformance of a SchedulerPolicy: the engine's own Scheduler runs it, without a model, in a pool that is small."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.scheduler import Scheduler
from mlx_engine.sequence import Step
from mlx_engine.types import (
    ModelRunnerOutput,
    Request,
    RequestView,
    SamplingParams,
    ScheduledRequest,
    SchedulerView,
)
from plugins.kv_managers.paged import PagedKVManager
from plugins.prefix_caches.radix import RadixPrefixCache

_BLOCK_SIZE = 4
_SECONDS_PER_STEP = 0.05


class _Watched(SchedulerPolicy):
    """Passes every call on to the policy under test, and checks its answers."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._finished: set[str] = set()
        self.trace: list[object] = []  # every answer, to compare two runs

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        proposals = self._policy.schedule(view)
        assert isinstance(proposals, Sequence), f"schedule returned {type(proposals).__name__}, not a sequence"
        known = {request.request_id for request in (*view.running, *view.waiting)}
        for proposal in proposals:
            assert isinstance(proposal, ScheduledRequest), f"schedule proposed {proposal!r}"
            assert proposal.request_id in known, f"schedule proposed {proposal.request_id!r} twice, or it isn't there"
            assert proposal.num_tokens > 0, f"schedule proposed {proposal.num_tokens} tokens"
            known.discard(proposal.request_id)
        self.trace.append(tuple(proposals))
        return proposals

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        victim = self._policy.select_victim(view, request_id)
        assert victim is None or view.is_running(victim), f"select_victim named {victim!r}, which isn't running"
        self.trace.append(victim)
        return victim

    def on_request_finished(self, request: RequestView) -> None:
        self._policy.on_request_finished(request)


def check_scheduler(
    factory: Callable[[], SchedulerPolicy], *, seeds: Iterable[int] = range(12), max_preemptions: int = 50
) -> None:
    """Works out policies built by factory(), each in engines of several sizes, overlapped and not.

    Raises AssertionError if a proposal or victim makes no sense, if a request isn't finished in a generous number of
    steps or is preempted more than max_preemptions times, if the policy leaves the engine idle with work waiting, or
    if two runs differ.
    """
    for seed in seeds:
        try:
            first = _run(factory(), seed, max_preemptions)
            assert first == _run(factory(), seed, max_preemptions), "two runs with the same requests differ"
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc


def _requests(rng: random.Random, longest: int) -> list[tuple[float, Request]]:
    """Random requests with their arrival times, none longer than `longest` tokens in all."""
    now, requests = 0.0, []
    for index in range(rng.choice([5, 15, 30])):
        now += rng.choice([0.0, 0.0, 0.1, 1.0])
        num_prompt = rng.randrange(1, longest)
        max_tokens = min(rng.randrange(1, 16), longest - num_prompt)
        prompt = tuple(rng.choices([0, 1], weights=[8, 1], k=num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        requests.append((now, Request(f"request-{index}", prompt, sampling, priority=rng.randrange(4))))
    return requests


def _run(policy: SchedulerPolicy, seed: int, max_preemptions: int) -> list[object]:
    rng = random.Random(seed)
    watched = _Watched(policy)
    num_blocks, max_num_seqs = rng.choice([8, 12, 40]), rng.choice([1, 3, 8])
    cache = RadixPrefixCache(block_size=_BLOCK_SIZE)
    longest = num_blocks * _BLOCK_SIZE
    kv = PagedKVManager(num_blocks=num_blocks, block_size=_BLOCK_SIZE, prefix_cache=cache, max_model_len=longest)
    scheduler = Scheduler(
        watched,
        kv,
        model_name="model",
        eos_token_ids=frozenset(),
        max_model_len=longest,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 4, 32]),
    )
    arrivals = _requests(rng, longest)
    total = sum(len(request.prompt_token_ids) + request.sampling.max_tokens for _, request in arrivals)
    # Every step moves at least one token, and recomputing after preemptions may multiply that.
    limit = 10 * total + int(arrivals[-1][0] / _SECONDS_PER_STEP) + 100
    overlapped = rng.random() < 0.5
    in_flight: list[Step] = []
    for index in range(limit):
        now = index * _SECONDS_PER_STEP
        while arrivals and arrivals[0][0] <= now:
            scheduler.add_request(arrivals.pop(0)[1], now)
        if not arrivals and not in_flight and not scheduler.has_unfinished_requests():
            break
        if rng.random() < 0.01:
            scheduler.abort_request(f"request-{rng.randrange(30)}")
        step = scheduler.schedule(now, must_progress=not in_flight)
        if step is not None:
            in_flight.append(step)
        if in_flight and (len(in_flight) > overlapped or step is None):
            _apply(scheduler, in_flight.pop(0), now, max_preemptions)
    else:
        raise AssertionError(f"requests are left after {limit} steps: starved, or preempted forever")
    scheduler.check_integrity()
    stats = scheduler.stats({})
    assert stats.stalled_steps == 0, f"nothing ran in {stats.stalled_steps} steps though requests were waiting"
    assert stats.rejected_proposals == 0, f"{stats.rejected_proposals} proposals made no sense"
    return watched.trace


def _apply(scheduler: Scheduler, step: Step, now: float, max_preemptions: int) -> None:
    """Gives a step's requests a made-up token each."""
    sampled = {seq.request_id: (seq.start + seq.num_tokens) % 2 for seq in step.output.sequences if seq.samples}
    for output in scheduler.update_from_output(step, ModelRunnerOutput(step.output.step, sampled), now):
        assert output.num_preemptions <= max_preemptions, (
            f"{output.request_id} was preempted {output.num_preemptions} times"
        )
