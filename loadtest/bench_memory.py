"""Whether requests leave memory where it was: resident memory and KV blocks around hundreds of requests.

Starts `quire serve` on a free port and sends distinct prompts: one in five is dropped by its client, half of those
while the prompt is computed and half while tokens come; one in ten is refused with a 400. Figures are taken when the
server is idle. Token ids as prompts, greedy, past end-of-sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from loadtest import environment, metrics_page
from loadtest.client import Client
from loadtest.options import exit_on_sigterm, key_value, merged, positive_int, result_file
from loadtest.prompts import PromptSource
from loadtest.serve_process import ServeProcess, read_config
from loadtest.tables import markdown_table, number

Kind = Literal["normal", "drop_in_prefill", "drop_in_decode", "refused"]
_IDLE_TIMEOUT_S = 60.0
_DROP_AFTER_S = 0.05
_STATES = ("free", "private", "cached_in_use", "cached_evictable")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. --quick replaces the sizes that aren't given by tiny ones."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_memory", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"), help="Serve config (local.yaml)")
    parser.add_argument("--engine", type=key_value, action="append", metavar="KEY=VALUE", help="an EngineConfig value")
    parser.add_argument("--requests", type=positive_int, help="in all (default: 600)")
    parser.add_argument("--prompt-tokens", type=positive_int, help="length of each prompt (default: 300)")
    parser.add_argument("--output-tokens", type=positive_int, help="most tokens out of each (default: 8)")
    parser.add_argument("--concurrency", type=positive_int, default=16, help="requests open at once (default: 16)")
    parser.add_argument("--timeout", type=positive_int, default=1800, help="seconds for all requests (default: 1800)")
    parser.add_argument("--first-token-id", type=int, default=1000, help="prompts are ids from here on (default: 1000)")
    parser.add_argument("--num-token-ids", type=positive_int, default=40000, help="so many of them (default: 40000)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--out", type=result_file, default="bench-results/memory.json", help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it works")
    args = parser.parse_args(argv)
    quick = {"requests": 20, "prompt_tokens": 30, "output_tokens": 4}
    full = {"requests": 600, "prompt_tokens": 300, "output_tokens": 8}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def kind_of(index: int) -> Kind:
    """What becomes of the index-th request: 1 in 5 dropped, 1 in 10 refused, the rest served."""
    if index % 10 == 9:
        return "refused"
    return {1: "drop_in_prefill", 6: "drop_in_decode"}.get(index % 10, "normal")  # type: ignore[return-value]


def checkpoints(num_requests: int) -> list[int]:
    """After how many requests to look: a sixth, a half and all of them, as 100, 300 and 600."""
    return sorted({max(1, num_requests // 6), max(1, num_requests // 2), num_requests})


@dataclass(frozen=True, slots=True)
class Sample:
    """The idle server at one moment."""

    requests: int  # sent so far, the warm-up not counted
    rss_bytes: dict[str, int]  # engine, replica
    blocks: dict[str, float]  # by state
    aborted: float | None  # sequences that the engine dropped so far, by its own count
    idle_after_s: float  # how long it took to become idle


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    samples: list[Sample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # requests by kind
    surprises: list[str] = field(default_factory=list)  # answers that were not what they should be

    @property
    def blocks_are_back(self) -> bool:
        """Whether no block is held at the end, and as many can be had as at the start."""
        first, last = self.samples[0].blocks, self.samples[-1].blocks
        return last["private"] == last["cached_in_use"] == 0 and _to_be_had(first) == _to_be_had(last)


def _to_be_had(blocks: dict[str, float]) -> float:
    return blocks["free"] + blocks["cached_evictable"]


async def send(client: Client, kind: Kind, prompt: list[int], max_tokens: int) -> str | None:
    """Sends one request; what was wrong with its answer, or None."""
    if kind == "refused":
        result = await client.complete(prompt, max_tokens, top_p=7)
        return None if result.status == 400 else f"a wrong request got {result.status}: {result.error}"
    if kind == "drop_in_prefill":
        try:
            await asyncio.wait_for(client.complete(prompt, max_tokens), _DROP_AFTER_S)
        except TimeoutError:
            return None
        return None  # it was done first
    result = await client.complete(prompt, max_tokens, hang_up_after=1 if kind == "drop_in_decode" else None)
    if result.error is not None:
        return result.error
    if kind == "normal" and result.completion_tokens != max_tokens:
        return f"{result.completion_tokens} tokens instead of {max_tokens}"
    return None


async def send_all(
    client: Client, outcome: Outcome, indices: Sequence[int], prompts: PromptSource, args: argparse.Namespace, bar: Any
) -> None:
    """Sends the requests, so many at a time, and counts them."""
    pending = list(reversed(indices))

    async def work() -> None:
        while pending:
            kind = kind_of(pending.pop())
            surprise = await send(client, kind, prompts.take(args.prompt_tokens), args.output_tokens)
            outcome.counts[kind] += 1
            if surprise is not None:
                outcome.surprises.append(f"{kind}: {surprise}")
            bar.update()

    await asyncio.gather(*(work() for _ in range(args.concurrency)))


async def look(client: Client, server: ServeProcess, requests: int) -> Sample:
    """Waits until nothing runs or waits, then takes a sample. Raises TimeoutError if that never comes."""
    started = time.monotonic()
    while time.monotonic() - started < _IDLE_TIMEOUT_S:
        page = await client.page("/metrics")
        busy = [metrics_page.value(page, f"quire:num_requests_{state}") for state in ("running", "waiting")]
        if busy == [0, 0]:
            idle_after = time.monotonic() - started
            found = metrics_page.by_label(page, "quire:kv_blocks", "state")
            rss = await asyncio.to_thread(server.rss_bytes)
            aborted = metrics_page.value(page, "quire:requests_aborted_total")
            return Sample(requests, rss, {state: found[state] for state in _STATES}, aborted, idle_after)
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the server did not become idle within {_IDLE_TIMEOUT_S:.0f} s after {requests} requests")


async def measure(args: argparse.Namespace, server: ServeProcess) -> Outcome:
    """Sends everything, with a look before, and after each part. Stops at the time limit, saying so."""
    outcome = Outcome()
    prompts = PromptSource(range(args.first_token_id, args.first_token_id + args.num_token_ids), args.seed)
    async with Client(server.base_url, server.model_id(), timeout_s=args.timeout) as client:
        # Whatever is made at the first request only is in the first sample already.
        warm_up = [client.complete(prompts.take(args.prompt_tokens), args.output_tokens)
                   for _ in range(args.concurrency)]  # fmt: skip
        await asyncio.gather(*warm_up)
        outcome.samples.append(await look(client, server, 0))
        done = 0
        with tqdm(total=args.requests, unit="request", file=sys.stderr) as bar:
            try:
                async with asyncio.timeout(args.timeout):
                    for checkpoint in checkpoints(args.requests):
                        await send_all(client, outcome, range(done, checkpoint), prompts, args, bar)
                        outcome.samples.append(await look(client, server, checkpoint))
                        done = checkpoint
            except TimeoutError as error:
                outcome.surprises.append(str(error) or f"not done after {args.timeout} s")
    return outcome


def render(outcome: Outcome) -> str:
    """One row for each look, and what the blocks say."""
    first = outcome.samples[0]
    rows = []
    for sample in outcome.samples:
        engine, replica = (sample.rss_bytes[name] / 2**20 for name in ("engine", "replica"))
        growth = [(sample.rss_bytes[name] - first.rss_bytes[name]) / 2**20 for name in ("engine", "replica")]
        rows.append(
            [str(sample.requests), number(engine), f"{growth[0]:+.1f}", number(replica), f"{growth[1]:+.1f}"]
            + [number(sample.blocks[state], 0) for state in _STATES]
            + [number(sample.aborted, 0)]
        )
    header = ["requests", "engine RSS MiB", "since 0", "replica RSS MiB", "since 0", *_STATES, "aborted"]
    sent = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.counts.items()))
    verdict = "no block is held, and as many can be had as before" if outcome.blocks_are_back else "BLOCKS ARE MISSING"
    return f"{markdown_table(header, rows)}\n\nsent: {sent}; {verdict}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the JSON. 1 when an answer was wrong or a block is missing."""
    args = parse_args(argv)
    exit_on_sigterm()
    found = environment.describe()
    config = read_config(args.config, merged(args.engine))
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary,
        ServeProcess(config, Path(temporary)) as server,
    ):
        outcome = asyncio.run(measure(args, server))
    result = {
        "benchmark": "memory",
        **found,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "serve_args": config["applications"][0]["args"],
        "sent": dict(outcome.counts),
        "samples": [
            {
                "requests": sample.requests,
                "rss_bytes": sample.rss_bytes,
                "kv_blocks": sample.blocks,
                "aborted": sample.aborted,
                "idle_after_s": sample.idle_after_s,
            }
            for sample in outcome.samples
        ],
        "blocks_are_back": outcome.blocks_are_back,
        "surprises": outcome.surprises,
    }
    print(f"# Memory\n\n{environment.headline(found)}\n")
    print(render(outcome))
    for line in outcome.surprises[:10]:
        print(f"UNEXPECTED {line}")
    environment.write_json(args.out, result)
    print(f"Raw samples: {args.out}")
    return 1 if outcome.surprises or not outcome.blocks_are_back else 0


if __name__ == "__main__":
    sys.exit(main())
