"""The runner on a real model: steps built ahead feed on tokens still on the device, and give the same as one by one."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import msgspec
import pytest

from mlx_engine.attention.gather import GatherBackend
from mlx_engine.model_runner import MLXModelRunner
from mlx_engine.paged_model import PagedModel
from mlx_engine.types import SamplingParams, ScheduledSequence, SchedulerOutput
from tests.parity.tiny_models import TINY, VOCAB, build

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.3, top_k=50)
TABLES = {"a": [3, 1, 4, 2], "b": [8, 7, 6, 5], "c": [9, 10, 11, 12]}
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [300], "c": [11, 12]}


@pytest.fixture
def runner() -> MLXModelRunner:
    return make_runner()


def make_runner(decode: Literal["auto", "paged_matmul", "gather_sdpa"] = "auto") -> MLXModelRunner:
    model = PagedModel(build(TINY["qwen3"]))
    backend = GatherBackend(decode=decode)
    backend.initialize(model.layers, 16, 4, mx.float32)
    return MLXModelRunner(model, backend, block_size=4, vocab_size=VOCAB)


def part(
    name: str, start: int, tokens: list[int], *, count: int = 0, sampling: SamplingParams = GREEDY, samples: bool = True
) -> ScheduledSequence:
    """One sequence's part of a step; no tokens: the one that is still on the device."""
    return ScheduledSequence(name, start, len(tokens) or 1, tokens, TABLES[name], samples, count, sampling, ord(name))


def run(runner: MLXModelRunner, *parts: ScheduledSequence) -> dict[str, int]:
    handle = runner.execute_model(SchedulerOutput(1, parts))
    handle.launch()
    return dict(handle.wait().sampled_token_ids)


def one_by_one(runner: MLXModelRunner, name: str, count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """A request alone, each token fed from the host."""
    tokens = list(PROMPTS[name])
    start = 0
    for index in range(count):
        new = part(name, start, tokens[start:], count=index, sampling=sampling)
        start = len(tokens)
        tokens.append(run(runner, new)[name])
    return tokens[len(PROMPTS[name]) :]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_tokens_fed_back_on_the_device_are_those_fed_from_the_host(
    runner: MLXModelRunner, sampling: SamplingParams
) -> None:
    """The order of rows changes from step to step, a sequence joins, and one leaves."""
    want = {name: one_by_one(runner, name, 4, sampling) for name in "abc"}
    got: dict[str, list[int]] = {name: [] for name in "abc"}
    plan = [
        [part("a", 0, PROMPTS["a"], sampling=sampling), part("b", 0, PROMPTS["b"], sampling=sampling)],
        [part("b", 1, [], count=1, sampling=sampling), part("a", 5, [], count=1, sampling=sampling)],
        [
            part("c", 0, PROMPTS["c"], sampling=sampling),
            part("a", 6, [], count=2, sampling=sampling),
            part("b", 2, [], count=2, sampling=sampling),
        ],
        [part("c", 2, [], count=1, sampling=sampling), part("b", 3, [], count=3, sampling=sampling)],
    ]
    before = None
    for parts in plan:
        # As the engine does: built while the one before runs, launched when that is done.
        handle = runner.execute_model(SchedulerOutput(1, tuple(parts)))
        for name, token in (before.wait().sampled_token_ids if before is not None else {}).items():
            got[name].append(token)
        handle.launch()
        before = handle
    assert before is not None
    for name, token in before.wait().sampled_token_ids.items():
        got[name].append(token)
    assert got == {"a": want["a"][:3], "b": want["b"][:4], "c": want["c"][:2]}


def test_a_step_that_samples_nothing_still_stores_its_tokens(runner: MLXModelRunner) -> None:
    want = one_by_one(runner, "a", 1)
    # Other blocks than before, so that nothing can be left over.
    table = [13, 14]
    first = ScheduledSequence("x", 0, 3, PROMPTS["a"][:3], table, False, 0, GREEDY, 0)
    last = ScheduledSequence("x", 3, 2, PROMPTS["a"][3:], table, True, 0, GREEDY, 0)
    assert run(runner, first) == {}
    assert run(runner, last) == {"x": want[0]}


def test_samples_are_of_the_rows_that_sample_only(runner: MLXModelRunner) -> None:
    want = one_by_one(runner, "b", 1)
    result = run(runner, part("a", 0, PROMPTS["a"], samples=False), part("b", 0, PROMPTS["b"]))
    assert result == {"b": want[0]}


def test_a_result_carries_the_number_of_its_step(runner: MLXModelRunner) -> None:
    handle = runner.execute_model(SchedulerOutput(41, (part("b", 0, PROMPTS["b"]),)))
    handle.launch()
    assert handle.wait().step == 41


def test_dispatch_counts_are_the_backends(runner: MLXModelRunner) -> None:
    run(runner, part("a", 0, PROMPTS["a"]), part("b", 0, PROMPTS["b"]))
    counts = runner.dispatch_counts()
    assert counts["chunk_tiled"] == 3
    assert sum(counts.values()) == 6


@pytest.mark.parametrize("decode", ["paged_matmul", "gather_sdpa"])
def test_drafts_give_what_the_model_says_after_each_of_them(decode: Literal["paged_matmul", "gather_sdpa"]) -> None:
    """Right drafts of one sequence after a token on the device, wrong ones of another, beside a chunk."""
    mine = make_runner(decode)
    want = {name: one_by_one(mine, name, 5) for name in "abc"}
    run(mine, part("a", 0, PROMPTS["a"]), part("b", 0, PROMPTS["b"]))
    right = part("a", 5, [], count=1)
    drafted = msgspec.structs.replace(right, draft_token_ids=want["a"][1:4])
    wrong = msgspec.structs.replace(part("b", 1, [want["b"][0]], count=1), draft_token_ids=[want["b"][1], 7, 8])
    handle = mine.execute_model(SchedulerOutput(1, (part("c", 0, PROMPTS["c"]), drafted, wrong)))
    handle.launch()
    result = handle.wait()
    assert result.sampled_token_ids == {"a": want["a"][1], "b": want["b"][1], "c": want["c"][0]}
    assert result.after_drafts["a"] == want["a"][2:5]
    assert result.after_drafts["b"][0] == want["b"][2]
    assert len(result.after_drafts["b"]) == 3
    # K/V of wrong drafts is written over; what was right is there already.
    after = run(mine, part("b", 3, [want["b"][2]], count=3), part("a", 8, [want["a"][3]], count=4))
    assert after == {"b": want["b"][3], "a": want["a"][4]}
