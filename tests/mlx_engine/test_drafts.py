"""Drafts on real (tiny) models and over simulated K/V: the same tokens in fewer steps, whatever is guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.interfaces import Drafter
from mlx_engine.types import EngineStats, FinishReason, Request, SamplingParams, SchedulerOutput
from plugins import build
from plugins.simulator import build_simulated_engine, reference_tokens
from tests.mlx_engine.drafters import Oracle
from tests.mlx_engine.workload import EOS, VOCAB, Client
from tests.parity.tiny_models import TINY
from tests.parity.tiny_models import build as build_model

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


class Replay(Drafter):
    """Guesses from answers that are known already, with a wrong token now and then."""

    def __init__(self, answers: dict[str, list[int]], wrong_every: int) -> None:
        self._answers, self._wrong_every, self._calls = answers, wrong_every, 0
        self.ended: list[str] = []

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        """The next five tokens; every `wrong_every`-th call one of them is another one."""
        self._calls += 1
        whole = self._answers[request_id]
        guess = whole[len(token_ids) : len(token_ids) + min(5, max_tokens)]
        if guess and self._calls % self._wrong_every == 0:
            guess[self._calls % len(guess)] ^= 1
        return guess

    def on_request_finished(self, request_id: str) -> None:
        self.ended.append(request_id)


@pytest.fixture
def with_drafter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Drafter], None]:
    """A function that lets the next engine have this drafter."""
    return lambda drafter: monkeypatch.setattr(build, "create_drafter", lambda name, options: drafter)


GATHERED = {"attention_backend_options": {"decode": "gather_sdpa"}}


def tiny_engine(name: str = "llama_biases", **options: Any) -> Engine:
    sizes = {"num_blocks": 60, "block_size": 8, "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40}
    return build.build_engine_for(
        EngineConfig(**{"model": "tiny", "cpu_backend": "blas", **sizes, **options}), build_model(TINY[name])
    )


def prompts() -> dict[str, tuple[int, ...]]:
    rng = np.random.default_rng(3)
    return {str(i): tuple(rng.integers(3, 500, length).tolist()) for i, length in enumerate((5, 30, 1, 17, 52, 8))}


def answers(engine: Engine, max_tokens: int = 24, **sampling: Any) -> tuple[dict[str, list[int]], EngineStats]:
    """All tokens of each request, prompt first, one more request arriving in each step."""
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
    todo = list(prompts().items())
    tokens = {name: list(prompt) for name, prompt in todo}
    while todo or engine.has_unfinished_requests():
        if todo:
            name, prompt = todo.pop(0)
            engine.add_request(Request(name, prompt, SamplingParams(**options)))
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.check_idle()
    return tokens, engine.stats()


@OVERLAP
@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 12, "max_model_len": 96}, {"prefix_cache": "none", **GATHERED}],
    ids=["", "tight", "gathered"],
)
@pytest.mark.parametrize("wrong_every", [2, 10**9])
@pytest.mark.parametrize("name", ["llama_biases", "gemma3", "gpt_oss"])
def test_the_same_tokens_with_right_and_wrong_drafts_in_fewer_steps(
    name: str, wrong_every: int, options: dict[str, Any], overlap: bool, with_drafter: Any
) -> None:
    """Windows and sinks too; staggered, in chunks, with a pool too small for all, on both decode paths."""
    expected, plain = answers(tiny_engine(name, overlap=overlap, **options))
    drafter = Replay(expected, wrong_every)
    with_drafter(drafter)
    got, stats = answers(tiny_engine(name, overlap=overlap, **options))
    assert got == expected
    assert stats.steps < 0.75 * plain.steps
    assert stats.accepted_draft_tokens > 0.3 * stats.draft_tokens > 0
    if wrong_every > 2:
        assert stats.accepted_draft_tokens == stats.draft_tokens
    assert stats.generation_tokens == plain.generation_tokens == 6 * 24
    assert sorted(drafter.ended) == sorted(expected)
    if "num_blocks" in options:
        assert min(plain.num_preemptions, stats.num_preemptions) > 0


def test_requests_that_draw_get_no_drafts_and_the_same_tokens(with_drafter: Any) -> None:
    drawn = {"temperature": 0.9, "seed": 5}
    expected, _ = answers(tiny_engine(), **drawn)
    with_drafter(Replay(expected, 10**9))
    got, stats = answers(tiny_engine(), **drawn)
    assert got == expected
    assert stats.draft_tokens == 0


@OVERLAP
def test_an_answer_that_goes_round_is_looked_up(overlap: bool) -> None:
    """The real drafter: a tiny model's greedy answers become periodic sooner or later."""
    expected, plain = answers(tiny_engine("llama_tied_mha", overlap=overlap), max_tokens=70)
    engine = tiny_engine("llama_tied_mha", overlap=overlap, drafter="ngram", drafter_options={"num_tokens": 4})
    assert engine.info.policies["drafter"] == "ngram"
    got, stats = answers(engine, max_tokens=70)
    assert got == expected
    assert stats.accepted_draft_tokens > 0
    assert stats.steps < plain.steps


# -- over simulated K/V ---------------------------------------------------------------------------------------------


def client(drafter: str, **options: Any) -> Client:
    sizes = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return Client(EngineConfig(**{**sizes, **options}), drafter=drafter)


class Right(Oracle):
    """Always knows all that is asked for."""

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        return reference_tokens(token_ids, max_tokens, self._vocab_size)


@OVERLAP
def test_steps_that_overlap_are_drafted_from_the_token_on_the_device(overlap: bool) -> None:
    """A prompt, its first token, then 9 tokens at once: the first draft is made before that token is known."""
    config = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=1, max_num_batched_tokens=10, overlap=overlap)
    drafter = Right(VOCAB, lambda request_id: "", 0)
    engine = build_simulated_engine(config, vocab_size=VOCAB, drafter=drafter).engine
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(max_tokens=12, temperature=0.0)))
    sizes = []
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            sizes.append(len(output.new_token_ids))
            tokens += output.new_token_ids
    assert tokens == reference_tokens((1, 2, 3), 12, VOCAB)
    assert sizes == [1, 10, 1], "the budget holds a token and nine drafts; the last token needs none"
    assert engine.stats().steps == 3


@OVERLAP
def test_drafts_are_charged_to_the_budget(overlap: bool) -> None:
    """Three requests that all have more right drafts than there is room for: steps are full, and no fuller."""
    sizes: list[int] = []

    def step_time(output: SchedulerOutput) -> float:
        sizes.append(output.num_tokens)
        return 0.0

    config = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=3, max_num_batched_tokens=8, overlap=overlap)
    drafter = Right(VOCAB, lambda request_id: "", 0)
    engine = build_simulated_engine(config, vocab_size=VOCAB, drafter=drafter, step_time=step_time).engine
    for name in "abc":
        engine.add_request(Request(name, (1, 2), SamplingParams(max_tokens=20, temperature=0.0)))
    while engine.has_unfinished_requests():
        engine.step()
    assert max(sizes) == 8
    assert engine.stats().accepted_draft_tokens > 20


@OVERLAP
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_run_of_drafts_ends_where_the_request_does(reason: FinishReason, overlap: bool) -> None:
    prompt = [4, 5]
    right = reference_tokens(prompt, 30, VOCAB)
    assert EOS not in right[:9]
    mine = client("oracle", overlap=overlap)
    for index in range(20):
        stop = (right[8],) if reason is FinishReason.STOP else ()
        mine.add(str(index), prompt, max_tokens=9 if not stop else 30, stop_token_ids=stop)
    mine.finish()
    assert {e.reason for e in mine.done} == {reason}
    stats = mine.engine.stats()
    assert stats.accepted_draft_tokens > 0
    assert stats.generation_tokens == 20 * 9


def test_whole_blocks_of_accepted_drafts_are_cached_and_others_are_not() -> None:
    """Every second answer goes on from the one before: what it finds must be what was computed for it."""
    mine = client("oracle", num_blocks=200)
    prompt = [3, 1, 4]
    for turn in range(8):
        done = mine.add(str(turn), prompt, max_tokens=11, ignore_eos=True)
        mine.finish_open()
        last = mine.done[-1].last
        assert last is not None
        # All tokens before but the last one sampled were computed.
        assert last.num_cached_tokens == max(len(prompt) - 2, 0) // 4 * 4 if turn else True
        prompt = [*prompt, *done.tokens, turn]
    assert mine.engine.stats().accepted_draft_tokens > 0
    mine.finish()


@OVERLAP
def test_guesses_that_make_no_sense_are_dropped_and_counted(overlap: bool) -> None:
    mine = client("malicious", overlap=overlap)
    for index in range(12):
        mine.add(str(index), [index, 2, 3], max_tokens=20, ignore_eos=True)
    mine.finish()
    stats = mine.engine.stats()
    assert stats.rejected_proposals > 20
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0


@OVERLAP
def test_nobody_is_preempted_for_drafts(overlap: bool) -> None:
    """Two requests that fill the pool to the last block: drafts find no room at the end, and nobody has to go."""
    mine = client("oracle", num_blocks=10, max_num_seqs=2, prefix_cache="none", overlap=overlap)
    for name in "ab":
        mine.add(name, [ord(name) % VOCAB, 2, 3], max_tokens=17, ignore_eos=True)
    mine.finish()
    stats = mine.engine.stats()
    assert stats.num_preemptions == 0
    assert stats.accepted_draft_tokens > 0


@pytest.mark.parametrize("steps", range(6))
def test_a_request_that_ends_early_takes_its_drafts_along(steps: int) -> None:
    mine = client("oracle", prefix_cache="none")
    mine.add("gone", [1, 2, 3], max_tokens=60, ignore_eos=True)
    mine.add("stays", [3, 2, 1], max_tokens=60, ignore_eos=True)
    for _ in range(steps):
        mine.step()
    if "gone" in mine.open:
        mine.abort("gone")
    mine.add("gone", [7, 8, 9], max_tokens=9, ignore_eos=True)
    mine.finish()


class Raises(Right):
    """Knows the answers of some requests, and fails for the others."""

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        if request_id == "bad":
            raise ZeroDivisionError("no idea")
        return super().propose(request_id, token_ids, max_tokens, num_pending)

    def on_request_finished(self, request_id: str) -> None:
        raise OSError("never mind")


@OVERLAP
def test_a_drafter_that_raises_costs_nobody_anything_but_drafts(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=2, max_num_batched_tokens=10, overlap=overlap)
    engine = build_simulated_engine(config, vocab_size=VOCAB, drafter=Raises(VOCAB, lambda request_id: "", 0)).engine
    tokens: dict[str, list[int]] = {"bad": [], "good": []}
    for name in tokens:
        engine.add_request(Request(name, (1, 2, 3), SamplingParams(max_tokens=12, temperature=0.0)))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.check_idle()
    assert tokens["bad"] == tokens["good"] == reference_tokens((1, 2, 3), 12, VOCAB)
    stats = engine.stats()
    assert stats.accepted_draft_tokens > 0
    assert stats.rejected_proposals > 2
    assert [record.getMessage().split(" failed")[0] for record in caplog.records] == ["the drafter Raises"]
    assert "no idea" in caplog.text


@OVERLAP
def test_one_token_at_a_time_is_drafted_too(overlap: bool) -> None:
    """Also while the last token is on the device still, which a guess then begins with."""
    options = {"num_tokens": 1, "min_ngram": 1}
    engine = tiny_engine("llama_tied_mha", overlap=overlap, drafter="ngram", drafter_options=options)
    assert answers(engine, max_tokens=70)[1].accepted_draft_tokens > 0


def test_a_step_checks_sixteen_at_most_and_fewer_where_others_wait_for_blocks() -> None:
    config = EngineConfig(num_blocks=20, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, overlap=False)
    drafter = Right(VOCAB, lambda request_id: "", 0)
    engine = build_simulated_engine(config, vocab_size=VOCAB, drafter=drafter).engine
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    counts: list[int] = []
    while engine.has_unfinished_requests() and len(counts) < 8:
        counts += [len(output.new_token_ids) for output in engine.step()]
        if len(counts) == 2:
            # The 5 blocks of "a" leave too few for it: it waits, and "a" guesses only what its own blocks hold.
            engine.add_request(Request("b", (1, 2, 3) * 20, SamplingParams(max_tokens=1, temperature=0.0)))
    assert counts[:2] == [1, 17]
    assert counts[2:] == [4] * 6


@pytest.mark.parametrize("guess", [{1, 2}, {1: 1}, np.array([1, 2]), "ab", None, [1.0]], ids=str)
def test_what_is_no_sequence_of_token_ids_is_dropped_and_counted(guess: Any) -> None:
    class Odd(Right):
        def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Any:
            return guess

    config = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=1, max_num_batched_tokens=10)
    engine = build_simulated_engine(config, vocab_size=VOCAB, drafter=Odd(VOCAB, lambda request_id: "", 0)).engine
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0)))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats().draft_tokens == 0
    assert engine.stats().rejected_proposals > 0
