from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from loadtest.load.words import WORDS, filler
from loadtest.load.workloads import (
    Call,
    Conversation,
    arrivals,
    intruder,
    mixed_lengths,
    shared_prefix,
    uniform,
    user_random,
)
from mlx_engine.models.resolve import resolve_model


def _take(calls: Iterator[Call], count: int) -> list[Call]:
    return list(itertools.islice(calls, count))


def test_the_same_user_asks_the_same_again_and_others_something_else() -> None:
    first = _take(uniform(user_random(7, 0, 3), 20, 8), 5)
    assert first == _take(uniform(user_random(7, 0, 3), 20, 8), 5)
    for other in ((8, 0, 3), (7, 1, 3), (7, 0, 4)):
        assert first != _take(uniform(user_random(*other), 20, 8), 5)


def test_prompts_are_as_long_as_asked_in_words() -> None:
    (call,) = _take(uniform(random.Random(0), 100, 64), 1)
    assert len((call.prompt or "").split()) == 100
    assert call.max_tokens == 64
    assert filler(random.Random(0), 0) in WORDS


def test_words_are_one_token_each_in_the_embedded_model() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model("embedded") / "tokenizer.json"))
    assert len(WORDS) == len(set(WORDS)) > 500
    assert all(len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1 for word in WORDS)


def test_users_share_the_system_prompts_and_nothing_else() -> None:
    calls = [
        call for number in range(4) for call in _take(shared_prefix(user_random(1, 0, number), 1, 2, 50, 10, 4), 20)
    ]
    systems = {(call.messages or ())[0]["content"] for call in calls}
    questions = {(call.messages or ())[1]["content"] for call in calls}
    assert len(systems) == 2
    assert len(questions) == len(calls)


def test_mixed_lengths_come_equally_often() -> None:
    calls = _take(mixed_lengths(random.Random(0), (3, 30), (4, 8)), 40)
    for num_input, num_output in itertools.product((3, 30), (4, 8)):
        mine = [call for call in calls if call.tag == f"{num_input} in {num_output} out"]
        assert len(mine) == 10
        assert all(len((call.prompt or "").split()) == num_input and call.max_tokens == num_output for call in mine)


def test_an_intruder_is_tagged() -> None:
    (call,) = _take(intruder(random.Random(0), 500), 1)
    assert call.tag == "intruder"
    assert len((call.prompt or "").split()) == 500


def _conversation(role: str) -> Conversation:
    return Conversation.start(
        random.Random(0),
        turns=3,
        prefix_tokens=20,
        input_tokens=5,
        tool_tokens=7,
        output_tokens=4,
        seed=0,
        tool_role=role,
    )


@pytest.mark.parametrize("role", ["tool", "user"])
def test_each_turns_prompt_begins_with_the_last_one(role: str) -> None:
    conversation = _conversation(role)
    before: list[object] = []
    for turn in range(3):
        call = conversation.next_call()
        messages = list(call.messages or ())
        assert call.tag == f"turn {turn + 1:02}"
        assert messages[: len(before)] == before
        before = messages
        conversation.take_answer(f"answer {turn}")
    assert [message["role"] for message in before] == ["system", "user", "assistant", role, "assistant", role]  # type: ignore[index]
    # And then it begins anew, with the same system prompt and another question.
    again = list(conversation.next_call().messages or ())
    assert len(again) == 2
    assert again[0] == before[0]
    assert again[1] != before[1]


def test_tool_results_answer_the_call_before_them() -> None:
    conversation = _conversation("tool")
    conversation.next_call()
    conversation.take_answer("let me look")
    *_, assistant, tool = conversation.next_call().messages or ()
    assert assistant["content"] == "let me look"
    assert tool["tool_call_id"] == assistant["tool_calls"][0]["id"]


def test_a_lost_answer_begins_the_conversation_anew() -> None:
    conversation = _conversation("tool")
    conversation.next_call()
    conversation.forget()
    assert conversation.next_call().tag == "turn 01"


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    gaps = list(itertools.islice(arrivals(random.Random(1), 4.0), 20_000))
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert variance == pytest.approx(mean**2, rel=0.1)
