"""Under load that never ends, a request that others could pass for ever still finishes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.scheduler import Scheduler
from mlx_engine.types import ModelRunnerOutput, Request, SamplingParams, ScheduledRequest, SchedulerView
from plugins.schedulers.fcfs import FCFSScheduler
from plugins.schedulers.priority import PriorityScheduler
from plugins.schedulers.wave import WaveScheduler
from tests.plugins.builders import paged


class NewestFirst(FCFSScheduler):
    """Starves whoever came early: shows that this test can fail."""

    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        return [ScheduledRequest(r.request_id, r.num_uncomputed_tokens) for r in (*view.running, *view.waiting[::-1])]


def steps_to_finish(policy: SchedulerPolicy, patient: Request, limit: int = 600) -> int | None:
    """Steps of 1 s until `patient` has finished while two urgent short requests arrive each step; None if never."""
    scheduler = Scheduler(
        policy,
        paged(12, 4),
        model_name="model",
        eos_token_ids=frozenset(),
        max_model_len=48,
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    for index in range(limit):
        for number in range(2):
            urgent = SamplingParams(max_tokens=6, ignore_eos=True)
            scheduler.add_request(Request(f"short-{index}-{number}", (1, 2, 3), urgent, priority=0), float(index))
        if index == 5:
            scheduler.add_request(patient, float(index))
        step = scheduler.schedule(float(index))
        assert step is not None
        sampled = {seq.request_id: 7 for seq in step.output.sequences if seq.samples}
        outputs = scheduler.update_from_output(step, ModelRunnerOutput(step.output.step, sampled), float(index))
        if any(output.request_id == "patient" and output.finish_reason for output in outputs):
            return index
    return None


# Needs 10 of the pool's 12 blocks at once, and is of the worst priority.
LARGE = Request("patient", tuple(range(36)), SamplingParams(max_tokens=4, ignore_eos=True), priority=3)


@pytest.mark.parametrize("policy", [FCFSScheduler(), WaveScheduler(), PriorityScheduler(ageing_seconds=20)])
def test_a_large_request_finishes_under_endless_small_ones(policy: SchedulerPolicy) -> None:
    assert steps_to_finish(policy, LARGE) is not None


def test_priorities_hold_it_back_as_long_as_ageing_says() -> None:
    soon = steps_to_finish(PriorityScheduler(ageing_seconds=5), LARGE)
    late = steps_to_finish(PriorityScheduler(ageing_seconds=20), LARGE)
    assert soon is not None
    assert late is not None
    assert soon < late


def test_newest_first_starves_it() -> None:
    assert steps_to_finish(NewestFirst(), LARGE) is None
