"""In-process throughput against mlx-lm's BatchGenerator: same weights, type, BLAS and prompts, taking turns.

Each arm lives in its own process (`worker_quire`, `worker_mlx_lm`) and idles while the other works. Both load the one
folder that our loader exported first: on a CPU dense float32 weights. Prompts are new in every round and no two begin
with the same token, so no prefix cache helps; a run in which one did counts as failed. Greedy, past end-of-sequence.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest import environment
from loadtest.engine_cases import METRICS, MIXED_LENGTHS, Case, CaseResult, Prompts, mixed_case, render, run_case
from loadtest.engine_cases import uniform_case as uniform
from loadtest.options import blas_summary, exit_on_sigterm, int_list, key_value, merged, positive_int, result_file
from loadtest.prompts import PromptSource, word_ids
from loadtest.workers import Worker, WorkerTimeout

_START_TIMEOUT_S = 600.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. --quick replaces the sizes that aren't given by tiny ones."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_engine", description=__doc__)
    parser.add_argument("--model", default="embedded", help="'embedded', a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--dtype", default="auto", help="type of weights and K/V, as engine.dtype (default: auto)")
    parser.add_argument("--sequences", type=int_list, help="sequences at once (default: 1,4,8,16,32)")
    parser.add_argument("--prompt-tokens", type=positive_int, help="length of their prompts (default: 100)")
    parser.add_argument("--output-tokens", type=positive_int, help="tokens out of each sequence (default: 64)")
    parser.add_argument("--mixed-lengths", type=int_list, help="prompt lengths of the mixed case (10,200,1500)")
    parser.add_argument("--mixed-count", type=int, help="sequences of each of them; 0 leaves it out (default: 8)")
    parser.add_argument("--rounds", type=positive_int, help="counted runs of each case and arm (default: 5)")
    parser.add_argument("--case-timeout", type=positive_int, default=900, help="seconds for a case, all rounds (900)")
    parser.add_argument("--engine", type=key_value, action="append", metavar="KEY=VALUE", help="an EngineConfig value")
    parser.add_argument("--peer", type=key_value, action="append", metavar="KEY=VALUE", help="a BatchGenerator option")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--out", type=result_file, default="bench-results/engine.json", help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: to see that it works")
    args = parser.parse_args(argv)
    quick: dict[str, Any] = {
        "sequences": [1, 4], "prompt_tokens": 20, "output_tokens": 8,
        "mixed_lengths": [4, 20, 60], "mixed_count": 1, "rounds": 1,
    }  # fmt: skip
    full: dict[str, Any] = {
        "sequences": [1, 4, 8, 16, 32], "prompt_tokens": 100, "output_tokens": 64,
        "mixed_lengths": list(MIXED_LENGTHS), "mixed_count": 8, "rounds": 5,
    }  # fmt: skip
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.output_tokens < 2:
        parser.error("--output-tokens must be at least 2: a decode rate needs two tokens")
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    """What the command line asks for."""
    found = [uniform(count, args.prompt_tokens, args.output_tokens) for count in args.sequences]
    if args.mixed_count > 0:
        found.append(mixed_case(args.mixed_count, args.mixed_lengths, args.output_tokens))
    return found


class Arms:
    """The two workers; one that was stopped is started again at its next call."""

    def __init__(self, args: argparse.Namespace, folder: Path, log: Path) -> None:
        self._args = args
        self._folder = folder
        self._log = log
        self._workers: dict[str, Worker] = {}
        self.descriptions: dict[str, Any] = {}
        self.deadline = 0.0  # time.monotonic() after which no call may go on

    def start(self, arm: str) -> Worker:
        """The arm's worker, with its model loaded."""
        worker = self._workers.get(arm)
        if worker is not None:
            return worker
        args = self._args
        if arm == "quire":
            worker = self._workers[arm] = Worker("loadtest.worker_quire", self._log)
            # The pool has room for all of a case's sequences, as BatchGenerator's caches do.
            most = max(case.num_sequences for case in cases(args))
            config = {"model": str(self._folder), "dtype": args.dtype, "max_num_seqs": max(64, most)}
            found = worker.call("build", _START_TIMEOUT_S, config=config | merged(args.engine))
            found["config"]["model"] = args.model
            del found["folder"]
            found["info"]["model_name"] = args.model
        else:
            worker = self._workers[arm] = Worker("loadtest.worker_mlx_lm", self._log)
            options = merged(args.peer)
            found = worker.call("build", _START_TIMEOUT_S, folder=str(self._folder), options=options)
        found["blas"] = blas_summary(found["blas"])
        self.descriptions[arm] = found
        return worker

    def call(self, arm: str, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
        """Runs one arm. Raises WorkerError; a worker that ran out of time is stopped."""
        worker = self.start(arm)
        try:
            left = self.deadline - time.monotonic()
            reply: dict[str, Any] = worker.call("run", left, prompts=prompts, max_tokens=max_tokens)
        except WorkerTimeout:
            del self._workers[arm]
            raise
        return reply

    def close(self) -> None:
        """Ends both."""
        for worker in self._workers.values():
            worker.close()


def measure(args: argparse.Namespace, folder: Path, arms: Arms) -> list[CaseResult]:
    """Runs all cases, with a bar that counts runs."""
    prompts = PromptSource(word_ids(folder), args.seed)
    planned = cases(args)
    results = []
    with tqdm(total=len(planned) * 2 * (args.rounds + 1), unit="run", file=sys.stderr) as bar:
        for index, case in enumerate(planned):
            bar.set_description(case.name)
            arms.start("quire")
            arms.start("mlx_lm")
            arms.deadline = time.monotonic() + args.case_timeout
            results.append(run_case(case, args.rounds, prompts, arms.call, lambda: bar.update() and None))
            bar.update((index + 1) * 2 * (args.rounds + 1) - bar.n)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the JSON. 1 when a case failed."""
    args = parse_args(argv)
    exit_on_sigterm()
    found = environment.describe()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        log, folder = Path(temporary) / "workers.log", Path(temporary) / "model"
        with Worker("loadtest.worker_quire", log) as exporter:
            dtype = exporter.call("export", _START_TIMEOUT_S, model=args.model, dtype=args.dtype, folder=str(folder))
        arms = Arms(args, folder, log)
        try:
            results = measure(args, folder, arms)
        finally:
            arms.close()
    result = {
        "benchmark": "engine",
        **found,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "dtype": dtype,
        "metrics": METRICS,
        "arms": arms.descriptions,
        "cases": [case.to_json() for case in results],
    }
    blas = {arm: (described.get("blas") or {}).get("library") for arm, described in arms.descriptions.items()}
    print(f"# Engine throughput\n\n{environment.headline(found)}\nweights {dtype}, BLAS {blas}, {args.rounds} rounds\n")
    print(render(results))
    environment.write_json(args.out, result)
    print(f"\nRaw samples: {args.out}")
    return 1 if any(case.failure for case in results) else 0


if __name__ == "__main__":
    sys.exit(main())
