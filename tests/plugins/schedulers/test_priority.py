"""PriorityScheduler: priorities, ageing, and preemption that can't go on for ever."""

from __future__ import annotations

import pytest

from mlx_engine.types import SchedulerView
from plugins.schedulers.priority import PriorityScheduler
from tests.plugins.builders import decoding, request_view, scheduler_view


def order(view: SchedulerView, *, ageing_seconds: float = 10.0) -> list[str]:
    """The ids that the policy proposes."""
    return [proposal.request_id for proposal in PriorityScheduler(ageing_seconds=ageing_seconds).schedule(view)]


def test_lower_numbers_first_and_arrival_within_one_priority() -> None:
    waiting = (
        request_view("low", arrival=1, priority=5),
        request_view("high-late", arrival=3, priority=0),
        request_view("high-early", arrival=2, priority=0),
    )
    assert order(scheduler_view(waiting=waiting)) == ["high-early", "high-late", "low"]


def test_an_urgent_prompt_goes_before_a_running_prefill_but_after_decodes() -> None:
    running = (request_view("prefill", priority=3, computed=4), decoding("decode", priority=9))
    waiting = (request_view("urgent", priority=0),)
    assert order(scheduler_view(running=running, waiting=waiting)) == ["decode", "urgent", "prefill"]


def test_waiting_makes_up_for_priority() -> None:
    waiting = (request_view("urgent", arrival=25, priority=0), request_view("patient", arrival=0, priority=2))
    assert order(scheduler_view(waiting=waiting), ageing_seconds=10) == ["patient", "urgent"], "20 s are two steps"
    assert order(scheduler_view(waiting=waiting), ageing_seconds=20) == ["urgent", "patient"]


def test_order_of_two_requests_never_changes() -> None:
    """So no two of them can preempt each other in turn."""
    waiting = (request_view("a", arrival=25, priority=0), request_view("b", arrival=0, priority=2))
    orders = {tuple(order(scheduler_view(waiting=waiting, now=now))) for now in (25.0, 100.0, 1e6)}
    assert orders == {("b", "a")}


def test_a_waiting_request_preempts_one_of_strictly_worse_priority() -> None:
    policy = PriorityScheduler(ageing_seconds=10)
    running = (decoding("bad", arrival=0, priority=5), decoding("worse", arrival=0, priority=6))
    urgent = request_view("urgent", arrival=1, priority=0, prompt=4)
    view = scheduler_view(running=running, waiting=(urgent,), free=0)
    assert policy.select_victim(view, "urgent") == "worse"
    equal = request_view("equal", arrival=1, priority=5, prompt=4)
    view = scheduler_view(running=running[:1], waiting=(equal,), free=0)
    assert policy.select_victim(view, "equal") is None


def test_aged_requests_are_not_preempted_by_newcomers() -> None:
    policy = PriorityScheduler(ageing_seconds=10)
    running = (decoding("aged", arrival=0, priority=5),)
    for arrival, victim in [(49.0, "aged"), (51.0, None)]:
        urgent = request_view("urgent", arrival=arrival, priority=0, prompt=4)
        assert policy.select_victim(scheduler_view(running=running, waiting=(urgent,), free=0), "urgent") == victim


def test_nobody_is_preempted_in_vain() -> None:
    policy = PriorityScheduler()
    running = (decoding("bad", priority=5), decoding("good", priority=0))
    urgent = request_view("urgent", arrival=1, priority=0, prompt=20)  # 5 blocks; bad holds 2
    assert policy.select_victim(scheduler_view(running=running, waiting=(urgent,), free=2), "urgent") is None
    assert policy.select_victim(scheduler_view(running=running, waiting=(urgent,), free=3), "urgent") == "bad"


def test_preemption_by_waiting_requests_is_bounded_but_running_ones_can_always_grow() -> None:
    policy = PriorityScheduler(max_preemptions=2)
    running = (decoding("first", priority=0), decoding("often", priority=5, preemptions=2))
    urgent = request_view("urgent", arrival=1, priority=0, prompt=4)
    view = scheduler_view(running=running, waiting=(urgent,), free=0)
    assert policy.select_victim(view, "urgent") is None
    assert policy.select_victim(view, "first") == "often"
    assert policy.select_victim(view, "often") == "often"
    assert policy.select_victim(view, "gone") is None


@pytest.mark.parametrize(
    "options",
    [{"ageing_seconds": 0}, {"ageing_seconds": float("inf")}, {"ageing_seconds": -1}, {"max_preemptions": -1}],
)
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        PriorityScheduler(**options)  # type: ignore[arg-type]
