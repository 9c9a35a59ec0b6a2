"""An SSE server of known timing, as a process of its own: `python tests/loadtest/timed_server.py --ttft 0.2 …`.

It prints its URL. GET /truth says how long its pauses really were: on a busy machine a sleep is longer than asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from statistics import mean, median

from tests.loadtest.sse_server import Exchange, SSEServer


class Truth:
    """What the server really did."""

    def __init__(self) -> None:
        self.ttft: list[float] = []  # seconds from the whole request to the first text
        self.mean_itl: list[float] = []  # of each request
        self.tokens = 0

    def page(self) -> str:
        """As JSON."""
        return json.dumps({"ttft": median(self.ttft), "itl": mean(self.mean_itl), "requests": len(self.ttft),
                           "tokens": self.tokens})  # fmt: skip


async def answer(exchange: Exchange, args: argparse.Namespace, truth: Truth, number: int) -> None:
    """One response."""
    began = time.perf_counter()
    breaks = args.break_every and number % args.break_every == 0
    await exchange.start()
    # A role first, as chat servers send it: no token, so it must not count as the first.
    await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    await asyncio.sleep(args.ttft)
    times = []
    for index in range(args.tokens):
        if index:
            await asyncio.sleep(args.itl)
        if breaks and index == args.tokens // 2:
            raise ConnectionError
        await exchange.text("x ")
        times.append(time.perf_counter())
    await exchange.text("", "length")
    # Two tokens an event: usage is what counts.
    await exchange.usage(10, 2 * args.tokens, 0)
    await exchange.event("[DONE]")
    await exchange.finish()
    truth.ttft.append(times[0] - began)
    truth.mean_itl.append((times[-1] - times[0]) / max(1, args.tokens - 1))
    truth.tokens += 2 * args.tokens


async def serve(args: argparse.Namespace) -> None:
    """Serves until its parent is gone."""
    truth, count = Truth(), 0

    async def respond(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        await answer(exchange, args, truth, count)

    async with SSEServer(respond) as server:
        server.pages["/truth"] = truth.page
        models = [] if args.no_models else [{"id": "timed"}]
        server.pages["/v1/models"] = lambda: json.dumps({"data": models})
        server.delays["/metrics"] = args.metrics_delay
        print(server.url, flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ttft", type=float, default=0.3)
    parser.add_argument("--itl", type=float, default=0.05)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--metrics-delay", type=float, default=0.0)
    parser.add_argument("--no-models", type=int, default=0)
    parser.add_argument("--break-every", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
