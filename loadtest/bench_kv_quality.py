"""What K/V in 8 bits costs in quality: perplexity of real text, and how long greedy outputs stay the same.

The text is the language reference that ships with Python (`pydoc_data.topics`). Its perplexity is teacher-forced,
through the paged model and the attention backend of the engine: stretches of it are read in prefill chunks, the last
tokens of each as decode rows of one step. Then whole engines continue pieces of it greedily. Prints a table and writes
JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import pydoc_data.topics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

# Before anything that imports MLX: OpenBLAS must come first.
from mlx_engine.attention.fused import kernels_run_here
from mlx_engine.config import EMBEDDED_MODEL, EngineConfig
from mlx_engine.input_batch import build_input_batch
from mlx_engine.interfaces import AttentionBackend
from mlx_engine.memory import bytes_per_block
from mlx_engine.models.load import LoadedModel, load_model
from mlx_engine.models.resolve import resolve_model
from mlx_engine.models.tokenizer import Tokenizer
from mlx_engine.paged_model import PagedModel
from mlx_engine.types import Request, SamplingParams, ScheduledSequence, SchedulerOutput, cdiv
from plugins.build import build_engine_for, build_model
from plugins.registry import ATTENTION_BACKENDS, create

# Third-party, but after ours: the first import of `mlx.core` binds its BLAS.
import mlx.core as mx  # isort: skip
import numpy as np  # isort: skip
from tqdm import tqdm  # isort: skip

from loadtest import environment
from loadtest.experiments.base import Record
from loadtest.experiments.report import render
from loadtest.options import int_list, positive_int, result_file

AUTO, INT8 = "auto", "int8"
_BLOCK_SIZE = 16
_CHUNK = 512  # tokens of a step that reads text
_MOST_LOSS = 0.01  # of perplexity
_PATHS = ("prefill chunks", "decode rows")
_GREEDY = SamplingParams(temperature=0.0)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. --quick replaces the sizes that aren't given by tiny ones."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_kv_quality", description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as engine.model (default: embedded)")
    dtypes = get_args(EngineConfig.model_fields["dtype"].annotation)
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="as engine.dtype (default: auto)")
    parser.add_argument("--windows", type=positive_int, help="stretches of text (default: 8)")
    parser.add_argument("--context", type=positive_int, help="tokens of each (default: 1536)")
    parser.add_argument("--decode-tokens", type=positive_int, help="of these the last, as decode rows (default: 64)")
    parser.add_argument("--prompts", type=positive_int, help="greedy prompts of each length (default: 12)")
    parser.add_argument("--prompt-tokens", type=int_list, help="their lengths (default: 128,1024)")
    parser.add_argument("--output-tokens", type=positive_int, help="tokens out of each (default: 64)")
    parser.add_argument("--out", type=result_file, default="bench-results/kv-quality.json", help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it works")
    args = parser.parse_args(argv)
    names = ("windows", "context", "decode_tokens", "prompts", "prompt_tokens", "output_tokens")
    sizes = (2, 96, 8, 2, [16], 8) if args.quick else (8, 1536, 64, 12, [128, 1024], 64)
    for name, value in zip(names, sizes, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.decode_tokens + 2 > args.context:
        parser.error(f"--decode-tokens must be at most {args.context - 2}, two less than --context")
    return args


def python_text() -> str:
    """The language reference as Python's own help shows it, topic by topic."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def spread(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """`count` pieces of `length` tokens, evenly spread. Raises ValueError if the text is too short for that."""
    if count * length > len(ids):
        raise ValueError(f"the text has {len(ids)} tokens, fewer than {count} times {length}")
    stride = len(ids) // count
    return [list(ids[start : start + length]) for start in range(0, count * stride, stride)]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model made of a piece of text: one entry for each token but the first."""

    losses: list[float]  # -log of the probability that it gave to the token, natural
    best: list[int]  # the token that it found most likely

    @property
    def perplexity(self) -> float:
        """Of these tokens."""
        return perplexity([self])


def perplexity(scores: Sequence[Scores]) -> float:
    """Of all tokens of these texts together."""
    losses = [loss for score in scores for loss in score.losses]
    return math.exp(sum(losses) / len(losses))


class Scorer:
    """Reads texts of one length through a model whose K/V lies in a paged pool, all texts beside each other."""

    def __init__(
        self, model: PagedModel, windows: Sequence[Sequence[int]], dtype: mx.Dtype, kv_dtype: mx.Dtype
    ) -> None:
        """dtype is the model's, kv_dtype the pool's; see AttentionBackend."""
        self._model = model
        self._windows = windows
        self._length = len(windows[0])
        self._num_pages = cdiv(self._length, _BLOCK_SIZE)
        name = "fused" if kernels_run_here() else "gather"
        self._backend: AttentionBackend = create(ATTENTION_BACKENDS, name, kwargs={}, options={})
        self._backend.initialize(model.layers, len(windows) * self._num_pages, _BLOCK_SIZE, dtype, kv_dtype)
        self._steps = 0

    def run(self, decode_tokens: int, name: str = "") -> dict[str, list[Scores]]:
        """The texts' scores by path; `name` is said beside the progress."""
        scores = {path: [Scores([], []) for _ in self._windows] for path in _PATHS}
        chunks, decodes = (scores[path] for path in _PATHS)
        first_decode = self._length - 1 - decode_tokens
        everything = range(len(self._windows))
        with tqdm(total=(self._length - 1) * len(everything), desc=name, unit="token", file=sys.stderr) as bar:
            for window in everything:
                for start in range(0, first_decode, _CHUNK):
                    count = min(_CHUNK, first_decode - start)
                    self._step([window], start, count, chunks)
                    bar.update(count)
            for start in range(first_decode, self._length - 1):
                self._step(everything, start, 1, decodes)
                bar.update(len(everything))
        return scores

    def dispatch_counts(self) -> dict[str, int]:
        """The backend's."""
        return dict(self._backend.dispatch_counts())

    def _step(self, windows: Sequence[int], start: int, count: int, scores: Sequence[Scores]) -> None:
        """Runs `count` tokens of each of the texts, in one step, and scores the tokens after them."""
        sequences = tuple(
            ScheduledSequence(
                request_id=str(window),
                start=start,
                num_tokens=count,
                token_ids=self._windows[window][start : start + count],
                block_table=range(1 + window * self._num_pages, 1 + (window + 1) * self._num_pages),
                samples=False,
                num_output_tokens=0,
                sampling=_GREEDY,
                seed=0,
            )
            for window in windows
        )
        batch = build_input_batch(SchedulerOutput(self._steps, sequences), _BLOCK_SIZE)
        self._steps += 1
        views = self._backend.begin_step(batch)
        logits = self._model(mx.array(batch.token_ids), views, None).astype(mx.float32)
        targets = mx.array([token for window in windows for token in self._windows[window][start + 1 :][:count]])
        chosen = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(1)
        losses, best = mx.logsumexp(logits, axis=-1) - chosen, mx.argmax(logits, axis=-1)
        mx.eval(losses, best, self._backend.state())
        for row, window in enumerate(windows):
            rows = slice(row * count, (row + 1) * count)
            scores[window].losses.extend(np.array(losses[rows]).tolist())
            scores[window].best.extend(np.array(best[rows]).tolist())


def same_tokens(first: Sequence[int], second: Sequence[int]) -> tuple[float, int]:
    """The share of places with the same token, in percent, and how many are the same before the first that differs."""
    same = [a == b for a, b in zip(first, second, strict=True)]
    return 100 * sum(same) / len(same), same.index(False) if False in same else len(same)


def check_lengths(args: argparse.Namespace, max_model_len: int) -> None:
    """Raises ValueError for stretches, or prompts with their outputs, that are longer than the model takes."""
    longest = max(args.prompt_tokens) + args.output_tokens
    for options, tokens in (("--context makes", args.context), ("--prompt-tokens and --output-tokens make", longest)):
        if tokens > max_model_len:
            raise ValueError(f"{options} {tokens} tokens, and the model was made for {max_model_len}: give fewer")


def score_text(args: argparse.Namespace, loaded: LoadedModel, ids: Sequence[int], record: Record) -> None:
    """Perplexities of both arms, and how often they find the same token most likely."""
    model = build_model(EngineConfig.model_validate({"model": args.model}), loaded)
    windows = spread(ids, args.windows, args.context)
    found: dict[str, dict[str, list[Scores]]] = {}
    for arm, kv_dtype in ((AUTO, loaded.dtype), (INT8, mx.int8)):
        scorer = Scorer(model, windows, loaded.dtype, kv_dtype)
        found[arm] = scorer.run(args.decode_tokens, arm)
        for path, count in scorer.dispatch_counts().items():
            record.count(arm, f"attention_dispatch {path}", count)
        per_token = bytes_per_block(model.layers, _BLOCK_SIZE, kv_dtype) / _BLOCK_SIZE
        record.add("K/V of a token", "bytes", arm, [per_token], better="lower", digits=0)
    everything = {arm: [score for path in _PATHS for score in scores[path]] for arm, scores in found.items()}
    for arm, scores in found.items():
        record.add("perplexity", "", arm, [perplexity(everything[arm])], better="lower", case="all tokens", digits=4)
        for path in _PATHS:
            record.add("perplexity of a text", "", arm, [score.perplexity for score in scores[path]], better="lower",
                       case=path, figures=("median", "min", "max"), digits=3)  # fmt: skip
    for path in _PATHS:
        agreement = [same_tokens(a.best, b.best)[0] for a, b in zip(found[AUTO][path], found[INT8][path], strict=True)]
        record.add("same most likely token", "%", INT8, agreement, better="higher", case=path,
                   figures=("median", "min"), digits=2)  # fmt: skip
    loss = perplexity(everything[INT8]) / perplexity(everything[AUTO]) - 1
    record.check(
        f"perplexity rises by at most {100 * _MOST_LOSS:g} %",
        loss <= _MOST_LOSS,
        f"{100 * loss:+.3f} % over {sum(len(score.losses) for score in everything[AUTO]):,} tokens",
    )


def continue_text(
    args: argparse.Namespace, folder: Path, prompts: Mapping[int, Sequence[Sequence[int]]], record: Record
) -> None:
    """Greedy outputs of both arms' engines for pieces of the text, by their length, compared."""
    longest = max(args.prompt_tokens) + args.output_tokens
    outputs: dict[str, dict[int, list[list[int]]]] = {}
    for arm in (AUTO, INT8):
        config = {
            "model": args.model,
            "dtype": args.dtype,
            "kv_cache_dtype": arm,
            "block_size": _BLOCK_SIZE,
            "num_blocks": args.prompts * cdiv(longest, _BLOCK_SIZE),
            "max_model_len": longest,
            "prefix_cache": "none",
        }
        engine = build_engine_for(EngineConfig.model_validate(config), load_model(folder, args.dtype))
        sampling = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)
        outputs[arm] = {length: [[] for _ in pieces] for length, pieces in prompts.items()}
        for length, pieces in tqdm(prompts.items(), f"{arm}, greedy", unit="length", file=sys.stderr):
            for index, piece in enumerate(pieces):
                engine.add_request(Request(str(index), tuple(piece), sampling))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    outputs[arm][length][int(output.request_id)] += output.new_token_ids
        for path, count in engine.stats().dispatch.items():
            record.count(arm, f"attention_dispatch {path}", count)
    for length in prompts:
        compared = [same_tokens(*pair) for pair in zip(outputs[AUTO][length], outputs[INT8][length], strict=True)]
        case = f"greedy after {length:,} tokens"
        record.add("same tokens", "%", INT8, [share for share, _ in compared], better="higher", case=case,
                   figures=("median", "min"))  # fmt: skip
        record.add("tokens before the first that differs", "tokens", INT8, [count for _, count in compared],
                   better="higher", case=case, figures=("median", "min"), digits=0)  # fmt: skip
        whole = sum(count == args.output_tokens for _, count in compared)
        mean = sum(share for share, _ in compared) / len(compared)
        record.notes.append(
            f"Greedy after {length:,} tokens: {whole} of {len(compared)} outputs of {args.output_tokens} tokens are "
            f"the same, and {mean:.1f} % of all tokens."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the JSON. 1 when too much quality is lost, 2 for lengths that don't fit."""
    args = parse_args(argv)
    found = environment.describe()
    folder = resolve_model(args.model)
    text = python_text()
    ids = Tokenizer(folder).encode(text)
    record = Record()
    loaded = load_model(folder, args.dtype)
    try:
        check_lengths(args, loaded.max_model_len)
        prompts = {length: spread(ids, args.prompts, length) for length in args.prompt_tokens}
        score_text(args, loaded, ids, record)
        del loaded  # two models in memory would be one too many
        continue_text(args, folder, prompts, record)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    record.notes.append(
        f"Text: the language reference in Python {found['versions']['python']}, {len(ids):,} tokens. Scored: "
        f"{args.windows} stretches of {args.context:,}, the last {args.decode_tokens} of each in decode rows."
    )
    result: dict[str, Any] = {
        "benchmark": "experiment",
        **found,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "device": mx.default_device().type.name,
        "name": "kv-quality",
        "title": "K/V in 8 bits",
        "question": "What do 8-bit keys and values cost in quality?",
        "arms": [
            {"name": arm, "engine": {"kv_cache_dtype": arm}, "counters": record.counters[arm]} for arm in (AUTO, INT8)
        ],
        "metrics": [metric.to_json() for metric in record.metrics],
        "series": [],
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in record.checks],
        "notes": record.notes,
        "failures": record.failures,
    }
    print(f"\n# {result['title']}\n\n{render(result)}")
    environment.write_json(args.out, result)
    print(f"\nRaw samples: {args.out}")
    return 0 if all(check.passed for check in record.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
