"""What drafts are worth: answers that repeat their prompt and free ones, with a drafter and without, in process.

Two engines, each in a process of its own, answer the same chats, taking turns. Greedy, past end-of-sequence, nothing
cached. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest import environment
from loadtest.options import blas_summary, exit_on_sigterm, int_list, key_value, merged, positive_int, result_file
from loadtest.stats import ratio, summary
from loadtest.tables import markdown_table, number, number_range
from loadtest.throughput import BatchRun, agreement
from loadtest.workers import Worker

ARMS = ("plain", "drafts")
KINDS = ("repeats", "free")
_START_TIMEOUT_S = 600.0
_SENTENCES = (
    "The ferry leaves the harbour at seven and comes back after dark.",
    "In winter the road over the pass is closed for weeks at a time.",
    "A retired teacher keeps the village library open on Thursdays.",
    "The bakery sells out of rye bread before nine o'clock.",
    "Two engineers repaired the old clock with parts from a tractor.",
    "Nobody remembers who planted the row of lime trees by the school.",
    "The river rose by a metre in a single night last spring.",
    "Visitors are asked to leave their boots beside the door.",
    "Her report lists forty bridges, eleven of which need new railings.",
    "The orchestra rehearses in a barn that smells of apples.",
    "Every letter was answered by hand until the office closed.",
    "The museum's smallest room holds its most valuable map.",
)
_TOPICS = (
    "a robot that learns to paint", "a lighthouse without a keeper", "two rival bakers", "a train that never stops",
    "the last day of a long summer", "a dog who guards a bridge", "a letter that arrives late", "a city under water",
    "an honest thief", "a garden on the moon", "a clock that runs backwards", "a singer who lost her voice",
)  # fmt: skip


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. --quick replaces the sizes that aren't given by tiny ones."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_drafts", description=__doc__)
    parser.add_argument("--model", default="embedded", help="'embedded', a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--drafter", default="ngram", help="by entry-point name (default: ngram)")
    parser.add_argument("--option", type=key_value, action="append", metavar="KEY=VALUE", help="a drafter option")
    parser.add_argument("--engine", type=key_value, action="append", metavar="KEY=VALUE", help="an EngineConfig value")
    parser.add_argument("--sequences", type=int_list, help="chats at once (default: 1,8)")
    parser.add_argument("--output-tokens", type=positive_int, help="tokens out of each chat (default: 128)")
    parser.add_argument("--rounds", type=positive_int, help="counted runs of each case and arm (default: 5)")
    parser.add_argument("--timeout", type=positive_int, default=900, help="seconds for a run (default: 900)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--out", type=result_file, default="bench-results/drafts.json", help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: to see that it works")
    args = parser.parse_args(argv)
    quick: dict[str, Any] = {"sequences": [1, 2], "output_tokens": 24, "rounds": 1}
    full: dict[str, Any] = {"sequences": [1, 8], "output_tokens": 128, "rounds": 5}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.output_tokens < 2:
        parser.error("--output-tokens must be at least 2: a decode rate needs two tokens")
    return args


def question(kind: str, rng: random.Random) -> str:
    """What a user asks: to get a text of eight sentences back, or to get one that isn't there yet."""
    if kind == "free":
        return f"Write a short story about {rng.choice(_TOPICS)} and {rng.choice(_TOPICS)}."
    text = " ".join(rng.sample(_SENTENCES, 8))
    return f"Repeat the following text exactly, word for word.\n\n{text}"


@dataclass(slots=True)
class Case:
    """One kind of question, so many at once: raw samples by arm."""

    kind: str
    num_sequences: int
    decode: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})  # tokens/s, all decoding
    end_to_end: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})  # tokens/s
    steps: dict[str, list[int]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    agreements: list[dict[str, float]] = field(default_factory=list)  # of each round

    def add(self, runs: dict[str, BatchRun], replies: dict[str, dict[str, Any]]) -> None:
        """Takes a round of both arms."""
        for arm in ARMS:
            self.end_to_end[arm].append(runs[arm].end_to_end_rate)
            self.steps[arm].append(replies[arm]["steps"])
            # None where one sequence ends before another one's first token.
            if (rate := runs[arm].decode_rate) is not None:
                self.decode[arm].append(rate)
        self.draft_tokens += replies["drafts"]["draft_tokens"]
        self.accepted_draft_tokens += replies["drafts"]["accepted_draft_tokens"]
        self.agreements.append(agreement(runs["plain"].tokens, runs["drafts"].tokens))

    def ratios(self, metric: str) -> list[float]:
        """With drafts to without, round by round."""
        samples = getattr(self, metric)
        return [a / b for a, b in zip(samples["drafts"], samples["plain"], strict=False)]

    def to_json(self) -> dict[str, Any]:
        """Raw samples, medians and ratios."""
        rates = {}
        for metric in ("decode", "end_to_end"):
            arms = {arm: summary(getattr(self, metric)[arm]) for arm in ARMS}
            medians = ratio(arms["drafts"]["median"], arms["plain"]["median"])
            rates[metric] = arms | {"ratio_of_medians": medians, "ratios_by_round": self.ratios(metric)}
        return {
            "kind": self.kind,
            "sequences": self.num_sequences,
            "tokens_per_second": rates,
            "steps": self.steps,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "acceptance": ratio(self.accepted_draft_tokens, self.draft_tokens),
            "greedy_agreement_by_round": self.agreements,
        }


def measure(args: argparse.Namespace, workers: dict[str, Worker]) -> list[Case]:
    """Runs all cases: a run of each arm that isn't counted, then the rounds, new prompts in each, the same for both."""
    rng = random.Random(args.seed)
    cases = [Case(kind, count) for count in args.sequences for kind in KINDS]
    with tqdm(total=len(cases) * (args.rounds + 1), unit="round", file=sys.stderr) as bar:
        for case in cases:
            bar.set_description(f"{case.kind} x {case.num_sequences}")
            for index in range(args.rounds + 1):
                questions = [question(case.kind, rng) for _ in range(case.num_sequences)]
                prompts = workers["plain"].call("encode", args.timeout, model=args.model, questions=questions)
                replies, runs = {}, {}
                # The first one changes from round to round.
                for arm in ARMS if index % 2 else ARMS[::-1]:
                    reply = workers[arm].call("run", args.timeout, prompts=prompts, max_tokens=args.output_tokens)
                    replies[arm], runs[arm] = reply, BatchRun.from_reply(prompts, reply)
                    runs[arm].check(args.output_tokens)
                if index:
                    case.add(runs, replies)
                bar.update()
    return cases


def render(cases: Sequence[Case]) -> str:
    """One row for each case: medians of decode rates, their ratio, and what became of the drafts."""
    rows = []
    for case in cases:
        found = case.to_json()
        decode, end_to_end = (found["tokens_per_second"][metric] for metric in ("decode", "end_to_end"))
        steps = {arm: summary(case.steps[arm])["median"] for arm in ARMS}
        same = [share["sequences"] for share in case.agreements]
        rows.append(
            [
                f"{case.kind} x {case.num_sequences}",
                number(decode["plain"]["median"]),
                number(decode["drafts"]["median"]),
                number(decode["ratio_of_medians"], 2, "x"),
                number_range(decode["ratios_by_round"]),
                number(end_to_end["ratio_of_medians"], 2, "x"),
                f"{number(steps['plain'], 0)} / {number(steps['drafts'], 0)}",
                number(None if found["acceptance"] is None else 100 * found["acceptance"], 0, "%"),
                number(100 * min(same) if same else None, 0, "%"),
            ]
        )
    header = ["answers x sequences", "tokens/s", "with drafts", "ratio", "by round", "end to end", "steps", "accepted",
              "same output"]  # fmt: skip
    return markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the JSON."""
    args = parse_args(argv)
    exit_on_sigterm()
    found = environment.describe()
    config = {"model": args.model, "prefix_cache": "none", "max_num_seqs": max(64, *args.sequences)}
    config |= merged(args.engine)
    drafting = {"drafter": args.drafter, "drafter_options": merged(args.option)}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        log = Path(temporary) / "workers.log"
        workers = {arm: Worker("loadtest.worker_quire", log) for arm in ARMS}
        try:
            described = {
                "plain": workers["plain"].call("build", _START_TIMEOUT_S, config=config),
                "drafts": workers["drafts"].call("build", _START_TIMEOUT_S, config=config | drafting),
            }
            cases = measure(args, workers)
        finally:
            for worker in workers.values():
                worker.close()
    for description in described.values():
        description["blas"] = blas_summary(description["blas"])
        del description["folder"]
    result = {
        "benchmark": "drafts",
        **found,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "arms": described,
        "seconds": time.monotonic() - started,
        "cases": [case.to_json() for case in cases],
    }
    print(f"# Drafts\n\n{environment.headline(found)}\n{args.rounds} rounds of {args.output_tokens} tokens\n")
    print(render(cases))
    environment.write_json(args.out, result)
    print(f"\nRaw samples: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
