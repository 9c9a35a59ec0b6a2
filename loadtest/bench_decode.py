"""Decode steps of the whole engine on random weights of well-known shapes, on a GPU.

For each shape, context and batch: that many prompts of random tokens are prefilled, and the time between the steps in
which every one of them gets a token is taken. Scheduler, sampler and all are in it. The arms are ways to run the same
step: `recorded` (CUDA graphs), `compiled`, `fused` (neither) and `gather` (K/V copied out of the pool); counters in
the result say which paths ran. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from loadtest import environment
from loadtest.gpu import new_result
from loadtest.options import int_list, positive_int
from loadtest.tables import markdown_table, number
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.models.load import LoadedModel
from mlx_engine.types import Request, SamplingParams
from plugins.build import build_engine_for

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
ARMS: dict[str, dict[str, Any]] = {
    "recorded": {"attention_backend": "fused"},
    "compiled": {"attention_backend": "fused", "record_decode": False},
    "fused": {"attention_backend": "fused", "compile_decode": False},
    "gather": {"attention_backend": "gather"},
}
_STEPS = 64


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_decode", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b", help="of the model (default: llama-1b)")
    parser.add_argument("--contexts", type=int_list, default=[512], help="tokens in each prompt (default: 512)")
    parser.add_argument("--batches", type=int_list, default=[1, 8, 32, 128, 256], help="sequences at once")
    parser.add_argument("--arms", default="recorded,gather", help=f"of {', '.join(ARMS)} (default: recorded,gather)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the sampler (default: 0, greedy)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the sampler (default: 1, off)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="of each (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("bench-results/decode.json"), help="where the JSON goes")
    args = parser.parse_args(argv)
    args.arms = args.arms.split(",")
    if unknown := set(args.arms) - set(ARMS):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    return args


def random_model(shape: str) -> LoadedModel:
    """A Llama of this shape in bfloat16, its weights drawn by MLX."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
    }
    config |= SHAPES[shape]
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return LoadedModel(
        model=model,
        config=config,
        dtype=mx.bfloat16,
        eos_token_ids=frozenset(),
        max_model_len=131072,
        vocab_size=config["vocab_size"],
        weight_bytes=sum(int(array.nbytes) for _, array in tree_flatten(model.parameters())),
    )


def run(engine: Engine, batch: int, context: int, rng: np.random.Generator, sampling: SamplingParams) -> dict[str, Any]:
    """One batch through the engine: milliseconds of a step in which all decode, and prefill tokens/s."""
    for i in range(batch):
        prompt = tuple(rng.integers(10, 100_000, context).tolist())
        engine.add_request(Request(f"{time.monotonic_ns()}-{i}", prompt, sampling))
    before = dict(engine.stats().dispatch)
    start = time.perf_counter()
    times = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if sum(len(output.new_token_ids) for output in outputs) == batch:
            times.append(time.perf_counter())
    # The first steps still run beside the last prompts' chunks.
    steady = times[4:-2]
    after = engine.stats().dispatch
    return {
        "step_ms": (steady[-1] - steady[0]) / (len(steady) - 1) * 1e3,
        "steps": len(steady) - 1,
        "prefill_tokens_per_s": batch * context / (times[0] - start),
        "dispatch": {name: count - before.get(name, 0) for name, count in after.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit status."""
    args = parse_args(argv)
    result = new_result("decode")
    if result is None:
        return 2
    sampling = SamplingParams(_STEPS + 8, args.temperature, top_p=args.top_p, ignore_eos=True)
    result["command"] = {
        "shape": args.shape,
        "contexts": args.contexts,
        "batches": args.batches,
        "arms": args.arms,
        "temperature": args.temperature,
        "top_p": args.top_p,
    }
    cases, rows = [], []
    largest, longest = max(args.batches), max(args.contexts)
    for arm in args.arms:
        config = EngineConfig(
            model=args.shape,
            num_blocks=largest * (longest + 128) // 16 + 64,
            max_num_seqs=largest,
            max_num_batched_tokens=8192,
            max_model_len=longest + 128,
            prefix_cache="none",
            chunk_halving_context=None,
            **ARMS[arm],
        )
        start = time.monotonic()
        engine = build_engine_for(config, random_model(args.shape))
        built = time.monotonic() - start
        print(f"{arm}: built in {built:.1f} s, {mx.get_active_memory() / 1e9:.1f} GB", flush=True)
        rng = np.random.default_rng(0)
        for context in args.contexts:
            for batch in args.batches:
                run(engine, batch, context, rng, sampling)
                rounds = [run(engine, batch, context, rng, sampling) for _ in range(args.rounds)]
                step = statistics.median(r["step_ms"] for r in rounds)
                prefill = statistics.median(r["prefill_tokens_per_s"] for r in rounds)
                cases.append({"arm": arm, "context": context, "batch": batch, "step_ms": step, "rounds": rounds})
                rows.append([arm, f"{context:,}", str(batch), number(step, 3), number(batch / step * 1e3, 0),
                             number(prefill, 0)])  # fmt: skip
                print(" ".join(rows[-1]), flush=True)
        del engine
        mx.clear_cache()
    print(f"\n{environment.headline(result['environment'])}\n{args.shape}, bfloat16, {result['device']}\n")
    print(markdown_table(["arm", "context", "sequences", "ms a step", "tokens/s", "prefill tokens/s"], rows))
    environment.write_json(args.out, result | {"shape": args.shape, "cases": cases})
    print(f"\nWritten: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
