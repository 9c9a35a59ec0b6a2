"""How servers answer: as they should, and in each way that breaks a stream."""

from __future__ import annotations

import json

from tests.loadtest.sse_server import Exchange, Respond


async def answer(exchange: Exchange) -> None:
    await exchange.start()
    for _ in range(exchange.request["max_tokens"]):
        await exchange.text("x")
    await exchange.text("", "length")
    await exchange.usage(3, exchange.request["max_tokens"], 0)
    await exchange.event("[DONE]")
    await exchange.finish()


async def refuse(exchange: Exchange) -> None:
    await exchange.start(503)
    await exchange.send(b'{"error": {"message": "loading"}}')
    await exchange.finish()


async def error_event(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("x")
    await exchange.event({"error": {"message": "the engine died"}})
    await exchange.event("[DONE]")
    await exchange.finish()


async def no_done(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("x", "stop")
    await exchange.finish()


async def no_usage(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("x", "stop")
    await exchange.event("[DONE]")
    await exchange.finish()


async def no_reason(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("x")
    await exchange.usage(1, 1, 0)
    await exchange.event("[DONE]")
    await exchange.finish()


async def garbage(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event("{not json")
    await exchange.finish()


async def break_off(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("x")
    raise ConnectionError


async def stall(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("x")
    await exchange.gone()


def odd(event: object) -> Respond:
    """A response with an event that is JSON but nothing that OpenAI's API knows."""

    async def respond(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.text("x", "stop")
        await exchange.event(json.dumps(event))
        await exchange.event("[DONE]")
        await exchange.finish()

    return respond


# Each with what a client must say of it.
BROKEN: list[tuple[Respond, str]] = [
    (refuse, "HTTP 503: .*loading"),
    (error_event, "the engine died"),
    (no_done, "without .DONE."),
    (no_usage, "without usage"),
    (no_reason, "without a finish_reason"),
    (garbage, "not JSON"),
    (break_off, "RemoteProtocolError"),
    (odd({"choices": ["x"]}), "not of OpenAI's form"),
    (odd({"choices": [{"delta": 5}]}), "not of OpenAI's form"),
    (odd({"usage": [1]}), "not of OpenAI's form"),
    (odd({"usage": {"completion_tokens": -8}}), "completion_tokens is -8"),
    (odd({"usage": {"completion_tokens": "8"}}), "completion_tokens is '8'"),
    (odd({"usage": {"completion_tokens": 1, "prompt_tokens_details": [1]}}), "not of OpenAI's form"),
]
