"""The cases of the GPU comparison: what each asks of an arm, its rounds, its tables. Imports nothing of any engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from loadtest.stats import median, ratio, summary
from loadtest.tables import markdown_table, number, number_range

BLOCK_SIZE = 16  # tokens; of our engine and, on a GPU, of vLLM
SKIP = 4  # steps at the start of each round of decode steps, while the pipeline fills again
_SPARE = 16  # tokens of each sequence that no case counts on
_WARM_UP_REQUESTS = 16

Kind = Literal["decode", "prefill", "mixed"]
# Runs a method of an arm with a timeout; raises a RuntimeError where it can't answer.
Call = Callable[[str, str, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What all cases of a run share."""

    rounds: int = 3
    mixed_rounds: int = 1
    steps: int = 64  # decode steps in a round
    max_num_batched_tokens: int = 8192
    duration_s: float = 12.0  # of the arrivals
    prompt_tokens: tuple[int, int] = (32, 4096)  # of the arrivals, least and most; lengths are log-uniform
    output_tokens: tuple[int, int] = (16, 512)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the plan. decode and prefill have a context and a batch, mixed a rate and a temperature."""

    kind: Kind
    context: int = 0  # prompt tokens
    batch: int = 0  # sequences
    rate: float = 0.0  # arrivals per second
    temperature: float = 0.0

    @property
    def name(self) -> str:
        if self.kind == "mixed":
            return f"mixed {self.rate:g}/s, temperature {self.temperature:g}"
        return f"{self.kind} {self.batch} x {self.context:,}"

    def sequence_tokens(self, settings: Settings) -> int:
        """The longest that one of its sequences gets."""
        if self.kind == "mixed":
            return settings.prompt_tokens[1] + settings.output_tokens[1] + _SPARE
        if self.kind == "prefill":
            return self.context + _SPARE
        # The first rows decode while the last are prefilled: a token for each step that our engine and vLLM need for
        # all prompts, or for each call of BatchGenerator, which takes 8 prompts and 2,048 tokens of each.
        steps = math.ceil(self.batch * self.context / settings.max_num_batched_tokens)
        calls = math.ceil(self.batch / 8) * (math.ceil(self.context / 2048) + 1)
        return self.context + 2 * max(steps, calls) + settings.rounds * (settings.steps + SKIP + 1) + _SPARE

    def pool_tokens(self, settings: Settings, max_num_seqs: int) -> int:
        """KV slots that it takes for nothing to be preempted. Of mixed traffic, for sequences of middling length."""
        if self.kind == "mixed":
            return max_num_seqs * 1024
        blocks = math.ceil(self.sequence_tokens(settings) / BLOCK_SIZE)
        return self.batch * blocks * BLOCK_SIZE

    def turn(self, turn: int, settings: Settings) -> tuple[str, dict[str, Any]]:
        """The method and its arguments for a round; turn -1 is the one before them that is not counted."""
        seed = settings.seed + 1000 * (turn + 1)
        if self.kind == "prefill":
            return "prefill", {"batch": self.batch, "context": self.context, "seed": seed}
        if self.kind == "mixed":
            requests = arrivals(self.rate, settings, seed)
            if turn < 0:
                requests = [(0.0, prompt, output) for _, prompt, output in requests[:_WARM_UP_REQUESTS]]
            limit = 3 * settings.duration_s + 10
            return "arrivals", {"requests": requests, "temperature": self.temperature, "seed": seed, "limit_s": limit}
        if turn < 0:
            max_tokens = self.sequence_tokens(settings) - self.context
            return "decode_begin", {"batch": self.batch, "context": self.context, "max_tokens": max_tokens,
                                    "seed": seed}  # fmt: skip
        return "decode_round", {"steps": settings.steps, "skip": SKIP}

    def num_rounds(self, settings: Settings) -> int:
        """How many are counted."""
        return settings.mixed_rounds if self.kind == "mixed" else settings.rounds


def arrivals(rate: float, settings: Settings, seed: int) -> list[tuple[float, int, int]]:
    """A Poisson process: seconds of arrival, prompt tokens, output tokens; at least one."""
    source = random.Random(seed)
    found: list[tuple[float, int, int]] = []
    moment = 0.0
    while not found or moment < settings.duration_s:
        prompt, output = (_log_uniform(source, *span) for span in (settings.prompt_tokens, settings.output_tokens))
        found.append((moment, prompt, output))
        moment += source.expovariate(rate)
    return found


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))


@dataclass(slots=True)
class CaseResult:
    """A case's replies by arm, one for each counted round."""

    case: Case
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    begun: dict[str, dict[str, Any]] = field(default_factory=dict)  # the replies of the turn before the rounds
    failures: dict[str, str] = field(default_factory=dict)  # why an arm has fewer rounds than there should be
    cut_short: bool = False  # time ran out between two rounds

    def figures(self, arm: str, name: str) -> list[float]:
        """One figure of each round, such as step_ms; "ttft_s.p99" is the p99 of a summary."""
        key, _, part = name.partition(".")
        found = [reply[key][part] if part else reply[key] for reply in self.rounds.get(arm, [])]
        return [value for value in found if value is not None]

    def median(self, arm: str, name: str) -> float | None:
        """Of the rounds; None where there are none."""
        found = self.figures(arm, name)
        return median(found) if found else None

    def headline(self, arm: str) -> float | None:
        """The median of the figure that arms are compared by."""
        return self.median(arm, _FIGURE[self.case.kind])

    def ratios(self, arm: str) -> list[float]:
        """How many times as fast as the arm ours was, round by round."""
        ours, theirs = (self.figures(name, _FIGURE[self.case.kind]) for name in ("quire", arm))
        found = [self._times_as_fast(a, b) for a, b in zip(ours, theirs, strict=False)]
        return [value for value in found if value is not None]

    def ratio_of_medians(self, arm: str) -> float | None:
        """The same of the medians."""
        return self._times_as_fast(self.headline("quire"), self.headline(arm))

    def _times_as_fast(self, ours: float | None, theirs: float | None) -> float | None:
        return ratio(theirs, ours) if self.case.kind == "decode" else ratio(ours, theirs)

    def to_json(self) -> dict[str, Any]:
        """The case, and for each arm its rounds, the medians' ratio and the rounds' ratios of ours to it."""
        arms = {}
        for arm in (*self.rounds, *(name for name in self.failures if name not in self.rounds)):
            arms[arm] = {
                "begun": self.begun.get(arm),
                "rounds": self.rounds.get(arm, []),
                "median": self.headline(arm),
                "quire_times_as_fast": None if arm == "quire" else self.ratio_of_medians(arm),
                "quire_times_as_fast_by_round": [] if arm == "quire" else self.ratios(arm),
                "failure": self.failures.get(arm),
            }
        return {"name": self.case.name, **asdict(self.case), "cut_short": self.cut_short, "arms": arms}


_FIGURE = {"decode": "step_ms", "prefill": "tokens_per_s", "mixed": "output_tokens_per_s"}


def run_case(
    case: Case, arms: Sequence[str], call: Call, settings: Settings, out_of_time: Callable[[], bool]
) -> CaseResult:
    """Runs a case, the arms taking turns in each round. An arm that fails is left out of its further rounds."""
    result = CaseResult(case)

    def attempt(arm: str, method: str, params: dict[str, Any]) -> Any:
        try:
            return call(arm, method, params)
        except RuntimeError as error:
            result.failures.setdefault(arm, str(error))
            return None

    for turn in range(-1, case.num_rounds(settings)):
        if turn > 0 and out_of_time():
            result.cut_short = True
            break
        method, params = case.turn(turn, settings)
        for arm in arms:
            if arm in result.failures:
                continue
            reply = attempt(arm, method, params)
            if reply is None:
                continue
            # Tens of thousands of gaps between tokens: their figures will do.
            reply |= {name: summary(reply[name]) for name in ("ttft_s", "itl_s") if name in reply}
            if "itl_s" in reply:
                del reply["itl_s"]["samples"]
            if turn < 0:
                result.begun[arm] = reply if case.kind == "decode" else {}
            else:
                result.rounds.setdefault(arm, []).append(reply)
    for arm in arms:
        attempt(arm, "end", {})
    return result


def render(results: Sequence[CaseResult], arms: Sequence[str]) -> str:
    """A table for each kind of case: medians of the rounds, and how many times as fast as each other arm ours was."""
    peers = [arm for arm in arms if arm != "quire"]
    tables = []
    for kind, what, digits in (("decode", "ms a step", 2), ("prefill", "tokens/s", 0)):
        found = [result for result in results if result.case.kind == kind]
        rows = []
        for result in found:
            row = [f"{result.case.context:,}", str(result.case.batch)]
            row += [number(result.headline(arm), digits) for arm in arms]
            for peer in peers:
                row += [number(result.ratio_of_medians(peer), 2, "x"), number_range(result.ratios(peer))]
            rows.append(row)
        header = ["context", "sequences", *arms]
        for peer in peers:
            header += [f"to {peer}", "by round"]
        if rows:
            tables.append(f"{kind.capitalize()}, {what}\n\n{markdown_table(header, rows)}")
    mixed = [result for result in results if result.case.kind == "mixed"]
    if mixed:
        tables.append(f"Mixed traffic, latencies in ms\n\n{_mixed_table(mixed, arms)}")
    return "\n\n".join(tables)


def _mixed_table(results: Sequence[CaseResult], arms: Sequence[str]) -> str:
    columns = ("output_tokens_per_s", "ttft_s.median", "ttft_s.p99", "itl_s.median", "itl_s.p99", "unfinished")
    rows = []
    for result in results:
        for arm in arms:
            found = {name: result.median(arm, name) for name in columns}
            if any(value is not None for value in found.values()):
                cells = [number(None if value is None else value * 1e3, 1) if "_s." in name else number(value, 0)
                         for name, value in found.items()]  # fmt: skip
                rows.append([f"{result.case.rate:g}/s", f"{result.case.temperature:g}", arm, *cells])
    header = ["arrivals", "temperature", "arm", "output tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "unfinished"]
    return markdown_table(header, rows)


def plan(
    kinds: Sequence[Kind],
    decode: Mapping[int, Sequence[int]],
    prefill: Mapping[int, Sequence[int]],
    rates: Sequence[float],
    temperatures: Sequence[float],
) -> list[Case]:
    """The cases in their order: kinds as named, contexts and batches (by context) as given."""
    cases = []
    for kind in kinds:
        if kind == "decode":
            cases += [Case("decode", context, batch) for context, batches in decode.items() for batch in batches]
        elif kind == "prefill":
            cases += [Case("prefill", context, batch) for context, batches in prefill.items() for batch in batches]
        else:
            cases += [Case("mixed", rate=rate, temperature=value) for value in temperatures for rate in rates]
    return cases
