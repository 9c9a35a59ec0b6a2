"""The reference: mlx_lm's `generate_step`, in a process of its own, so that nothing that an engine does to models or
modules can reach it. Run as `python -m tests.parity.reference`: a job as JSON on stdin, answers as JSON on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.parity.compare import Reference

SMOLLM2 = "smollm2"
ROOT = Path(__file__).parents[2]


def references(jobs: dict[str, Sequence[Sequence[int]]], max_tokens: int) -> dict[str, list[Reference]]:
    """mlx_lm's greedy answers to token-id prompts, by model: SMOLLM2 or a name of `tiny_models.TINY`."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.parity.reference"],
        input=json.dumps({"jobs": jobs, "max_tokens": max_tokens}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    return {name: [Reference(tuple(tokens), tuple(gaps)) for tokens, gaps in pairs] for name, pairs in answers.items()}


def _main() -> None:
    import mlx_engine  # noqa: F401  (OpenBLAS first)
    from mlx_engine.models.load import load_model, resolve_model
    from tests.parity.tiny_models import TINY, build

    request = json.load(sys.stdin)
    answers = {}
    for name, prompts in request["jobs"].items():
        model = load_model(resolve_model("embedded")).model if name == SMOLLM2 else build(TINY[name]).model
        answers[name] = [_generate(model, prompt, request["max_tokens"]) for prompt in prompts]
    print(json.dumps(answers))


def _generate(model: object, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    tokens, gaps = [], []
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
        second, best = mx.topk(logprobs.astype(mx.float32), 2).tolist()
        tokens.append(int(token))
        gaps.append(abs(best - second))
    return tokens, gaps


if __name__ == "__main__":
    _main()
