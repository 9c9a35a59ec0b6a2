"""The Scheduler disposes: budget, chunks, preemption, overtaking, and what it tells policies and the runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.scheduler import MAX_OVERTAKES, Scheduler
from mlx_engine.sequence import Step
from mlx_engine.types import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestOutput,
    RequestView,
    SamplingParams,
    ScheduledRequest,
    SchedulerView,
)
from tests.plugins.builders import paged

Choose = Callable[[SchedulerView], list[str]]


class Script(SchedulerPolicy):
    """Proposes what a function of the view says, all of each; its victims are a list, taken one by one."""

    def __init__(self, choose: Choose, victims: Sequence[str | None] = ()) -> None:
        self.choose = choose
        self._victims = list(victims)
        self.views: list[SchedulerView] = []
        self.asked: list[tuple[str, SchedulerView]] = []
        self.finished: list[RequestView] = []

    def schedule(self, view: SchedulerView) -> list[ScheduledRequest]:
        self.views.append(view)
        return [ScheduledRequest(name, 10**6) for name in self.choose(view)]

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        self.asked.append((request_id, view))
        return self._victims.pop(0) if self._victims else None

    def on_request_finished(self, request: RequestView) -> None:
        self.finished.append(request)


def everyone(view: SchedulerView) -> list[str]:
    """Running ones first, both in their order."""
    return [r.request_id for r in (*view.running, *view.waiting)]


class Bench:
    """A scheduler and the runner's part of each step: every sample is the position of the token before it."""

    def __init__(
        self,
        policy: SchedulerPolicy,
        *,
        num_blocks: int = 8,
        budget: int = 16,
        chunk: int | None = None,
        halving: int | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            policy,
            paged(num_blocks, 4),
            model_name="model",
            eos_token_ids=frozenset({999}),
            max_model_len=num_blocks * 4,
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_prefill_chunk=chunk,
            chunk_halving_context=halving,
        )

    def add(self, name: str, num_prompt: int, max_tokens: int = 20) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add_request(Request(name, tuple(range(100, 100 + num_prompt)), sampling), now=1.0)

    def schedule(self, *, must_progress: bool = True) -> Step:
        step = self.scheduler.schedule(2.0, must_progress=must_progress)
        assert step is not None
        return step

    def apply(self, step: Step, **tokens: int) -> list[RequestOutput]:
        sampled = {s.request_id: tokens.get(s.request_id, 7) for s in step.output.sequences if s.samples}
        return self.scheduler.update_from_output(step, ModelRunnerOutput(step.output.step, sampled), 3.0)


def parts(step: Step) -> list[tuple[str, int, int, bool]]:
    """What a step runs: id, start, tokens, whether it samples."""
    return [(s.request_id, s.start, s.num_tokens, s.samples) for s in step.output.sequences]


def test_chunks_shrink_as_their_context_grows_but_not_without_end() -> None:
    bench = Bench(Script(everyone), num_blocks=64, budget=32, halving=16)
    bench.add("a", 200)
    lengths = []
    while True:
        step = bench.schedule()
        ((_, start, length, samples),) = parts(step)
        if samples:
            break
        # 32 / (1 + start / 16), never below an eighth of 32.
        assert length == max(int(32 / (1 + start / 16)), 4)
        lengths.append(length)
        bench.apply(step)
    assert (lengths[0], lengths[-1]) == (32, 4)


def test_late_chunks_take_their_cost_from_the_budget_and_decodes_only_one_token() -> None:
    bench = Bench(Script(everyone), num_blocks=64, budget=32, halving=16)
    bench.add("decodes", 30)
    bench.apply(bench.schedule())
    bench.add("a", 60)
    bench.apply(bench.schedule())  # the decode, and 31 tokens of a
    bench.add("b", 60)
    # After 31 tokens a's cost 1 + 31 / 16 each: 10 of them take 30 of the 31, and b gets the rest.
    assert parts(bench.schedule()) == [("decodes", 31, 1, True), ("a", 31, 10, False), ("b", 0, 1, False)]


def test_a_late_chunk_that_is_preempted_again_gives_back_what_it_cost() -> None:
    policy = Script(lambda view: [n for n in ("late", "grows", "new") if view.get(n)], victims=["late"])
    bench = Bench(policy, num_blocks=7, budget=9, chunk=5, halving=16)
    bench.add("grows", 8)
    for _ in range(2):
        bench.apply(bench.schedule())
    bench.add("late", 16)
    for _ in range(3):
        bench.apply(bench.schedule())
    step = bench.schedule()
    assert parts(step) == [("late", 11, 2, False), ("grows", 11, 1, True)]
    bench.apply(step)
    bench.add("new", 12)
    # late's next 2 tokens cost 4 of the 9. Then grows finds no block, late goes, and new can use what it gave back.
    assert parts(bench.schedule()) == [("grows", 12, 1, True), ("new", 0, 5, False)]
    assert [request for request, _ in policy.asked] == ["grows"]


def test_proposals_are_cut_to_the_budget_in_their_order() -> None:
    bench = Bench(Script(everyone), budget=16)
    bench.add("a", 10)
    bench.add("b", 10)
    assert parts(bench.schedule()) == [("a", 0, 10, True), ("b", 0, 6, False)]


def test_prefill_goes_chunk_by_chunk_and_only_the_last_chunk_samples() -> None:
    bench = Bench(Script(everyone), chunk=4)
    bench.add("a", 10)
    seen = []
    for _ in range(4):
        step = bench.schedule()
        seen += parts(step)
        bench.apply(step)
    assert seen == [("a", 0, 4, False), ("a", 4, 4, False), ("a", 8, 2, True), ("a", 10, 1, True)]


def test_the_token_still_on_the_device_is_left_to_the_runner() -> None:
    """Overlapped: the second step is scheduled before the first one's sample is known."""
    bench = Bench(Script(everyone))
    bench.add("a", 3)
    first = bench.schedule()
    second = bench.schedule(must_progress=False)
    assert [list(s.token_ids) for s in second.output.sequences] == [[]]
    assert parts(second) == [("a", 3, 1, True)]
    assert second.output.sequences[0].num_output_tokens == 1
    bench.apply(first, a=50)
    assert [list(s.token_ids) for s in bench.schedule(must_progress=False).output.sequences] == [[]]
    bench.apply(second, a=51)
    assert not bench.scheduler.abort_request("b")


def test_a_step_after_the_result_carries_the_token() -> None:
    bench = Bench(Script(everyone))
    bench.add("a", 3)
    bench.apply(bench.schedule(), a=50)
    assert [list(s.token_ids) for s in bench.schedule().output.sequences] == [[50]]


def test_a_request_whose_last_token_is_in_flight_is_not_scheduled_again() -> None:
    policy = Script(everyone)
    bench = Bench(policy)
    bench.add("a", 3, max_tokens=1)
    step = bench.schedule()
    assert bench.scheduler.schedule(2.0, must_progress=False) is None
    outputs = bench.apply(step)
    assert [(o.finish_reason, o.num_output_tokens) for o in outputs] == [(FinishReason.LENGTH, 1)]
    assert policy.finished[0].request_id == "a"


def test_the_sample_after_an_end_is_dropped_and_counted() -> None:
    bench = Bench(Script(everyone))
    bench.add("a", 3)
    first = bench.schedule()
    second = bench.schedule(must_progress=False)
    outputs = bench.apply(first, a=999)
    assert [(o.new_token_ids, o.finish_reason, o.num_output_tokens) for o in outputs] == [((), FinishReason.STOP, 1)]
    assert bench.apply(second) == []
    stats = bench.scheduler.stats({})
    assert (stats.wasted_tokens, stats.generation_tokens) == (1, 1)
    assert stats.kv.free == 8


def test_a_victim_is_computed_again_from_its_start_and_queues_first() -> None:
    """b takes the blocks of a, which runs again before the one that waited longer."""
    policy = Script(lambda view: [n for n in ("b", "a", "c") if view.get(n)], victims=["a"])
    bench = Bench(policy, num_blocks=4)
    bench.add("a", 7)
    bench.apply(bench.schedule(), a=50)
    bench.add("c", 5)
    bench.add("b", 13)
    step = bench.schedule()
    assert parts(step) == [("b", 0, 13, True)]
    requester, view = policy.asked[0]
    assert (requester, [r.request_id for r in view.running]) == ("b", ["a"])
    bench.apply(step)
    bench.scheduler.abort_request("b")
    step = bench.schedule()
    assert [r.request_id for r in policy.views[-1].waiting] == ["a", "c"]
    assert parts(step)[0] == ("a", 0, 8, True)
    assert list(step.output.sequences[0].token_ids) == [*range(100, 107), 50]
    assert bench.apply(step)[0].num_preemptions == 1


def test_a_victim_whose_token_is_in_flight_comes_back_only_when_the_token_is_known() -> None:
    """c needs three blocks: both go, and one block is left over that would be enough for a."""
    policy = Script(lambda view: ["c", "a"], victims=["a", "b"])
    bench = Bench(policy, num_blocks=4)
    bench.add("a", 3)
    bench.add("b", 9)
    policy.choose = everyone
    first = bench.schedule()
    assert [name for name, *_ in parts(first)] == ["a", "b"]
    bench.add("c", 9)
    policy.choose = lambda view: ["c", "a"]
    second = bench.schedule(must_progress=False)
    assert parts(second) == [("c", 0, 9, True)]
    bench.apply(first, a=50)
    third = bench.schedule(must_progress=False)
    assert list(third.output.sequences[-1].token_ids) == [100, 101, 102, 50]


def test_preempting_for_nothing_does_not_lose_a_request() -> None:
    """The victim's blocks weren't enough: the requester goes on waiting, and so does the victim."""
    policy = Script(everyone, victims=["a"])
    bench = Bench(policy)
    bench.add("a", 3)
    bench.add("hog", 22)
    for _ in range(2):
        bench.apply(bench.schedule())
    bench.add("b", 17)
    policy.choose = lambda view: ["b", "a", "hog"]
    assert "b" not in [name for name, *_ in parts(bench.schedule())]
    assert [request for request, _ in policy.asked] == ["b", "b"]
    bench.scheduler.abort_request("hog")
    policy.choose = everyone
    assert {name for name, *_ in parts(bench.schedule())} == {"a", "b"}
    bench.scheduler.check_integrity()


def test_overtaking_a_blocked_request_is_bounded() -> None:
    """The large one needs the whole pool; small ones may pass it MAX_OVERTAKES times, then it is next."""
    bench = Bench(Script(lambda view: ["keeper", "large", *everyone(view)]), num_blocks=8)
    bench.add("keeper", 1)
    bench.apply(bench.schedule())
    bench.add("large", 30, max_tokens=1)
    passed = 0
    for index in range(3 * MAX_OVERTAKES):
        name = f"small-{index}"
        bench.add(name, 2, max_tokens=1)
        if index % 20 == 10:  # the keeper never ends by itself
            bench.scheduler.abort_request("keeper")
            bench.add("keeper", 1)
        step = bench.schedule()
        passed += sum(n.startswith("small") for n, *_ in parts(step))
        assert "large" not in [name for name, *_ in parts(step)], "the keeper leaves no room for it"
        bench.apply(step)
    assert passed == MAX_OVERTAKES


def test_views_are_what_policies_were_promised() -> None:
    policy = Script(everyone)
    bench = Bench(policy, budget=16, chunk=4)
    bench.add("a", 6, max_tokens=3)
    bench.apply(bench.schedule())
    bench.schedule()
    view = policy.views[-1]
    assert (view.step, view.now, view.token_budget, view.max_num_seqs) == (1, 2.0, 16, 4)
    assert (view.num_blocks, view.block_size, view.num_free_blocks) == (8, 4, 6)
    running = view.running[0]
    assert (running.num_prompt_tokens, running.num_computed_tokens, running.num_tokens) == (6, 4, 6)
    assert (running.num_output_tokens, running.max_tokens, running.is_decoding) == (0, 3, False)
    assert (running.arrival_time, running.last_scheduled_time) == (1.0, 2.0)
    bench.scheduler.schedule(2.0)
    after = policy.views[-1].running[0]
    assert (after.num_tokens, after.num_computed_tokens, after.is_decoding) == (7, 6, True)


def test_times_are_those_of_the_first_schedule_and_the_first_token() -> None:
    bench = Bench(Script(everyone), chunk=4)
    bench.add("a", 6)
    bench.apply(bench.schedule())
    output = bench.apply(bench.schedule())[0]
    assert (output.arrival_time, output.first_scheduled_time, output.first_token_time) == (1.0, 2.0, 3.0)


def test_every_request_has_a_seed_and_a_given_one_is_kept() -> None:
    bench = Bench(Script(everyone))
    bench.scheduler.add_request(Request("given", (1, 2), SamplingParams(seed=5)), 0.0)
    bench.add("drawn", 2)
    bench.add("drawn-too", 2)
    seeds = {s.request_id: s.seed for s in bench.schedule().output.sequences}
    assert seeds["given"] == 5
    assert len(set(seeds.values())) == 3


def test_an_idle_scheduler_has_no_step_and_asks_no_policy() -> None:
    policy = Script(everyone)
    assert Bench(policy).scheduler.schedule(0.0) is None
    assert policy.views == []


def test_integrity_is_the_memory_managers_word() -> None:
    bench = Bench(Script(everyone))
    bench.add("a", 3)
    bench.apply(bench.schedule())
    bench.scheduler.check_integrity()
    bench.scheduler._kv._pool._stack.pop()  # type: ignore[attr-defined]
    with pytest.raises(IntegrityError):
        bench.scheduler.check_integrity()
