"""FCFSScheduler: order, admission without starving, and victims."""

from __future__ import annotations

from plugins.schedulers.fcfs import FCFSScheduler
from tests.plugins.builders import decoding, request_view, scheduler_view


def order(**view: object) -> list[str]:
    """The ids that FCFS proposes over a view."""
    return [proposal.request_id for proposal in FCFSScheduler().schedule(scheduler_view(**view))]  # type: ignore[arg-type]


def test_decodes_then_prefills_then_admissions_each_by_arrival() -> None:
    running = (
        request_view("prefill-late", arrival=4, computed=2),
        decoding("decode-late", arrival=3),
        request_view("prefill-early", arrival=1, computed=2),
        decoding("decode-early", arrival=2),
    )
    waiting = (
        request_view("preempted", arrival=9),
        request_view("first", arrival=5),
        request_view("second", arrival=6),
    )
    assert order(running=running, waiting=waiting) == [
        "decode-late",
        "decode-early",
        "prefill-early",
        "prefill-late",
        "first",
        "second",
        "preempted",
    ]


def test_everything_left_of_a_request_is_asked_for() -> None:
    view = scheduler_view(running=(request_view("a", prompt=30, computed=10), decoding("b")))
    proposals = {proposal.request_id: proposal.num_tokens for proposal in FCFSScheduler().schedule(view)}
    assert proposals == {"a": 20, "b": 1}


def test_no_more_admissions_than_slots() -> None:
    waiting = tuple(request_view(f"w{index}", arrival=index) for index in range(5))
    assert order(running=(decoding("a"),), waiting=waiting, max_num_seqs=3) == ["a", "w0", "w1"]
    assert order(running=(decoding("a"),), waiting=waiting, max_num_seqs=1) == ["a"]


def test_small_requests_use_the_gap_behind_a_large_one_but_never_come_before_it() -> None:
    waiting = (
        request_view("large", arrival=1, prompt=40),
        request_view("other large", arrival=2, prompt=40),
        request_view("small", arrival=3, prompt=4),
    )
    assert order(running=(decoding("a"),), waiting=waiting, free=5) == ["a", "large", "small"]
    assert order(running=(decoding("a"),), waiting=waiting, free=12) == ["a", "large", "small"]
    assert order(running=(decoding("a"),), waiting=waiting, free=30) == ["a", "large", "other large", "small"]


def test_blocks_that_running_prefills_still_need_are_not_given_away() -> None:
    running = (request_view("a", prompt=40, computed=4),)  # 9 blocks to go
    waiting = (request_view("w", arrival=1, prompt=4),)
    assert order(running=running, waiting=waiting, free=9) == ["a"]
    assert order(running=running, waiting=waiting, free=10) == ["a", "w"]
    assert order(waiting=waiting, free=0) == ["w"], "with nothing running, somebody must be tried"


def test_victim_is_the_last_arrival_and_may_be_the_requester() -> None:
    policy = FCFSScheduler()
    view = scheduler_view(running=(decoding("old", arrival=1), decoding("new", arrival=3), decoding("mid", arrival=2)))
    assert policy.select_victim(view, "old") == "new"
    assert policy.select_victim(view, "new") == "new"


def test_equal_arrivals_have_one_order() -> None:
    policy = FCFSScheduler()
    for running in [(decoding("a"), decoding("b")), (decoding("b"), decoding("a"))]:
        assert policy.select_victim(scheduler_view(running=running), "a") == "b"


def test_a_waiting_request_preempts_nobody() -> None:
    view = scheduler_view(running=(decoding("new", arrival=9),), waiting=(request_view("old", arrival=1),))
    assert FCFSScheduler().select_victim(view, "old") is None
    assert FCFSScheduler().select_victim(view, "gone") is None
