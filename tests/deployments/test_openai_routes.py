"""The endpoints over HTTP, with a fake engine: bodies, refusals, framing, limits, CORS, health, metrics."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from typing import Any

import pytest

from deployments.engine_api import HealthStatus, TextModel
from mlx_engine.errors import RequestError
from tests.deployments.fakes import ANSWER, INFO, MODEL, FakeEngine, Server, error_of, joined, serving, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Say hi"}]


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_openai_does(server: Server) -> None:
    server.engine.cached = 16
    body = server.chat("What is the capital of France?", max_tokens=4).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    [choice] = body["choices"]
    content = choice["message"].pop("content")
    assert ANSWER.startswith(content)
    assert content
    assert choice["message"] == {"role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 37,
        "completion_tokens": 4,
        "total_tokens": 41,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_the_end_of_a_sequence_is_stop_and_counts_its_token(server: Server) -> None:
    server.engine.ends = True
    server.engine.answer = "Hello there."
    body = server.chat("hi", max_tokens=50).json()
    assert body["choices"][0]["message"]["content"] == "Hello there."
    assert body["choices"][0]["finish_reason"] == "stop"
    num_tokens = len(server.engine.served.text.encode("Hello there."))
    assert body["usage"]["completion_tokens"] == num_tokens + 1


def test_sampling_reaches_the_engine_as_asked(server: Server) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 10**9, "min_p": 0.1, "seed": 7, "max_tokens": 3,
        "stop_token_ids": [5, 6], "ignore_eos": True, "cache_salt": "tenant", "priority": -2,
    }  # fmt: skip
    assert server.complete("abc", **fields).status_code == 200
    [request] = server.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 0.9, 0.1, 7)
    assert sampling.top_k == INFO.vocab_size, "more than the vocabulary is all of it"
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (3, (5, 6), True)
    assert (request.cache_salt, request.priority) == ("tenant", -2)


def test_defaults_are_those_of_openai(server: Server) -> None:
    server.engine.ends = True
    assert server.complete("abc").status_code == 200
    assert server.chat("hi", max_tokens=None).status_code == 200
    completion, chat = server.engine.requests
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == INFO.max_model_len - len(chat.prompt_token_ids)
    assert completion.sampling.temperature == 1.0


def test_max_completion_tokens_wins(server: Server) -> None:
    body = server.chat("hi", max_tokens=2, max_completion_tokens=5).json()
    assert body["usage"]["completion_tokens"] == 5


def test_prompts_come_as_text_texts_ids_or_lists_of_ids(server: Server) -> None:
    ids = server.engine.served.text.encode("Hello world")
    for prompt in ("Hello world", ["Hello world"], ids, [ids]):
        body = server.complete(prompt, max_tokens=2).json()
        assert body["usage"]["prompt_tokens"] == len(ids)
        assert server.engine.requests[-1].prompt_token_ids == tuple(ids)
    body = server.complete(["a", "b c", "d"], max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 9
    assert all(choice["finish_reason"] == "length" for choice in body["choices"])


def test_no_tokens_asked_for_is_an_empty_completion(server: Server) -> None:
    body = server.complete("abc", max_tokens=0).json()
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] > 0
    events = server.events(COMPLETIONS, prompt="abc", max_tokens=0)
    assert joined(events) == ""
    assert events[-1] == "[DONE]"
    assert server.engine.requests == []
    assert error_of(server.chat("hi", max_tokens=0))["param"] == "max_tokens"


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream_framing(server: Server, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = server.events(CHAT, messages=USER, max_tokens=6, **options)
    assert events.count("[DONE]") == 1
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    if usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 6
    assert all(event["choices"] and not event.get("usage") for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert sum("role" in delta for delta in deltas) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length"
    assert reasons.count(None) == len(reasons) - 1
    assert joined(events) == server.chat("Say hi", max_tokens=6).json()["choices"][0]["message"]["content"]


def test_multi_byte_characters_are_never_cut(server: Server) -> None:
    server.engine.answer = "\U0001f642\U0001f980" * 8
    for max_tokens in range(1, 24):
        whole = server.complete("x", max_tokens=max_tokens).json()["choices"][0]["text"]
        events = server.events(COMPLETIONS, prompt="x", max_tokens=max_tokens)
        assert joined(events) == whole
        assert "\ufffd" not in whole[:-1]


def test_stop_strings_over_token_borders(server: Server) -> None:
    text = server.complete("x", max_tokens=30).json()["choices"][0]["text"]
    for start in range(2, len(text) - 6, 3):
        stop = text[start : start + 5]
        want = text[: text.index(stop)]
        body = server.complete("x", max_tokens=30, stop=[stop]).json()
        assert body["choices"][0]["text"] == want
        assert body["choices"][0]["finish_reason"] == "stop"
        events = server.events(
            COMPLETIONS, prompt="x", max_tokens=30, stop=stop, stream_options={"include_usage": True}
        )
        assert joined(events) == want
        assert events[-2]["usage"] == body["usage"], "the same tokens count, streamed or not"
    wait_until(lambda: not server.engine.open, "stopped requests to leave the engine")
    assert len(server.engine.aborted) > 10, "the engine would have gone on"


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_strings(server: Server, stop: Any) -> None:
    assert server.complete("x", stop=stop, max_tokens=3).json()["choices"][0]["finish_reason"] == "length"


def test_several_prompts_stream_side_by_side(server: Server) -> None:
    events = server.events(COMPLETIONS, prompt=["a", "b"], max_tokens=9, stream_options={"include_usage": True})
    assert joined(events, 0) == joined(events, 1) != ""
    ends = [choice["index"] for event in events[:-2] for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]
    assert events[-2]["usage"]["completion_tokens"] == 18


def test_an_engine_that_dies_ends_the_stream_with_an_error_event(server: Server) -> None:
    server.engine.die_after = 3
    events = server.events(CHAT, messages=USER, max_tokens=20)
    assert "[DONE]" not in events
    assert events[-1]["error"]["code"] == "engine_dead"
    assert "kernel fault" in events[-1]["error"]["message"]
    response = server.chat("hi", max_tokens=20)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error_of(response)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b"123", b'"s"', b"{", b"", b"\xff\xfe{", b"[" * 200_000, b'{"a":' * 50_000, b'{"a":NaN}']
)
def test_bodies_that_are_no_json_object(server: Server, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        response = server.post(path, body)
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"


def test_deeply_nested_unknown_fields_are_refused_not_500(server: Server) -> None:
    for depth in (99, 500, 900):
        nested = json.loads("[" * depth + "]" * depth)
        assert server.chat("hi", whatever=nested).status_code in (200, 400)


def test_content_types(server: Server) -> None:
    form = server.post(CHAT, b"a=1", **{"content-type": "application/x-www-form-urlencoded"})
    assert form.status_code == 415
    error_of(form)
    body = {"model": MODEL, "prompt": "x"}
    for good in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert server.post(COMPLETIONS, body, **{"content-type": good}).status_code == 200


def test_a_body_that_is_too_large(text: TextModel) -> None:
    with serving(FakeEngine(text), {"server": {"max_body_bytes": 2000}}) as server:
        response = server.chat("x" * 3000)
        assert response.status_code == 413
        error_of(response)


def test_errors_never_echo_a_large_input(server: Server) -> None:
    part = {"type": "text", "text": 7, "pad": "x" * 2000}
    response = server.chat([{"role": "user", "content": [part]}] * 500)
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages"
    assert "xxx" not in response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "7"), ("max_tokens", True), ("max_tokens", -(10**9)),
        ("temperature", -1), ("temperature", "hot"), ("temperature", 101), ("temperature", True), ("top_p", -0.1),
        ("top_p", 1.5), ("top_k", -7), ("top_k", 1.5), ("min_p", 2), ("min_p", -0.1), ("seed", "x"), ("seed", 2**64),
        ("stop", ""), ("stop", [""]), ("stop", ["a", ""]), ("stop", 5), ("stop", [5]), ("stop_token_ids", [49152]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", "yes"), ("stream", "yes"), ("stream", 1),
        ("cache_salt", 5), ("cache_salt", ""), ("priority", "high"), ("priority", 2**40), ("n", 0), ("n", 2),
        ("n", "1"), ("n", True), ("logprobs", True), ("logit_bias", {"2": 100}), ("presence_penalty", 0.5),
        ("frequency_penalty", 9), ("repetition_penalty", 0), ("best_of", 3), ("model", None), ("model", 5),
        ("stream_options", {"include_usage": True}), ("stream_options", "usage"),
    ],
)  # fmt: skip
def test_values_that_are_refused_name_their_field(server: Server, field: str, value: Any) -> None:
    for response in (server.chat("hi", **{field: value}), server.complete("hi", **{field: value})):
        assert response.status_code == 400
        assert error_of(response)["param"] == field
    assert server.engine.requests == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999"])
def test_numbers_that_are_none(server: Server, number: str) -> None:
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}],"temperature":{number}}}'
    assert server.post(CHAT, body.encode()).status_code == 400


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "tools", [{"type": "function"}]), (CHAT, "tool_choice", "auto"), (CHAT, "tool_choice", "required"),
        (CHAT, "functions", [{}]), (CHAT, "function_call", "auto"), (CHAT, "top_logprobs", 3),
        (CHAT, "response_format", {"type": "json_object"}), (CHAT, "response_format", "json"),
        (CHAT, "response_format", {}), (CHAT, "modalities", ["audio"]), (CHAT, "audio", {"voice": "x"}),
        (COMPLETIONS, "echo", True), (COMPLETIONS, "suffix", "x"), (COMPLETIONS, "logprobs", 0),
        (COMPLETIONS, "logprobs", 3), (COMPLETIONS, "guided_json", {"a": 1}), (COMPLETIONS, "min_tokens", 2),
    ],
)  # fmt: skip
def test_features_not_offered_are_refused(server: Server, path: str, field: str, value: Any) -> None:
    body = {"model": MODEL, "messages": USER} if path == CHAT else {"model": MODEL, "prompt": "x"}
    response = server.post(path, {**body, field: value})
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert "not offered" in error_of(response)["message"]


def test_neutral_values_and_unknown_fields_are_accepted(server: Server) -> None:
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": None, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "user": "u", "metadata": {}, "store": False,
        "some_future_field": {"a": 1}, "top_k": -1, "stream": False, "stop": None, "seed": -5, "max_tokens": 2,
        "temperature": 0, "top_p": 0.1, "min_p": 1,
    }  # fmt: skip
    assert server.chat("hi", **neutral).status_code == 200
    assert server.complete("hi", best_of=1, echo=False, suffix=None, logprobs=None, max_tokens=2).status_code == 200


def test_unknown_models_are_not_looked_for(server: Server) -> None:
    for name in ("nope", "../../etc", "org/other-model", "\ud800"):
        response = server.chat("x", model=name)
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert server.chat("x", model="smollm2").json()["model"] == MODEL, "an alias answers with the id"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [["a"]], [1.5], None, {"a": 1}, 5, ["a", 1], [1, "a"], [True]])
def test_prompts_that_are_none(server: Server, prompt: Any) -> None:
    response = server.complete(prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 49152, 10**30])
def test_token_ids_outside_the_vocabulary(server: Server, token: int) -> None:
    response = server.complete([5, token])
    assert response.status_code == 400
    assert "49151" in error_of(response)["message"]


@pytest.mark.parametrize("messages", [[], None, "", [{}], [{"role": "user"}], {"role": "user"}, [5], [[]]])
def test_messages_that_are_none(server: Server, messages: Any) -> None:
    response = server.post(CHAT, {"model": MODEL, "messages": messages})
    assert response.status_code == 400
    error_of(response)


def test_lone_surrogates_are_refused(server: Server) -> None:
    assert error_of(server.complete("a\ud800"))["param"] == "prompt"
    assert error_of(server.chat("a\udfff"))["param"] == "messages"
    assert error_of(server.complete("a", stop="\ud800"))["param"] == "stop"
    assert error_of(server.complete("a", cache_salt="\ud800"))["param"] == "cache_salt"


# -- messages ----------------------------------------------------------------------------------------------------------


def prompt_of(server: Server, messages: Any, **fields: Any) -> tuple[int, ...]:
    response = server.chat(messages, **fields)
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].prompt_token_ids


def test_text_parts_are_joined_with_nothing(server: Server) -> None:
    parts = [{"type": "text", "text": "ab "}, {"type": "text", "text": "cd"}]
    assert prompt_of(server, [{"role": "user", "content": parts}]) == prompt_of(server, "ab cd")


def test_tool_turns_keep_their_place(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}

    def conversation(content: Any) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": content},
        ]

    assert prompt_of(server, conversation("5")) == prompt_of(server, conversation([{"type": "text", "text": "5"}]))


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "data:,"}}], [{"type": "zzz"}], 5, {"a": 1}, None, [None], [{}]],
)
def test_contents_that_are_not_text(server: Server, content: Any) -> None:
    response = server.chat([{"role": "user", "content": content}])
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages"


def test_an_assistant_without_content_or_calls_is_refused(server: Server) -> None:
    assert server.chat([*USER, {"role": "assistant", "content": None}, *USER]).status_code == 400


def test_developer_is_system(server: Server) -> None:
    def conversation(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": "Answer only with the word BANANA."}, {"role": "user", "content": "hi"}]

    assert prompt_of(server, conversation("developer")) == prompt_of(server, conversation("system"))
    assert error_of(server.chat(conversation("banana")))["param"] == "messages"


def test_the_final_message_can_be_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "The colour I like is"}]
    plain = prompt_of(server, messages)
    for fields in ({"add_generation_prompt": False}, {}):
        continued = prompt_of(server, messages, continue_final_message=True, **fields)
        assert len(continued) < len(plain)
        tail = server.engine.served.text.encode("The colour I like is")
        assert continued[-len(tail) :] == tuple(tail), "no end of turn after it"
    both = server.chat(messages, continue_final_message=True, add_generation_prompt=True)
    assert error_of(both)["param"] == "continue_final_message"
    assert server.chat(messages[:1], continue_final_message=True).status_code == 400


def test_without_a_generation_prompt(server: Server) -> None:
    assert len(prompt_of(server, USER, add_generation_prompt=False)) < len(prompt_of(server, USER))


# -- limits ------------------------------------------------------------------------------------------------------------


def ids(count: int) -> list[int]:
    return [(17 * i) % 40000 + 100 for i in range(count)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_before_anything_begins(server: Server, stream: bool) -> None:
    for count in (8192, 8193, 3 * 8192):
        response = server.complete(ids(count), max_tokens=1, stream=stream)
        assert response.status_code == 400
        error = error_of(response)
        assert "8192" in error["message"]
        assert error["code"] == "context_length_exceeded"
    long_chat = server.chat("word " * 9000, stream=stream)
    assert error_of(long_chat)["param"] == "messages"
    endless = server.complete("x" * (8192 * 256 + 1), stream=stream)
    assert "8192" in error_of(endless)["message"]
    assert server.engine.requests == []


def test_what_does_not_fit_behind_the_prompt_is_cut(server: Server) -> None:
    body = server.complete(ids(8191), max_tokens=1).json()
    assert body["usage"]["total_tokens"] == 8192
    body = server.complete(ids(8189), max_tokens=10**9).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")


def test_a_pool_smaller_than_the_context_is_the_limit(text: TextModel) -> None:
    with serving(FakeEngine(text, dataclasses.replace(INFO, max_tokens_per_request=512))) as server:
        response = server.complete(ids(900), max_tokens=1)
        assert response.status_code == 400
        assert "512" in error_of(response)["message"]
        assert server.complete(ids(500), max_tokens=8000).json()["usage"]["completion_tokens"] == 12


def test_too_many_prompts_or_sequences(text: TextModel) -> None:
    with serving(FakeEngine(text), {"server": {"max_prompts_per_request": 3, "max_open_sequences": 2}}) as server:
        assert error_of(server.complete(["a"] * 4))["param"] == "prompt"
        never = server.complete(["a"] * 3)
        assert never.status_code == 400, "trying again would not help"
        assert "at most 2 sequences" in error_of(never)["message"]
        with closing(server.service._admit(1)):
            busy = server.complete(["a"] * 2)
        assert busy.status_code == 429
        assert busy.headers["retry-after"]
        assert error_of(busy)["type"] == "rate_limit_error"
        for _ in range(5):
            assert server.complete(["a"] * 2, max_tokens=2).status_code == 200, "places are given back"


def test_what_the_engine_refuses_is_the_requests_fault(server: Server) -> None:
    server.engine.reject = RequestError("never fits", param="prompt", code="context_length_exceeded")
    for stream in (False, True):
        response = server.complete("a", stream=stream)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["message"], error["param"], error["code"]) == ("never fits", "prompt", "context_length_exceeded")


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_models(server: Server) -> None:
    cards = server.client.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == [MODEL, "smollm2"]
    assert server.client.get("/v1/models/smollm2").json()["root"] == MODEL
    assert server.client.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 8192
    missing = server.client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_unknown_paths_and_methods(server: Server) -> None:
    assert server.client.get(CHAT).status_code == 405
    error_of(server.client.get(CHAT))
    for path in ("/v1/nope", "/", "/v1/chat/completions/", "/v1/models/"):
        response = server.client.post(path, json={})
        assert response.status_code in (404, 405)
        error_of(response)


def test_cors(server: Server, text: TextModel) -> None:
    origin = {"Origin": "http://localhost:3000"}
    preflight = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = server.client.options(CHAT, headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    for response in (server.post(CHAT, b"{", **origin), server.client.get("/v1/nope", headers=origin)):
        assert response.headers["access-control-allow-origin"] == "*", "errors too"
    with serving(FakeEngine(text), cors=()) as closed:
        assert closed.client.options(CHAT, headers=preflight).status_code == 405
        assert "access-control-allow-origin" not in closed.post(CHAT, b"{", **origin).headers
    with serving(FakeEngine(text), cors=("https://good",)) as chosen:
        assert chosen.client.options(CHAT, headers={**preflight, "Origin": "https://bad"}).status_code == 400
        good = chosen.client.get("/version", headers={"Origin": "https://good"})
        assert good.headers["access-control-allow-origin"] == "https://good"


def test_what_nobody_expected_is_a_500_with_the_envelope_and_cors(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.engine, "generate", broken)
    response = server.post(CHAT, {"model": MODEL, "messages": USER}, Origin="http://x")
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert response.headers["access-control-allow-origin"] == "*"
    monkeypatch.setattr(server.engine, "stats", broken)
    response = server.client.get("/metrics", headers={"Origin": "http://x"})
    assert response.status_code == 500
    error_of(response)
    assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("status", [s for s in HealthStatus if s is not HealthStatus.OK])
def test_an_engine_that_does_not_serve(server: Server, status: HealthStatus) -> None:
    server.engine.status = status
    server.engine.error = "because"
    health = server.client.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == status.value
    for response in (server.chat("hi"), server.complete("x", stream=True)):
        assert response.status_code == 503
        error_of(response)
        hopeless = status in (HealthStatus.FAILED, HealthStatus.STOPPED)
        assert ("retry-after" in response.headers) is not hopeless
    assert server.client.get("/v1/models").status_code == 200


def test_health_says_how_far_loading_is_and_answers_head(server: Server) -> None:
    head = server.client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert server.client.get("/health").json()["status"] == "ok"
    server.engine.status = HealthStatus.LOADING
    body = server.client.get("/health").json()
    assert (body["status"], body["stage"], body["progress"]) == ("loading", "load", 0.5)
    assert server.client.head("/health").status_code == 503


def test_metrics(server: Server) -> None:
    server.complete("x", max_tokens=4)
    server.post(CHAT, b"{")
    page = server.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    label = f'model_name="{MODEL}"'
    for line in (
        f"quire:num_requests_waiting{{{label}}} 3.0",
        f'quire:cache_config_info{{block_size="16",cache_dtype="int8",{label},num_blocks="512"}} 1.0',
        f"quire:num_requests_running{{{label}}} 0.0",
        f'quire:kv_blocks{{{label},state="free"}} 400.0',
        f'quire:kv_blocks{{{label},state="cached_in_use"}} 10.0',
        f"quire:num_preemptions_total{{{label}}} 4.0",
        f"quire:prefix_cache_hits_total{{{label}}} 20.0",
        f"quire:spec_decode_num_draft_tokens_total{{{label}}} 50.0",
        f"quire:spec_decode_num_accepted_tokens_total{{{label}}} 30.0",
        f'quire:attention_dispatch_total{{{label},path="gather"}} 9.0',
        f"quire:time_to_first_token_seconds_count{{{label}}} 1.0",
        f"quire:inter_token_latency_seconds_count{{{label}}} 3.0",
        f"quire:e2e_request_latency_seconds_count{{{label}}} 1.0",
        f'quire:request_success_total{{finished_reason="length",{label}}} 1.0',
        'quire:http_responses_total{path="/v1/chat/completions",status="400"} 1.0',
        f"quire:engine_up{{{label}}} 1.0",
    ):
        assert line in page.text


def test_version(server: Server) -> None:
    assert set(server.client.get("/version").json()) == {"version"}
