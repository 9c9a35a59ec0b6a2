"""WaveScheduler: nobody joins a wave that runs."""

from __future__ import annotations

from mlx_engine.types import SchedulerView
from plugins.schedulers.wave import WaveScheduler
from tests.plugins.builders import decoding, request_view, scheduler_view


def order(policy: WaveScheduler, view: SchedulerView) -> list[str]:
    """The ids that the policy proposes."""
    return [proposal.request_id for proposal in policy.schedule(view)]


def test_a_wave_fills_the_slots_and_then_closes() -> None:
    policy = WaveScheduler()
    waiting = tuple(request_view(f"w{index}", arrival=index) for index in range(3))
    assert order(policy, scheduler_view(waiting=waiting, max_num_seqs=2)) == ["w0", "w1"]
    view = scheduler_view(running=(decoding("w0"),), waiting=waiting[1:], max_num_seqs=8)
    assert order(policy, view) == ["w0", "w1"], "w1 belongs to the wave though its first chunk had no room"


def test_next_wave_starts_only_when_the_last_member_has_finished() -> None:
    policy = WaveScheduler()
    members = (request_view("a"), request_view("b"))
    later = request_view("later", arrival=5)
    order(policy, scheduler_view(waiting=members))
    policy.on_request_finished(members[0])
    assert order(policy, scheduler_view(running=(decoding("b"),), waiting=(later,))) == ["b"]
    # The view leaves b out while its last token is in flight.
    assert order(policy, scheduler_view(waiting=(later,))) == []
    policy.on_request_finished(members[1])
    assert order(policy, scheduler_view(waiting=(later,))) == ["later"]


def test_a_preempted_member_comes_back_into_its_wave() -> None:
    policy = WaveScheduler()
    order(policy, scheduler_view(waiting=(request_view("a"), request_view("b", arrival=1))))
    preempted = request_view("b", arrival=1, preemptions=1)
    view = scheduler_view(running=(decoding("a"),), waiting=(preempted, request_view("c", arrival=2)))
    assert order(policy, view) == ["a", "b"]


def test_a_wave_is_sized_to_fit_until_its_end() -> None:
    waiting = tuple(request_view(f"w{index}", arrival=index, prompt=8, max_tokens=8) for index in range(5))
    assert order(WaveScheduler(), scheduler_view(waiting=waiting, free=9)) == ["w0", "w1"], "4 blocks each"
    assert order(WaveScheduler(), scheduler_view(waiting=waiting, free=1)) == ["w0"], "at least one"


def test_id_used_again_belongs_to_no_wave() -> None:
    policy = WaveScheduler()
    first = (request_view("a"), request_view("b"))
    order(policy, scheduler_view(waiting=first))
    policy.on_request_finished(first[0])
    assert order(policy, scheduler_view(running=(decoding("b"),), waiting=(request_view("a", arrival=7),))) == ["b"]


def test_victims_follow_arrival() -> None:
    view = scheduler_view(
        running=(decoding("old", arrival=1), decoding("new", arrival=2)), waiting=(request_view("w"),)
    )
    assert WaveScheduler().select_victim(view, "old") == "new"
    assert WaveScheduler().select_victim(view, "w") is None
