"""The ways our engine can run a step, against each other on a GPU: the same tokens, and how fast.

The arms are one engine each, with the same random weights: `recorded` (CUDA graphs), `serial` (the same, but no kernel
starts before the last one has ended), `compiled`, `fused` (neither), `gather` (K/V copied out of the pool) and `int8`
(recorded, K/V in 8 bits); counters in the result say which paths ran.

Tokens: greedy requests of mixed lengths that come and go, with chunks and preemptions, in each arm; where an arm's
tokens part from gather's, the model itself is asked how far apart the two tokens' logits are. A gap that the type's
rounding explains is a near tie, anything else is wrong; int8 has a rounding of its own and is only counted. Of gather,
which shares the sampler and the kernels around attention with the others, each token is held against the model's best.

Time: batches are prefilled once, and each round times steps in which every sequence gets a token, scheduler and
sampler included; the arms take turns. --profile adds which kernels the first arm's step of the first case keeps the
GPU busy with, and for how long it waits. Prints tables, writes JSON after each case, and ends with 1 if tokens are
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

# Before anything that imports MLX: OpenBLAS must come first.
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.native.graphs import load_graphs
from mlx_engine.types import Request, SamplingParams
from plugins.build import build_engine_for

# Third-party, but after ours: the first import of `mlx.core` binds its BLAS.
import mlx.core as mx  # isort: skip

from loadtest import environment
from loadtest.gpu import new_result
from loadtest.gpu_profile import can_profile, profile_steps
from loadtest.options import int_list, positive_int, result_file
from loadtest.random_llama import random_llama
from loadtest.shapes import SHAPES, llama_config
from loadtest.stepping import StepLoop, random_prompts
from loadtest.tables import markdown_table, number
from loadtest.worker_gpu_quire import QuireStepper, random_model

ARMS: dict[str, dict[str, Any]] = {
    "recorded": {"attention_backend": "fused"},
    "serial": {"attention_backend": "fused"},
    "compiled": {"attention_backend": "fused", "record_decode": False},
    "fused": {"attention_backend": "fused", "compile_decode": False},
    "gather": {"attention_backend": "gather"},
    "int8": {"attention_backend": "fused", "kv_cache_dtype": "int8"},
}
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
# How far two near-tied logits may be apart, as a share of the largest one: a layer's sums, in another order, differ by
# some units in the last place. float32's own products may be of shorter numbers (TF32).
_NEAR_TIE = {"bfloat16": 2.0**-5, "float16": 2.0**-7, "float32": 2.0**-10}
_BLOCK_SIZE = 16
_SKIP = 4  # steps at the start of a round


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_decode", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-1b", help="of the model (default: llama-1b)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and K/V (default: bfloat16)")
    add("--arms", default="recorded,fused,gather", help=f"of {', '.join(ARMS)} (default: recorded,fused,gather)")
    add("--contexts", type=int_list, default=[512], help="tokens in each prompt (default: 512)")
    add("--batches", type=int_list, default=[1, 8, 32, 128, 256], help="sequences at once (default: 1,8,32,128,256)")
    add("--tokens-only", action="store_true", help="compare tokens, time nothing")
    add("--steps", type=positive_int, default=64, help="in a round (default: 64)")
    add("--rounds", type=positive_int, default=3, help="of each (default: 3)")
    add("--profile", action="store_true", help="the kernels of a step; needs PyTorch with CUDA, whose profiler it is")
    add("--requests", type=int, default=32, help="whose tokens are compared (default: 32; 0: none)")
    add("--longest", type=positive_int, default=700, help="of their prompts, in tokens (default: 700)")
    add("--output-tokens", type=positive_int, default=48, help="of each of them (default: 48)")
    add("--seed", type=int, default=0, help="of weights and prompts")
    add("--out", type=result_file, default="bench-results/decode.json", help="where the JSON goes")
    args = parser.parse_args(argv)
    args.arms = args.arms.split(",")
    if unknown := set(args.arms) - set(ARMS):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if args.requests and "gather" not in args.arms:
        parser.error("tokens are compared with those of gather: add it to --arms, or give --requests 0")
    if args.profile and not can_profile():
        parser.error("--profile uses PyTorch's profiler, and PyTorch is not installed here: leave the option out")
    return args


def build_engine(arm: str, args: argparse.Namespace, **limits: int) -> Engine:
    """An engine with the arm's settings, these limits and the seed's weights."""
    mx.random.seed(args.seed)
    options: dict[str, Any] = limits | ARMS[arm]
    config = EngineConfig(
        model=args.shape, block_size=_BLOCK_SIZE, prefix_cache="none", chunk_halving_context=None, **options
    )
    model = random_model(llama_config(SHAPES[args.shape]), DTYPES[args.dtype])
    if arm != "serial":
        return build_engine_for(config, model)
    graphs = load_graphs()
    graphs.overlap = False  # until the engine has made its recordings
    try:
        return build_engine_for(config, model)
    finally:
        graphs.overlap = True


def answer(engine: Engine, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[list[int]]:
    """The greedy tokens of each prompt; two requests come each step."""
    tokens: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingParams(output_tokens, 0.0, ignore_eos=True)
    coming = list(enumerate(prompts))
    while coming or engine.has_unfinished_requests():
        for index, prompt in coming[:2]:
            engine.add_request(Request(str(index), tuple(prompt), sampling))
        del coming[:2]
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            tokens[int(output.request_id)] += output.new_token_ids
    return tokens


def parted(model: Any, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], dtype: str) -> dict[str, Any]:
    """Where two answers part, how far apart the model holds the two tokens, and how far near ties may be."""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    logits = model(mx.array([[*prompt, *ours[:place]]]))[0, -1].astype(mx.float32)
    one, two, most = logits[ours[place]].item(), logits[theirs[place]].item(), mx.abs(logits).max().item()
    return {
        "token": place,
        "gap": abs(one - two),
        "near_tie": _NEAR_TIE[dtype] * most,
        # Neither may be far below what the model itself would say.
        "below_best": logits.max().item() - min(one, two),
    }


def far_from_best(model: Any, prompt: Sequence[int], answer: Sequence[int], dtype: str) -> dict[str, Any] | None:
    """The first token of an answer that the model itself holds for worse than a near tie of its best one, if any."""
    inputs = mx.array([[*prompt, *answer[:-1]]])
    logits = model(inputs)[0, len(prompt) - 1 :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(list(answer))[:, None], axis=-1).squeeze(-1)
    below: Any = (logits.max(axis=-1) - chosen).tolist()
    ties: Any = (_NEAR_TIE[dtype] * mx.abs(logits).max(axis=-1)).tolist()
    for place, (gap, tie) in enumerate(zip(below, ties, strict=True)):
        if not gap <= tie:
            return {"token": place, "below_best": gap, "near_tie": tie}
    return None


def compare_tokens(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """For each arm: how many requests have gather's tokens (of gather, the model's), and where the others part."""
    source = random.Random(args.seed)
    lengths = [source.randint(1, args.longest) for _ in range(args.requests)]
    config = llama_config(SHAPES[args.shape])
    prompts = random_prompts(args.seed, lengths, config["vocab_size"])
    longest = args.longest + args.output_tokens
    limits = {
        # Room for four of the longest: some must wait, and some are preempted.
        "num_blocks": 4 * (longest // _BLOCK_SIZE + 1),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_model_len": longest,
    }
    answers, counters = {}, {}
    for arm in args.arms:
        engine = build_engine(arm, args, **limits)
        answers[arm] = answer(engine, prompts, args.output_tokens)
        counters[arm] = QuireStepper(engine).counters()
        # What is compiled refers to the model that it is a part of.
        del engine
        gc.collect()
        mx.clear_cache()
        print(f"{arm}: {counters[arm]}", flush=True)
    mx.random.seed(args.seed)
    model = random_llama(config, DTYPES[args.dtype])
    found = {}
    for arm in args.arms:
        if arm == "gather":
            different = wrong = [
                {"request": i, **far}
                for i, (prompt, ours) in enumerate(zip(prompts, answers[arm], strict=True))
                if (far := far_from_best(model, prompt, ours, args.dtype))
            ]
        else:
            different = [
                {"request": i, **parted(model, prompt, ours, theirs, args.dtype)}
                for i, (prompt, ours, theirs) in enumerate(zip(prompts, answers["gather"], answers[arm], strict=True))
                if ours != theirs
            ]
            wrong = [each for each in different if max(each["gap"], each["below_best"]) > each["near_tie"]]
        found[arm] = {
            "requests": len(prompts),
            "same": len(prompts) - len(different),
            "different": different,
            "wrong": None if arm == "int8" else len(wrong),
            "counters": counters[arm],
        }
    return found


def time_steps(
    args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The arms' steps, by context and batch, and the profile if one is wanted. `keep` gets the cases as they come."""
    config = llama_config(SHAPES[args.shape])
    span = args.rounds * (args.steps + _SKIP + 2) + 8
    longest = max(args.contexts) + span
    limits = {
        "num_blocks": max(args.batches) * (longest // _BLOCK_SIZE + 1) + 64,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": 8192,
        "max_model_len": longest,
    }
    loops = {arm: StepLoop(QuireStepper(build_engine(arm, args, **limits)), config["vocab_size"]) for arm in args.arms}
    cases: list[dict[str, Any]] = []
    for context in args.contexts:
        for batch in args.batches:
            begun = {arm: loop.decode_begin(batch, context, span, args.seed) for arm, loop in loops.items()}
            rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in loops}
            for _ in range(args.rounds):
                for arm, loop in loops.items():
                    rounds[arm].append(begun[arm] | loop.decode_round(args.steps, _SKIP))
            for arm, loop in loops.items():
                loop.end()
                step = statistics.median(each["step_ms"] for each in rounds[arm])
                cases.append({"arm": arm, "context": context, "batch": batch, "step_ms": step, "rounds": rounds[arm]})
                print(f"{arm}, {batch} x {context:,}: {step:.3f} ms, {rounds[arm][-1]['counters']}", flush=True)
            keep(cases)
    # At the end: a profiler stays in the process that it was started in.
    return cases, profile_of(cases[0], loops[args.arms[0]], span, args) if args.profile else None


def profile_of(case: Mapping[str, Any], loop: StepLoop, span: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """Which kernels a step of this case runs; None, and a line that says why, if the profiler fails."""
    loop.decode_begin(case["batch"], case["context"], span, args.seed)
    try:
        profile = profile_steps(partial(loop.decode_round, args.steps, 0), args.steps + 1)
    except (ImportError, RuntimeError) as error:
        print(f"no profile: {error}", file=sys.stderr)
        return None
    finally:
        loop.end()
    return {name: case[name] for name in ("arm", "context", "batch", "step_ms")} | profile


def render(result: Mapping[str, Any]) -> str:
    """The tables."""
    tables = []
    if result["tokens"]:
        rows = [
            [arm, f"{found['same']} of {found['requests']}", str(len(found["different"])),
             "" if found["wrong"] is None else str(found["wrong"])]
            for arm, found in result["tokens"].items()
        ]  # fmt: skip
        tables.append(markdown_table(["arm", "gather's tokens (of gather: the model's)", "parted", "wrong"], rows))
    if result["cases"]:
        rows = [
            [case["arm"], f"{case['context']:,}", str(case["batch"]), number(case["step_ms"], 3),
             number(case["batch"] / case["step_ms"] * 1e3, 0)]
            for case in result["cases"]
        ]  # fmt: skip
        tables.append(markdown_table(["arm", "context", "sequences", "ms a step", "tokens/s"], rows))
    if profile := result.get("profile"):
        rest = profile["step_ms"] - profile["busy_ms"]
        rows = [[each["name"], number(each["calls"], 1), number(each["us"], 1)] for each in profile["kernels"]]
        # Kernels that start before the last one has ended are counted from then on, the time that they wait included.
        rows.append(["the GPU waits" if rest >= 0 else "of it at the same time", "", number(1e3 * abs(rest), 1)])
        tables.append(
            f"{profile['arm']}, {profile['batch']} x {profile['context']:,}: {profile['step_ms']:.3f} ms a step\n\n"
            f"{markdown_table(['kernel', 'calls a step', 'us a step'], rows)}"
        )
    return "\n\n".join(tables)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit status."""
    args = parse_args(argv)
    result = new_result("decode")
    if result is None:
        return 2
    result["command"] = {name: value for name, value in vars(args).items() if name != "out"}
    result |= {"shape": args.shape, "dtype": args.dtype, "tokens": {}, "cases": []}
    if args.requests:
        result["tokens"] = compare_tokens(args)
        environment.write_json(args.out, result)

    def keep(cases: list[dict[str, Any]]) -> None:
        with contextlib.suppress(OSError):
            environment.write_json(args.out, result | {"cases": cases})

    if not args.tokens_only:
        result["cases"], result["profile"] = time_steps(args, keep)
    device = result["device"].get("device_name", "")
    print(f"\n{environment.headline(result['environment'])}\n{args.shape}, {args.dtype}, {device}\n")
    print(render(result))
    environment.write_json(args.out, result)
    print(f"\nWritten: {args.out}")
    return 1 if any(found["wrong"] for found in result["tokens"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
