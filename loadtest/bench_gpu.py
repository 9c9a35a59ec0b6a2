"""Our engine against vLLM and mlx-lm's BatchGenerator on one GPU: same shape, random weights, prompts; taking turns.

Each arm is a process of its own with its engine inside, all on the GPU at once; one works while the others idle. All
are moved step by step by the same loop (`loadtest.stepping`), scheduler and sampler included, without detokenization
or prefix cache. Decode: sequences are prefilled once and stay, and each round times 64 steps that give every sequence a
token. Prefill: prompts handed over together until each has one token. Mixed: Poisson arrivals in real time. The result
is written after each case, so that a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from loadtest import environment, gpu_memory
from loadtest.gpu_cases import BLOCK_SIZE, Case, CaseResult, Kind, Settings, plan, render, run_case
from loadtest.options import exit_on_sigterm, int_list, key_value, merged, positive_int, result_file
from loadtest.shapes import SHAPES, kv_bytes_per_token, llama_config
from loadtest.workers import Worker, WorkerError

ARMS = {
    "quire": "loadtest.worker_gpu_quire",
    "vllm": "loadtest.worker_gpu_vllm",
    "mlx-lm": "loadtest.worker_gpu_mlx_lm",
}
_SPARE_BLOCKS = 64
_GRACE_S = 30.0  # that a case which has begun may go on after the budget


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_gpu", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-1b", help="of the model; tiny runs on a CPU too (llama-1b)")
    add("--arms", default="quire,vllm,mlx-lm", help="in the order of their turns (default: quire,vllm,mlx-lm)")
    add("--mixed-arms", default="quire,vllm", help="those that serve mixed traffic (default: quire,vllm)")
    add("--cases", default="decode,prefill,mixed", help="kinds, in order (default: decode,prefill,mixed)")
    add("--decode", type=context_batches, action="append", metavar="CONTEXT:BATCHES",
        help="decode cases (default: 512, 4096 and 16384, each with 1,8,32,128,256)")  # fmt: skip
    add("--prefill", type=context_batches, action="append", metavar="CONTEXT:BATCHES",
        help="prefill cases (default: 512:1,8,32,128 and 4096:1,8)")  # fmt: skip
    add("--rates", type=float_list, default=[8.0, 24.0], help="arrivals per second of mixed traffic (default: 8,24)")
    add("--temperatures", type=float_list, default=[0.0, 0.8], help="of mixed traffic (default: 0,0.8)")
    add("--duration-s", type=positive_int, default=12, help="seconds of arrivals (default: 12)")
    add("--prompt-tokens", type=span, default=(32, 4096), metavar="LEAST,MOST", help="of arrivals (default: 32,4096)")
    add("--output-tokens", type=span, default=(16, 512), metavar="LEAST,MOST", help="of arrivals (default: 16,512)")
    add("--rounds", type=positive_int, default=3, help="of decode and prefill cases (default: 3)")
    add("--mixed-rounds", type=positive_int, default=1, help="of mixed traffic (default: 1)")
    add("--steps", type=positive_int, default=64, help="decode steps in a round (default: 64)")
    add("--max-num-seqs", type=positive_int, default=256, help="sequences at once, all arms (default: 256)")
    add("--max-num-batched-tokens", type=positive_int, default=8192, help="tokens in a step, ours and vLLM (8192)")
    add("--kv-gib", type=positive_int, default=20, help="most K/V of one arm; larger cases are skipped (default: 20)")
    add("--budget-s", type=positive_int, default=540, help="seconds, start included, after which no case begins (540)")
    add("--start-timeout-s", type=positive_int, default=300, help="for an arm to be ready (default: 300)")
    add("--engine", type=key_value, action="append", metavar="KEY=VALUE", help="an EngineConfig value of ours")
    add("--vllm", type=key_value, action="append", metavar="KEY=VALUE", help="an argument of vLLM's LLM()")
    add(
        "--mlx-lm",
        type=key_value,
        action="append",
        metavar="KEY=VALUE",
        help="a BatchGenerator option, or memory_limit_gib",
    )
    add(
        "--vllm-python", default=sys.executable, metavar="PATH", help="the Python that vLLM runs in (default: this one)"
    )
    add("--vllm-path", type=Path, metavar="FOLDER", help="put first on PYTHONPATH of vLLM's process")
    add(
        "--vllm-env", type=env_value, action="append", metavar="NAME=VALUE", help="of the environment of vLLM's process"
    )
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add(
        "--out",
        type=result_file,
        default="bench-results/gpu.json",
        help="where the JSON goes, and the arms' logs beside",
    )
    args = parser.parse_args(argv)
    args.arms = _names(parser, "--arms", args.arms, ARMS)
    args.mixed_arms = [arm for arm in _names(parser, "--mixed-arms", args.mixed_arms, ARMS) if arm in args.arms]
    args.cases = _names(parser, "--cases", args.cases, get_args(Kind))
    batches = [1, 8, 32, 128, 256]
    args.decode = batches_by_context(args.decode or [(512, batches), (4096, batches), (16384, batches)])
    args.prefill = batches_by_context(args.prefill or [(512, [1, 8, 32, 128]), (4096, [1, 8])])
    # All sequences of a case run at once.
    batches = [batch for found in (args.decode, args.prefill) for each in found.values() for batch in each]
    args.max_num_seqs = max(args.max_num_seqs, *batches)
    if args.max_num_batched_tokens < args.max_num_seqs:
        parser.error("--max-num-batched-tokens must be at least the number of sequences at once")
    if not all(0 < rate < math.inf for rate in args.rates) or not all(0 <= t < math.inf for t in args.temperatures):
        parser.error("--rates must be above 0, and --temperatures not below")
    return args


def context_batches(text: str) -> tuple[int, list[int]]:
    """An argparse type: a context and its batches, as 4096:1,8,32."""
    context, _, batches = text.partition(":")
    return positive_int(context), int_list(batches)


def batches_by_context(given: Sequence[tuple[int, list[int]]]) -> dict[int, list[int]]:
    """The batches of each context, also of one that was given more than once; in order, each once."""
    found: dict[int, list[int]] = {}
    for context, batches in given:
        found[context] = list(dict.fromkeys([*found.get(context, []), *batches]))
    return found


def span(text: str) -> tuple[int, int]:
    """An argparse type: LEAST,MOST."""
    found = int_list(text)
    if len(found) != 2 or found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"must be LEAST,MOST, not {text!r}")
    return found[0], found[1]


def float_list(text: str) -> list[float]:
    """An argparse type: comma-separated numbers."""
    return [float(part) for part in text.split(",")]


def env_value(text: str) -> tuple[str, str]:
    """An argparse type: NAME=VALUE of an environment variable; an empty value empties it."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def _names(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str] | Mapping[str, Any]) -> Any:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def fitting(
    cases: Sequence[Case], args: argparse.Namespace, settings: Settings
) -> tuple[list[Case], list[dict[str, str]]]:
    """The cases whose K/V fits, and the others with why."""
    limit = args.kv_gib * 2**30
    fit, skipped = [], []
    for case in cases:
        needed = case.pool_tokens(settings, args.max_num_seqs) * kv_bytes_per_token(SHAPES[args.shape])
        if case.kind != "mixed" and needed > limit:
            reason = f"its K/V takes {needed / 2**30:.1f} GiB in each arm, and --kv-gib is {args.kv_gib}"
            skipped.append({"case": case.name, "reason": reason})
        else:
            fit.append(case)
    return fit, skipped


def engine_options(cases: Sequence[Case], args: argparse.Namespace, settings: Settings) -> dict[str, dict[str, Any]]:
    """What each arm is built with: pools of one size, limits of one kind, on memory too."""
    longest = max(case.sequence_tokens(settings) for case in cases)
    per_token = kv_bytes_per_token(SHAPES[args.shape])
    most = args.kv_gib * 2**30 // per_token
    tokens = min(most, max(longest, *(case.pool_tokens(settings, args.max_num_seqs) for case in cases)))
    blocks = tokens // BLOCK_SIZE + _SPARE_BLOCKS
    kv_bytes = blocks * BLOCK_SIZE * per_token
    # What an engine on MLX has freed it keeps up to its limit; by default that is all of the GPU's memory, about.
    memory_limit_gib = gpu_memory.mlx_limit_gib(SHAPES[args.shape], kv_bytes)
    shared = {
        "max_model_len": longest,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    quire = {
        "num_blocks": blocks,
        "prefix_cache": "none",
        "chunk_halving_context": None,
        "memory_limit_gib": memory_limit_gib,
    }
    vllm = {
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        # Given as bytes it does not depend on what the other arms take meanwhile; the share is then only what must be
        # free at its start.
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": 0.05,
    }
    # Its default is 32: more sequences than that would queue.
    mlx_lm = {"completion_batch_size": args.max_num_seqs, "memory_limit_gib": memory_limit_gib}
    return {
        "quire": shared | quire | merged(args.engine),
        "vllm": shared | vllm | merged(args.vllm),
        "mlx-lm": mlx_lm | merged(args.mlx_lm),
    }


class Arms:
    """The workers, by name. One that could not start, or ended, is gone; `described` says why."""

    def __init__(self, modules: Mapping[str, str], logs: Path, deadline: float) -> None:
        self._modules = modules
        self._logs = logs
        self._deadline = deadline  # of time.monotonic(), for calls
        self._workers: dict[str, Worker] = {}
        self.described: dict[str, Any] = {}

    @property
    def alive(self) -> list[str]:
        """Those that can be called, in the order given."""
        return [name for name in self._modules if name in self._workers and self._workers[name].alive]

    def start(
        self, builds: Mapping[str, dict[str, Any]], launch: Mapping[str, dict[str, Any]], timeout_s: float
    ) -> None:
        """Starts all at once: builds are the arguments of their `build`, launch those of their Worker."""
        self._logs.mkdir(parents=True, exist_ok=True)
        for name, module in self._modules.items():
            log = self._logs / f"gpu-{name}.log"
            log.unlink(missing_ok=True)
            try:
                self._workers[name] = Worker(module, log, **launch.get(name, {}))
            except OSError as error:
                self.described[name] = {"failure": f"{module} can't be started: {error}"}
        pool = ThreadPoolExecutor(len(self._modules))
        try:
            list(pool.map(lambda name: self._build(name, builds[name], timeout_s), list(self._workers)))
        except BaseException:
            self.close()  # or Ctrl-C would wait for the slowest of them
            raise
        finally:
            pool.shutdown()
        self.described = {name: self.described[name] for name in self._modules}

    def _build(self, name: str, params: dict[str, Any], timeout_s: float) -> None:
        start = time.monotonic()
        try:
            self.described[name] = self._workers[name].call("build", timeout_s, **params)
        except WorkerError as error:
            self.fail(name, str(error))
        else:
            self.described[name]["ready_s"] = time.monotonic() - start

    def fail(self, name: str, reason: str) -> None:
        """Stops an arm for good."""
        self._workers[name].close()
        self.described[name] = {**self.described.get(name, {}), "failure": reason}

    def call(self, name: str, method: str, params: dict[str, Any]) -> Any:
        """A method's result. Raises WorkerError; a worker that ended, or ran out of time, is gone from then on."""
        worker = self._workers[name]
        try:
            return worker.call(method, max(1.0, self._deadline - time.monotonic()), **params)
        except WorkerError as error:
            if not worker.alive and "failure" not in self.described[name]:
                self.fail(name, str(error))
            raise

    def close(self) -> None:
        """Ends all."""
        for worker in self._workers.values():
            worker.close()


def measure(
    cases: Sequence[Case], arms: Arms, args: argparse.Namespace, settings: Settings, skipped: list[Any], end: float
) -> Iterator[CaseResult]:
    """Runs the cases until time.monotonic() is `end`; those that it doesn't run go into skipped, with why."""
    for case in cases:
        wanted = args.mixed_arms if case.kind == "mixed" else args.arms
        able = [name for name in wanted if name in arms.alive]
        if not able or time.monotonic() >= end:
            reason = "the time was used up" if able else f"no arm is left of {', '.join(wanted) or 'none'}"
            skipped.append({"case": case.name, "reason": reason})
            continue
        start = time.monotonic()
        found = run_case(case, able, arms.call, settings, lambda: time.monotonic() >= end)
        medians = ", ".join(f"{arm} {value:,.4g}" for arm in able if (value := found.headline(arm)) is not None)
        print(f"{case.name}: {medians or 'nothing measured'} ({time.monotonic() - start:.1f} s)", flush=True)
        yield found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 1 if an arm or a case failed."""
    args = parse_args(argv)
    exit_on_sigterm()
    began = time.monotonic()
    settings = Settings(
        rounds=args.rounds,
        mixed_rounds=args.mixed_rounds,
        steps=args.steps,
        max_num_batched_tokens=args.max_num_batched_tokens,
        duration_s=args.duration_s,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        seed=args.seed,
    )
    every = plan(args.cases, args.decode, args.prefill, args.rates, args.temperatures)
    cases, skipped = fitting(every, args, settings)
    if not cases:
        print(f"nothing to run: {skipped}", file=sys.stderr)
        return 2
    options = engine_options(cases, args, settings)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    # Where they lie on this machine says nothing about the run.
    arguments = {
        name: value for name, value in shown.items() if name not in ("out", "vllm_path", "vllm_python", "vllm_env")
    }
    result: dict[str, Any] = {"benchmark": "gpu", **environment.describe(), "arguments": arguments,
                              "shape": args.shape, "arms": {}, "cases": [], "skipped": skipped}  # fmt: skip
    launch: dict[str, Any] = {"vllm": {"python": args.vllm_python, "env": vllm_environment(args)}}
    arms = Arms({name: ARMS[name] for name in args.arms}, args.out.parent, began + args.budget_s + _GRACE_S)
    results: list[CaseResult] = []
    try:
        model = llama_config(SHAPES[args.shape])
        builds = {name: {"model": model, "engine": options[name]} for name in args.arms}
        warn_of_memory({name: options[name] for name in args.arms}, args.shape)
        arms.start(builds, launch, min(args.start_timeout_s, args.budget_s))
        for name, found in arms.described.items():
            if args.shape != "tiny" and "failure" not in found and not found["on_gpu"]:
                arms.fail(name, "its device is no GPU; --shape tiny runs without one")
        result["arms"] = arms.described
        for found in arms.described.values():
            result["versions"] |= found.get("versions", {})
        for name, found in arms.described.items():
            print(f"{name}: {found.get('failure') or 'ready after {:.0f} s'.format(found['ready_s'])}", flush=True)
        for case in measure(cases, arms, args, settings, skipped, began + args.budget_s):
            results.append(case)
            result["cases"].append(case.to_json())
            environment.write_json(args.out, result)
    except (KeyboardInterrupt, SystemExit):
        result["cases"] = [case.to_json() for case in results]  # the last may still be on its way
        done = {case.case.name for case in results} | {entry["case"] for entry in skipped}
        skipped += [{"case": case.name, "reason": "the run was interrupted"} for case in cases if case.name not in done]
        raise
    finally:
        arms.close()
        try:
            environment.write_json(args.out, result)
        finally:
            report(result, results, args)
        print(f"\nWritten: {args.out}")
    failed = any("failure" in found for found in arms.described.values()) or any(found.failures for found in results)
    return 1 if failed else 0


def warn_of_memory(options: Mapping[str, dict[str, Any]], shape: str) -> None:
    """Prints a line if the arms, by the options that they are built with, may take more than the GPU has."""
    total = gpu_memory.gpu_gib()
    if total is not None and (words := gpu_memory.warning(gpu_memory.arms_gib(options, SHAPES[shape]), total)):
        print(words, flush=True)


def vllm_environment(args: argparse.Namespace) -> dict[str, str]:
    """The variables of vLLM's process that differ from this one's."""
    found: dict[str, str] = merged(args.vllm_env)
    if args.vllm_path is not None:
        rest = found.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        found["PYTHONPATH"] = os.pathsep.join(part for part in (str(args.vllm_path.resolve()), rest) if part)
    return found


def report(result: Mapping[str, Any], results: Sequence[CaseResult], args: argparse.Namespace) -> None:
    """Prints the tables, and what is missing from them."""
    print(f"\n# Engines on one GPU\n\n{environment.headline(result)}\n{args.shape}, {args.rounds} rounds\n")
    print(render(results, args.arms))
    for name, found in result["arms"].items():
        versions = " ".join(f"{key} {value}" for key, value in found.get("versions", {}).items())
        device = found.get("device", {}).get("device_name", "")
        print(f"\n{name}: {found.get('failure') or ', '.join(part for part in (device, versions) if part)}", end="")
    print()
    for case in results:
        for arm, failure in case.failures.items():
            print(f"FAILED {case.case.name}, {arm}: {failure}")
        if case.cut_short:
            print(f"CUT SHORT {case.case.name}: the time was used up")
    for entry in result["skipped"]:
        print(f"SKIPPED {entry['case']}: {entry['reason']}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
