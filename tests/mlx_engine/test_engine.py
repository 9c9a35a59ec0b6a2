"""The engine loop over simulated K/V: every request gets exactly its own answer, whatever the policies and the load."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mlx_engine.config import EngineConfig
from mlx_engine.errors import IntegrityError, RequestError
from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.scheduler import MAX_PREEMPTIONS
from mlx_engine.types import FinishReason, Request, SamplingParams, ScheduledRequest, SchedulerView
from tests.mlx_engine.engine_machine import MEMORIES, Garbage, run_engine_machine
from tests.mlx_engine.workload import EOS, VOCAB, Client

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def client(policy: SchedulerPolicy | None = None, **options: Any) -> Client:
    """A small engine, and its client."""
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return Client(EngineConfig(**{**sizes, **options}), policy)


# -- everything, in random order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["fcfs", "wave", "priority", "garbage"])
@pytest.mark.parametrize("memory", MEMORIES, ids="-".join)
def test_any_requests_in_any_order_get_their_answers_and_all_blocks_come_back(
    scheduler: str, memory: tuple[str, str]
) -> None:
    run_engine_machine(max_examples=40, memories=[memory], schedulers=(scheduler,))


# -- prompts and limits ---------------------------------------------------------------------------------------------


@OVERLAP
def test_lengths_around_block_edges_and_repeats_of_the_same_prompt(overlap: bool) -> None:
    """F1: at least one token is always computed, and a repeat finds all other whole blocks."""
    block = 4
    mine = client(num_blocks=200, overlap=overlap)
    for length in (1, block - 1, block, block + 1, 2 * block, 2 * block + 1, 15 * block):
        prompt = [(19 * position + length) % VOCAB for position in range(length)]
        for repeat in range(3):
            mine.add(f"{length}-{repeat}", prompt, max_tokens=8, ignore_eos=True)
            mine.finish_open()
        cached = [e.last.num_cached_tokens for e in mine.done[-3:] if e.last is not None]
        assert cached == [0, (length - 1) // block * block, (length - 1) // block * block]
        for name in "abcd":
            mine.add(f"{length}-{name}", prompt, max_tokens=8, ignore_eos=True)
        mine.finish_open()
    mine.finish()


def test_a_prompt_that_can_never_fit_is_refused_and_those_behind_it_are_served() -> None:
    """K1: the pool holds 64 tokens, the context would allow more."""
    mine = client(max_model_len=None)
    with pytest.raises(RequestError, match="64 tokens"):
        mine.engine.add_request(Request("large", tuple(range(VOCAB - 60, VOCAB)) * 2, SamplingParams()))
    for name in "abcd":
        mine.add(name, [3, 4, 5], max_tokens=5, ignore_eos=True)
    mine.finish()


def test_max_tokens_beyond_the_pool_ends_with_length() -> None:
    """K1: the prompt fits, prompt and max_tokens never can: clamped, not hung."""
    mine = client(max_num_batched_tokens=4)
    mine.add("long", [1, 2], max_tokens=8000, ignore_eos=True)
    mine.add("other", [1, 3], max_tokens=8000, ignore_eos=True)
    mine.finish()
    assert [e.last.num_output_tokens for e in mine.done if e.last is not None] == [62, 62]


@pytest.mark.parametrize(
    ("prompt", "message"), [((), "empty"), ((VOCAB,), "between 0 and 59"), ((3, -1), "between 0 and 59")]
)
def test_prompts_that_make_no_sense_are_refused(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        client().engine.add_request(Request("bad", prompt, SamplingParams()))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    mine = client()
    mine.add("a", [1, 2, 3], max_tokens=3)
    with pytest.raises(RequestError, match="already being served"):
        mine.engine.add_request(Request("a", (1,), SamplingParams()))
    mine.finish()
    mine.add("a", [4, 5], max_tokens=2)
    mine.finish_open()


# -- ends -----------------------------------------------------------------------------------------------------------


@OVERLAP
def test_stop_tokens_and_end_of_sequence_end_a_request_and_are_not_given_out(overlap: bool) -> None:
    mine = client(overlap=overlap)
    # Prompts whose answers reach EOS at some point, found by trying.
    reached = [n for n in range(400) if EOS in mine.expect_tokens([n % VOCAB, n // VOCAB], 12)][:6]
    for n in reached:
        mine.add(f"eos-{n}", [n % VOCAB, n // VOCAB], max_tokens=12)
        mine.add(f"past-{n}", [n % VOCAB, n // VOCAB], max_tokens=12, ignore_eos=True)
    mine.finish()
    reasons = {e.request.request_id.split("-")[0]: e.reason for e in mine.done}
    assert reasons == {"eos": FinishReason.STOP, "past": FinishReason.LENGTH}
    assert len(reached) == 6
    # Overlapped, one token more was under way when the end was seen; it is dropped and counted.
    assert (mine.engine.stats().wasted_tokens > 0) == overlap


@OVERLAP
def test_aborted_requests_give_everything_back_at_once_at_every_stage(overlap: bool) -> None:
    for steps in range(8):
        mine = client(overlap=overlap, max_num_batched_tokens=4, prefix_cache="none")
        mine.add("gone", list(range(14)), max_tokens=6, ignore_eos=True)
        for _ in range(steps):
            mine.step()
        mine.abort("gone")
        stats = mine.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv.free) == (0, 0, 16)
        mine.add("next", list(range(20, 34)), max_tokens=6, ignore_eos=True)
        mine.finish()


def test_abort_of_an_unknown_id_is_no_error() -> None:
    assert not client().engine.abort_request("nobody")


# -- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", ["radix", "hash_chain"])
def test_salts_keep_tenants_apart(prefix_cache: str) -> None:
    """F3: the simulated K/V differs by salt, so that a wrong hit would also give wrong tokens."""
    mine = client(num_blocks=100, prefix_cache=prefix_cache)
    prompt = list(range(22))
    cached = []
    for index, salt in enumerate(["t1", "t1", "t2", None, "t2", None]):
        mine.add(str(index), prompt, max_tokens=2, salt=salt, ignore_eos=True)
        mine.finish_open()
        last = mine.done[-1].last
        assert last is not None
        cached.append(last.num_cached_tokens)
    assert cached == [0, 20, 0, 0, 20, 20]
    mine.finish()


@pytest.mark.parametrize("prefix_cache", ["radix", "hash_chain"])
def test_prompts_equal_only_in_a_later_block_do_not_share_it(prefix_cache: str) -> None:
    mine = client(num_blocks=100, prefix_cache=prefix_cache)
    for name, first in (("a", 1), ("b", 2)):
        mine.add(name, [first] * 4 + list(range(10, 22)), max_tokens=2, ignore_eos=True)
        mine.finish_open()
        assert mine.done[-1].last is not None
        assert mine.done[-1].last.num_cached_tokens == 0
    mine.finish()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    mine = client(num_blocks=100)
    first = mine.add("turn-1", list(range(10)), max_tokens=11, ignore_eos=True)
    mine.finish_open()
    mine.add("turn-2", [*range(10), *first.tokens, 1, 2], max_tokens=2)
    mine.finish_open()
    assert mine.done[-1].last is not None
    # Of 10 + 11 tokens all but the last were computed, in whole blocks.
    assert mine.done[-1].last.num_cached_tokens == 20
    mine.finish()


# -- pressure -------------------------------------------------------------------------------------------------------


def ends_under_pressure(scheduler: str, overlap: bool = True) -> tuple[Client, dict[str, int]]:
    """K4: a pool of 600 tokens, 12 requests of 300+250 first and 12 of 40+20, all at once; the step each ends at."""
    mine = client(
        scheduler=scheduler,
        overlap=overlap,
        num_blocks=38,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        prefix_cache="none",
    )
    for index in range(12):
        mine.add(f"large-{index}", [(index + 7 * p) % VOCAB for p in range(300)], max_tokens=250, ignore_eos=True)
    for index in range(12):
        mine.add(f"small-{index}", [(index + 3 * p) % VOCAB for p in range(40)], max_tokens=20, ignore_eos=True)
    ends: dict[str, int] = {}
    for step in itertools.count():
        if not mine.engine.has_unfinished_requests():
            break
        assert step < 20_000, f"never finished: {sorted(mine.open)}"
        ends |= {output.request_id: step for output in mine.step() if output.finish_reason is not None}
    mine.finish()
    return mine, ends


@OVERLAP
@pytest.mark.parametrize("scheduler", ["fcfs", "wave", "priority"])
def test_large_and_small_requests_all_finish_under_pressure(scheduler: str, overlap: bool) -> None:
    mine, ends = ends_under_pressure(scheduler, overlap)
    assert len(ends) == 24
    assert max(e.last.num_preemptions for e in mine.done if e.last is not None) <= 30
    assert min(end for name, end in ends.items() if name.startswith("large")) < 600, "the first went straight through"


@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
def test_small_requests_do_not_wait_for_all_the_large_ones_before_them(scheduler: str) -> None:
    """Half of the small ones are done in the time of two large ones."""
    _, ends = ends_under_pressure(scheduler)
    small = sorted(end for name, end in ends.items() if name.startswith("small"))
    large = sorted(end for name, end in ends.items() if name.startswith("large"))
    assert small[5] <= large[1]


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_do_not_depend_on_neighbours_or_their_order(overlap: bool) -> None:
    """D4: rotations of prompts of very different lengths, staggered, in several chunk sizes."""
    prompts = [[(i + 11 * p) % VOCAB for p in range(n)] for i, n in enumerate((1, 12, 30, 61, 5))]
    for rotation, chunk in itertools.product(range(5), (1, 3, 16)):
        mine = client(num_blocks=40, max_prefill_chunk=chunk, overlap=overlap)
        for index in range(5):
            which = (index + rotation) % 5
            mine.add(str(which), prompts[which], max_tokens=3 + 4 * which, ignore_eos=True)
            mine.step()
        mine.finish()


def test_many_requests_leave_no_block_behind() -> None:
    """C5: 400 requests of all lengths and ends, then one that needs nearly the whole pool."""
    mine = client(num_blocks=64)
    rng = random.Random(1)
    for index in range(400):
        prompt = [(index * index + p) % VOCAB for p in range(rng.choice([3, 4, 5, 7, 8, 9, 15, 16, 17]))]
        mine.add(str(index), prompt, max_tokens=3 + index % 5, ignore_eos=index % 2 == 0)
        if index % 7 == 0:
            mine.step()
            mine.abort(rng.choice(sorted(mine.open)))
        while len(mine.open) > 6:
            mine.step()
    mine.finish_open()
    mine.add("whole", [p % VOCAB for p in range(60 * 4 - 4)], max_tokens=2)
    mine.finish()


# -- bad policies ---------------------------------------------------------------------------------------------------


class _Answers(SchedulerPolicy):
    """Proposes what it is told to propose, whatever it sees."""

    def __init__(self, proposals: Any, victim: Any = None) -> None:
        self._proposals, self._victim = proposals, victim

    def schedule(self, view: SchedulerView) -> Any:
        return self._proposals

    def select_victim(self, view: SchedulerView, request_id: str) -> Any:
        return self._victim


class _Swap(SchedulerPolicy):
    """Each waiting request takes the place of a running one, for ever."""

    def schedule(self, view: SchedulerView) -> list[ScheduledRequest]:
        return [ScheduledRequest(r.request_id, r.num_uncomputed_tokens) for r in (*view.waiting, *view.running)]

    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        return next((r.request_id for r in view.running if r.request_id != request_id), None)


NONSENSE: dict[str, Any] = {
    "nothing": [],
    "None": None,
    "unknown ids": [ScheduledRequest("nobody", 5)],
    "negative counts": [ScheduledRequest("a", -1), ScheduledRequest("b", 0)],
    "duplicates": [ScheduledRequest("a", 1), ScheduledRequest("a", 1)],
    "far too many": [ScheduledRequest("b", 10**12)],
    "fractions": [ScheduledRequest("a", 1.5)],  # type: ignore[arg-type]
    "other types": ["a", None, ("b", 1)],
}


@OVERLAP
@pytest.mark.parametrize("victim", [None, "nobody", "a", 7])
@pytest.mark.parametrize("proposals", NONSENSE)
def test_proposals_that_make_no_sense_neither_corrupt_nor_hang(proposals: str, victim: Any, overlap: bool) -> None:
    mine = client(_Answers(NONSENSE[proposals], victim), num_blocks=6, overlap=overlap)
    for name in "abc":
        mine.add(name, [ord(name) % VOCAB, *range(8)], max_tokens=9, ignore_eos=True)
    mine.finish()
    if proposals not in ("nothing", "None", "far too many"):
        assert mine.engine.stats().rejected_proposals > 0
    assert mine.engine.stats().stalled_steps > 0


@OVERLAP
@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
def test_victims_that_take_turns_forever_are_stopped(prefix_cache: str, overlap: bool) -> None:
    """Each prompt takes several steps, so that swapping before the first token would never get anywhere."""
    mine = client(_Swap(), num_blocks=6, max_num_batched_tokens=4, prefix_cache=prefix_cache, overlap=overlap)
    for name in "abc":
        mine.add(name, [ord(name) % VOCAB, *range(15)], max_tokens=6, ignore_eos=True)
    for _ in range(60 * MAX_PREEMPTIONS):
        mine.step()
    assert not mine.engine.has_unfinished_requests()
    mine.finish()


@pytest.mark.parametrize("seed", range(10))
def test_random_answers_of_a_policy_neither_corrupt_nor_hang(seed: int) -> None:
    mine = client(Garbage(seed), num_blocks=9, overlap=seed % 2 == 0)
    for index in range(12):
        mine.add(str(index), [(index // 3 + p) % VOCAB for p in range(2 + 2 * index)], max_tokens=8, ignore_eos=True)
        mine.step()
    mine.finish()


def test_a_memory_manager_that_breaks_its_word_stops_the_engine_with_a_reason() -> None:
    mine = client()
    mine.simulated.kv.allocate_slots = lambda *args: False  # type: ignore[method-assign]
    mine.add("a", [1, 2, 3], max_tokens=2)
    with pytest.raises(IntegrityError, match="within its own max_tokens_per_request"):
        mine.step()
