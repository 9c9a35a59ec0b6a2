"""Loads that the experiments share: clients with answers of mixed lengths, a watcher of /metrics, whole answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from loadtest.client import Client, LoopResult
from loadtest.client import closed_loop as prompts_in_closed_loop
from loadtest.prompts import PromptSource
from loadtest.serve_cases import CaseError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, and how many tokens it wants."""

    prompt: Sequence[int]
    max_tokens: int


def mixed_asks(
    prompts: PromptSource, count: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], seed: int
) -> list[Ask]:
    """`count` requests whose lengths are uniform between the two ends, both included; the same for the same seed."""
    lengths = random.Random(seed)
    return [Ask(prompts.take(lengths.randint(*prompt_tokens)), lengths.randint(*output_tokens)) for _ in range(count)]


async def closed_loop(client: Client, asks: Sequence[Ask], clients: int, stagger_s: float = 0.0) -> LoopResult:
    """`client.closed_loop` over asks. The results are in their order."""
    prompts, counts = [ask.prompt for ask in asks], [ask.max_tokens for ask in asks]
    return await prompts_in_closed_loop(client, prompts, counts, clients, stagger_s=stagger_s)


@dataclass(frozen=True, slots=True)
class Page:
    """One look at /metrics."""

    seconds: float  # since the watch began
    text: str


@asynccontextmanager
async def watched(client: Client, period_s: float) -> AsyncIterator[list[Page]]:
    """Reads /metrics every period_s for as long as the body runs; the list grows meanwhile.

    Raises httpx.HTTPError at the end if a page could not be read.
    """
    pages: list[Page] = []
    started = time.perf_counter()

    async def watch() -> None:
        while True:
            pages.append(Page(time.perf_counter() - started, await client.page("/metrics")))
            await asyncio.sleep(period_s)

    task = asyncio.create_task(watch())
    try:
        yield pages
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, httpx.HTTPError):
        raise outcome


async def whole_answers(base_url: str, model: str, asks: Sequence[Ask], timeout_s: float) -> list[str]:
    """The greedy texts of all requests, asked at once without streaming. Raises CaseError for any that fails."""
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False) as http:
        return list(await asyncio.gather(*(_whole_answer(http, model, ask) for ask in asks)))


async def _whole_answer(http: httpx.AsyncClient, model: str, ask: Ask) -> str:
    body = {
        "model": model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise CaseError(f"an answer failed: {type(error).__name__}: {error}") from error


async def until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Returns once the condition holds, which is looked at every 5 ms. Raises CaseError after timeout_s."""
    deadline = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > deadline:
            raise CaseError(f"{what}: not in {timeout_s:.0f} s")
        await asyncio.sleep(0.005)
