"""Conformance of a Drafter: an engine over simulated K/V runs it, and its guesses are looked at one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_engine.config import EngineConfig
from mlx_engine.interfaces import Drafter
from mlx_engine.types import Request, SamplingParams
from plugins.simulator import build_simulated_engine, reference_tokens

_BLOCK_SIZE = 4
# So small that answers repeat n-grams of theirs, and lookups find something.
_VOCAB_SIZE = 4


class _Watched(Drafter):
    """Passes every call on to the drafter under test, and checks its answers."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.trace: list[object] = []  # every answer, to compare two runs
        self.num_finished = 0
        self.failure: Exception | None = None  # the first: an engine goes on without drafts

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        before = list(token_ids)
        with self._noted():
            guess = self._drafter.propose(request_id, token_ids, max_tokens, num_pending)
            assert list(token_ids) == before, "propose changed the token ids that it was given"
            assert isinstance(guess, Sequence), f"propose returned {type(guess).__name__}, not a sequence"
            assert len(guess) <= max_tokens, f"propose returned {len(guess)} tokens when asked for {max_tokens}"
            for token in guess:
                assert isinstance(token, int), f"propose returned {token!r}, which is no token id"
                assert 0 <= token < _VOCAB_SIZE, f"propose returned {token} for a vocabulary of {_VOCAB_SIZE}"
        self.trace.append((request_id, tuple(guess)))
        return guess

    def on_request_finished(self, request_id: str) -> None:
        self.num_finished += 1
        with self._noted():
            self._drafter.on_request_finished(request_id)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise


def check_drafter(factory: Callable[[], Drafter], *, seeds: Iterable[int] = range(12)) -> None:
    """Works out drafters built by factory(), each in engines of several sizes, overlapped and not.

    Requests repeat their ids, are aborted and preempted. Raises AssertionError for a guess that the engine would drop,
    an exception, token ids that were changed, an answer that isn't the reference's, or two runs that differ.
    """
    for seed in seeds:
        try:
            first = _run(factory(), seed)
            assert first == _run(factory(), seed), "two runs with the same requests differ"
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc


def _run(drafter: Drafter, seed: int) -> list[object]:
    rng = random.Random(seed)
    watched = _Watched(drafter)
    num_blocks, max_num_seqs = rng.choice([16, 40]), rng.choice([1, 3, 8])
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": _BLOCK_SIZE,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([1, 8, 64]),
        "overlap": rng.random() < 0.5,
    }
    engine = build_simulated_engine(EngineConfig(**options), vocab_size=_VOCAB_SIZE, drafter=watched).engine
    todo = _requests(rng, num_blocks)
    num_requests = len(todo)
    answers: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    while todo or engine.has_unfinished_requests():
        # An id may come again as soon as its request has ended.
        if todo and todo[0].request_id not in expected and rng.random() < 0.5:
            request = todo.pop(0)
            name = request.request_id
            engine.add_request(request)
            expected[name] = reference_tokens(request.prompt_token_ids, request.sampling.max_tokens, _VOCAB_SIZE)
            answers[name] = []
        if expected and rng.random() < 0.02:
            name = rng.choice(sorted(expected))
            engine.abort_request(name)
            del expected[name]
        outputs = engine.step()
        if isinstance(watched.failure, AssertionError):
            raise watched.failure
        if watched.failure is not None:
            raise AssertionError(f"the drafter raised {watched.failure!r}") from watched.failure
        for output in outputs:
            answers[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                right = expected.pop(output.request_id)
                assert answers[output.request_id] == right, f"{output.request_id} got another answer with drafts"
    engine.check_idle()
    assert watched.num_finished == num_requests
    watched.trace.append(engine.stats().accepted_draft_tokens)
    return watched.trace


def _requests(rng: random.Random, num_blocks: int) -> list[Request]:
    """Random requests under few names, each short enough for the pool."""
    longest = num_blocks * _BLOCK_SIZE
    requests = []
    for _ in range(rng.choice([5, 15, 30])):
        num_prompt = rng.randrange(1, longest // 2)
        prompt = tuple(rng.choices(range(_VOCAB_SIZE), k=num_prompt))
        sampling = SamplingParams(max_tokens=rng.randrange(1, longest // 2), temperature=0.0, ignore_eos=True)
        requests.append(Request(f"request-{rng.randrange(8)}", prompt, sampling))
    return requests
