"""The cases of the engine benchmark, its rounds, and what becomes of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.prompts import PromptSource
from loadtest.stats import ratio, summary
from loadtest.tables import markdown_table, number, number_range
from loadtest.throughput import BatchRun, agreement

ARMS = ("quire", "mlx_lm")
METRICS = {
    "prefill": "prompt tokens/s until the last sequence has its first token",
    "decode": "output tokens/s while all sequences decode",
    "end_to_end": "output tokens/s from hand-over to the last token",
}
MIXED_LENGTHS = (10, 200, 1500)  # prompt tokens
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences handed over together."""

    name: str
    prompt_lengths: tuple[int, ...]  # tokens
    max_tokens: int
    targets: dict[str, float] = field(default_factory=dict)  # metric to the least ratio wanted

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths)


def uniform_case(num_sequences: int, prompt_tokens: int, max_tokens: int) -> Case:
    """Sequences of one length. The targets are the issue's: 1.0x alone, 1.3x at 16 and 32."""
    target = {1: 1.0, 16: 1.3, 32: 1.3}.get(num_sequences)
    targets = {} if target is None else {"decode": target}
    name = f"{num_sequences} x {prompt_tokens}"
    return Case(name, (prompt_tokens,) * num_sequences, max_tokens, targets)


def mixed_case(count: int, lengths: Sequence[int], max_tokens: int) -> Case:
    """`count` sequences of each length, taking turns, so that every part of the queue is mixed. Target: 2x in all."""
    name = f"mixed {count} x ({', '.join(map(str, lengths))})"
    return Case(name, tuple(lengths) * count, max_tokens, {"end_to_end": 2.0})


@dataclass(slots=True)
class CaseResult:
    """A case's raw samples, by arm and metric, in tokens per second."""

    case: Case
    samples: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {arm: {metric: [] for metric in METRICS} for arm in ARMS}
    )
    agreements: list[dict[str, float]] = field(default_factory=list)  # of each round
    dispatch: dict[str, int] = field(default_factory=dict)  # calls by attention path, all rounds
    preemptions: int = 0
    failure: str | None = None  # why there are fewer rounds than asked for

    def add(self, arm: str, run: BatchRun) -> None:
        """Takes a run's three rates; a case without a common decode phase has no decode rate."""
        rates = {"prefill": run.prefill_rate, "decode": run.decode_rate, "end_to_end": run.end_to_end_rate}
        for metric, rate in rates.items():
            if rate is not None:
                self.samples[arm][metric].append(rate)

    def ratios(self, metric: str) -> list[float]:
        """Ours to the peer's, round by round."""
        ours, theirs = (self.samples[arm][metric] for arm in ARMS)
        return [a / b for a, b in zip(ours, theirs, strict=False)]

    def to_json(self) -> dict[str, Any]:
        """Raw samples, medians, ratios of medians and the ratios of the rounds."""
        metrics = {}
        for metric in METRICS:
            arms = {arm: summary(self.samples[arm][metric]) for arm in ARMS}
            metrics[metric] = arms | {
                "ratio_of_medians": ratio(*(arms[arm]["median"] for arm in ARMS)),
                "ratios_by_round": self.ratios(metric),
                "target": self.case.targets.get(metric),
            }
        return {
            "name": self.case.name,
            "prompt_tokens": list(self.case.prompt_lengths),
            "max_tokens": self.case.max_tokens,
            "tokens_per_second": metrics,
            "greedy_agreement_by_round": self.agreements,
            "dispatch": self.dispatch,
            "preemptions": self.preemptions,
            "failure": self.failure,
        }


def run_case(
    case: Case,
    rounds: int,
    prompts: PromptSource,
    call: Callable[[str, Prompts, int], dict[str, Any]],
    tick: Callable[[], None] = lambda: None,
) -> CaseResult:
    """Runs the case `rounds` times, ours then the peer's, with new prompts in each round, the same for both.

    call(arm, prompts, max_tokens) runs one arm; what it raises is kept as the case's failure, with the rounds before.
    A first run of each arm is not counted: what is compiled on first use is compiled there. Raises ValueError when
    prompts run out.
    """
    result = CaseResult(case)
    try:
        for arm in ARMS:
            call(arm, [prompts.take(length) for length in case.prompt_lengths], case.max_tokens)
            tick()
        for _ in range(rounds):
            _run_round(case, [prompts.take(length) for length in case.prompt_lengths], call, result, tick)
    except RuntimeError as error:
        result.failure = str(error)
    return result


def _run_round(
    case: Case,
    prompts: Prompts,
    call: Callable[[str, Prompts, int], dict[str, Any]],
    result: CaseResult,
    tick: Callable[[], None],
) -> None:
    runs = []
    for arm in ARMS:
        reply = call(arm, prompts, case.max_tokens)
        run = BatchRun.from_reply(prompts, reply)
        try:
            run.check(case.max_tokens)
        except ValueError as error:
            raise RuntimeError(f"{arm}: {error}") from error
        if reply.get("cached_tokens"):
            raise RuntimeError(f"{arm}: {reply['cached_tokens']} prompt tokens came from a cache")
        for path, count in reply.get("dispatch", {}).items():
            result.dispatch[path] = result.dispatch.get(path, 0) + count
        result.preemptions += reply.get("preemptions", 0)
        runs.append(run)
        tick()
    # Only now, so that both arms always have the same rounds.
    for arm, run in zip(ARMS, runs, strict=True):
        result.add(arm, run)
    result.agreements.append(agreement(runs[0].tokens, runs[1].tokens))


def render(results: Sequence[CaseResult]) -> str:
    """The table: medians of all rounds, the ratio of the medians, and the range of the rounds' ratios."""
    rows = []
    for result in results:
        summaries = result.to_json()["tokens_per_second"]
        for metric in METRICS:
            found = summaries[metric]
            ratios = found["ratios_by_round"]
            same = [share["sequences"] for share in result.agreements]
            rows.append(
                [
                    result.case.name,
                    metric.replace("_", " "),
                    number(found["quire"]["median"]),
                    number(found["mlx_lm"]["median"]),
                    number(found["ratio_of_medians"], 2, "x"),
                    number_range(ratios),
                    number(found["target"], 1, "x"),
                    number(100 * min(same) if same else None, 0, "%"),
                ]
            )
    header = ["sequences x prompt", "tokens/s", "quire", "mlx-lm", "ratio", "by round", "target", "same output"]
    table = markdown_table(header, rows)
    failures = [f"{result.case.name}: {result.failure}" for result in results if result.failure]
    return "\n".join([table, *(f"FAILED {line}" for line in failures)])
