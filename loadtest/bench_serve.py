"""The server against its own engine: throughput over HTTP, TTFT with a cached prefix, gaps when a long prompt comes.

Starts `quire serve` on a free port, and beside it a worker with the same engine in process; they take turns, and the
one that doesn't work idles. Prompts are token ids, new in every round; greedy, past end-of-sequence. The client shares
the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest import environment
from loadtest.client import Client
from loadtest.options import (
    blas_summary,
    engine_overrides,
    exit_on_sigterm,
    int_list,
    key_value,
    merged,
    positive_int,
    result_file,
)
from loadtest.prompts import PromptSource, word_ids
from loadtest.serve_cases import CaseError, Gaps, PrefixTTFT, Throughput, gap_trial, prefix_pair, throughput_round
from loadtest.serve_process import ServeProcess, read_config
from loadtest.tables import markdown_table, number, number_range
from loadtest.workers import Worker, WorkerError

PARTS = ("throughput", "prefix", "gap")
_START_TIMEOUT_S = 600.0
Case = Throughput | PrefixTTFT | Gaps


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. --quick replaces the sizes that aren't given by tiny ones."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_serve", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"), help="Serve config (local.yaml)")
    parser.add_argument("--engine", type=key_value, action="append", metavar="KEY=VALUE", help="an EngineConfig value")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--clients", type=int_list, help="clients of the throughput part (default: 1,8,32)")
    parser.add_argument("--requests-per-client", type=positive_int, help="in each round (default: 2)")
    parser.add_argument("--prompt-tokens", type=positive_int, help="length of ordinary prompts (default: 100)")
    parser.add_argument("--output-tokens", type=positive_int, help="tokens out of each request (default: 64)")
    parser.add_argument("--rounds", type=positive_int, help="counted rounds of the throughput part (default: 5)")
    parser.add_argument("--prefix-tokens", type=positive_int, help="length of the shared prefix (default: 1500)")
    parser.add_argument("--prefixes", type=positive_int, help="different prefixes (default: 7)")
    parser.add_argument("--long-prompt-tokens", type=positive_int, help="the arriving long prompt (default: 6000)")
    parser.add_argument("--streams", type=positive_int, help="streams that it arrives at (default: 8)")
    parser.add_argument("--trials", type=positive_int, help="times that it arrives (default: 5)")
    parser.add_argument("--case-timeout", type=positive_int, default=900, help="seconds for a case (default: 900)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--out", type=result_file, default="bench-results/serve.json", help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: to see that it works")
    args = parser.parse_args(argv)
    quick: dict[str, Any] = {
        "clients": [1, 4], "requests_per_client": 1, "prompt_tokens": 20, "output_tokens": 8, "rounds": 1,
        "prefix_tokens": 128, "prefixes": 1, "long_prompt_tokens": 600, "streams": 2, "trials": 1,
    }  # fmt: skip
    full: dict[str, Any] = {
        "clients": [1, 8, 32], "requests_per_client": 2, "prompt_tokens": 100, "output_tokens": 64, "rounds": 5,
        "prefix_tokens": 1500, "prefixes": 7, "long_prompt_tokens": 6000, "streams": 8, "trials": 5,
    }  # fmt: skip
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.part = args.part or list(PARTS)
    return args


class Bench:
    """The server, the worker and the prompts; runs each part and keeps what was measured before a failure."""

    def __init__(self, args: argparse.Namespace, server: ServeProcess, worker: Worker, engine: dict[str, Any]) -> None:
        self._args = args
        self._server = server
        self._worker = worker
        self._engine = engine
        self._prompts = PromptSource(word_ids(Path(engine["folder"])), args.seed)
        self._bar = tqdm(total=self._num_runs(), unit="run", file=sys.stderr)
        self.failures: list[str] = []

    def _num_runs(self) -> int:
        args = self._args
        counts = {
            "throughput": len(args.clients) * (args.rounds + 1),
            "prefix": args.prefixes + 1,
            "gap": args.trials,
        }
        return sum(counts[part] for part in args.part)

    async def run(self) -> list[Case]:
        """All parts, in order."""
        args = self._args
        cases: list[Case] = []
        async with Client(self._server.base_url, self._server.model_id(), timeout_s=args.case_timeout) as client:
            if "throughput" in args.part:
                for clients in args.clients:
                    found = Throughput(clients)
                    cases.append(found)
                    await self._guarded(f"{clients} clients", found, self._throughput(client, found))
            if "prefix" in args.part:
                prefix = PrefixTTFT(args.prefix_tokens)
                cases.append(prefix)
                await self._guarded("cached prefix", prefix, self._prefix(client, prefix))
            if "gap" in args.part:
                gaps = Gaps(args.streams, args.long_prompt_tokens)
                cases.append(gaps)
                await self._guarded("long prompt", gaps, self._gap(client, gaps))
        self._bar.close()
        return cases

    async def _guarded(self, name: str, case: Case, part: Coroutine[Any, Any, None]) -> None:
        """Runs one case under its time limit; a failure ends it and is kept."""
        self._bar.set_description(name)
        try:
            await asyncio.wait_for(part, self._args.case_timeout)
        except TimeoutError:
            self.failures.append(f"{name}: not done after {self._args.case_timeout} s")
            if isinstance(case, Throughput):
                self._worker.close()  # it may still work, and what comes next would be measured beside it
        except (CaseError, WorkerError) as error:
            self.failures.append(f"{name}: {error}")

    async def _throughput(self, client: Client, found: Throughput) -> None:
        args = self._args
        for counted in [False] + [True] * args.rounds:
            into = found if counted else Throughput(found.clients)
            prompts = [self._prompts.take(args.prompt_tokens)
                       for _ in range(found.clients * (args.requests_per_client if counted else 1))]  # fmt: skip
            await throughput_round(into, client, self._in_process, prompts, args.output_tokens)
            self._bar.update()

    def _in_process(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> dict[str, Any]:
        timeout = float(self._args.case_timeout)
        reply: dict[str, Any] = self._worker.call(
            "closed_loop", timeout, prompts=prompts, max_tokens=max_tokens, concurrency=concurrency
        )
        return reply

    async def _prefix(self, client: Client, found: PrefixTTFT) -> None:
        for counted in [False] + [True] * self._args.prefixes:
            await prefix_pair(found if counted else PrefixTTFT(found.prefix_tokens), client, self._prompts)
            self._bar.update()

    async def _gap(self, client: Client, found: Gaps) -> None:
        for _ in range(self._args.trials):
            await gap_trial(found, client, self._prompts, self._args.prompt_tokens)
            self._bar.update()


def render(cases: Sequence[Case]) -> str:
    """One table for each part that was measured."""
    parts = []
    throughput = [case.to_json() for case in cases if isinstance(case, Throughput)]
    if throughput:
        rows = [
            [
                str(found["clients"]),
                number(found["http_tokens_per_second"]["median"]),
                number(found["in_process_tokens_per_second"]["median"]),
                number(found["ratio_of_medians"], 2),
                number_range(found["ratios_by_round"]),
                number(found["target"], 2),
                number(_milliseconds(found["ttft_s"]["median"]), 0),
                number(_milliseconds(found["itl_s"]["median"]), 1),
                number(_milliseconds(found["itl_s"]["p95"]), 1),
            ]
            for found in throughput
        ]
        header = ["clients", "HTTP tokens/s", "in process", "ratio", "by round", "target", "TTFT p50 ms", "ITL p50 ms"]
        parts.append(markdown_table([*header, "ITL p95 ms"], rows))
    for case in cases:
        if isinstance(case, PrefixTTFT):
            parts.append(_prefix_table(case.to_json()))
        elif isinstance(case, Gaps):
            parts.append(_gap_table(case.to_json()))
    return "\n\n".join(parts)


def _prefix_table(found: dict[str, Any]) -> str:
    row = [
        f"{found['prefix_tokens']} + {found['suffix_tokens']} tokens",
        number(_milliseconds(found["cold_ttft_s"]["median"]), 0),
        number(_milliseconds(found["cached_ttft_s"]["median"]), 0),
        number(found["ratio_of_medians"], 3),
        number(found["target"], 2),
        str(min(found["cached_tokens"], default="-")),
        str(found["cold_ttft_s"]["count"]),
    ]
    header = ["prefix", "TTFT cold ms", "TTFT cached ms", "ratio", "target (at most)", "cached tokens", "prefixes"]
    return markdown_table(header, [row])


def _gap_table(found: dict[str, Any]) -> str:
    row = [
        f"{found['prompt_tokens']} tokens into {found['streams']} streams",
        number(_milliseconds(found["alone_ttft_s"]["median"]), 0),
        f"{found['num_chunks']} x {number(_milliseconds(found['chunk_s']), 0)}",
        number(_milliseconds(found["gap_before_s"]["median"]), 0),
        number(_milliseconds(found["gap_during_s"]["median"]), 0),
        number(_milliseconds(found["largest_gap_s"]), 0),
        number(found["largest_gap_in_chunks"], 2),
        number(found["target"], 1),
    ]
    header = ["long prompt", "TTFT alone ms", "chunks x ms", "gap before p50 ms", "during p50 ms", "largest ms"]
    return markdown_table([*header, "largest in chunks", "target (at most)"], [row])


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _measure(args: argparse.Namespace, folder: Path) -> tuple[list[Case], list[str], dict[str, Any], float | None]:
    config = read_config(args.config, merged(args.engine))
    serve_args = config["applications"][0]["args"]
    threads = (serve_args.get("engine_actor") or {}).get("num_threads")
    env = {"OPENBLAS_NUM_THREADS": str(threads)} if threads else {}
    with Worker("loadtest.worker_quire", folder / "worker.log", env) as worker:
        engine = worker.call("build", _START_TIMEOUT_S, config=serve_args["engine"])
        with ServeProcess(config, folder) as server:
            bench = Bench(args, server, worker, engine)
            cases = asyncio.run(bench.run())
            ready_s = server.ready_s
    del engine["folder"]
    engine["blas"] = blas_summary(engine["blas"])
    return cases, bench.failures, engine, ready_s


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables and writes the JSON. 1 when a case failed, 2 when the arms would differ."""
    args = parse_args(argv)
    exit_on_sigterm()
    overrides = engine_overrides()
    if overrides:
        print(f"unset {', '.join(overrides)}: the server would heed them and the in-process engine would not. "
              "Use --engine KEY=VALUE", file=sys.stderr)  # fmt: skip
        return 2
    found = environment.describe()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        cases, failures, engine, ready_s = _measure(args, Path(temporary))
    result = {
        "benchmark": "serve",
        **found,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "engine": engine,
        "server_ready_s": ready_s,
        "cases": [{"kind": type(case).__name__, **case.to_json()} for case in cases],
        "failures": failures,
    }
    print(f"# Over HTTP\n\n{environment.headline(found)}\nserver ready after {number(ready_s)} s\n")
    print(render(cases))
    print("\n".join(["", *(f"FAILED {failure}" for failure in failures)]))
    environment.write_json(args.out, result)
    print(f"Raw samples: {args.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
