"""Preemption under memory pressure, and that it changes nothing in the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadtest.experiments.base import Arm, Experiment, Record, Session, require
from loadtest.experiments.load import closed_loop, mixed_asks, whole_answers
from loadtest.serve_cases import CaseError

_PREEMPTIONS = "preemptions"


@dataclass(frozen=True, slots=True)
class Preemption(Experiment):
    """Sequences that are admitted with room for their prompts, and grow beyond what there is."""

    clients: int = 12
    requests: int = 24
    prompt_tokens: tuple[int, int] = (32, 64)
    output_tokens: tuple[int, int] = (48, 80)
    timeout_s: float = 240.0  # for all answers of the comparison

    name: ClassVar[str] = "preemption"
    title: ClassVar[str] = "Preemption under memory pressure"
    question: ClassVar[str] = (
        "What does it cost when running sequences must give their blocks back, and are the answers the same?"
    )
    arms: ClassVar[tuple[Arm, ...]] = (
        Arm("ample", "preemption-ample"),
        Arm("tight", "preemption-tight"),
        Arm("very tight", "preemption-very-tight"),
    )
    differs: ClassVar[frozenset[str]] = frozenset({"num_blocks"})
    notes: ClassVar[tuple[str, ...]] = (
        "Without a prefix cache, so that a preempted sequence is computed again as a whole.",
        "Answers are compared as texts, greedy, all asked at once under the same pressure; the first round only.",
    )

    @classmethod
    def quick(cls) -> Preemption:
        """See Experiment."""
        return cls(clients=8, requests=8, output_tokens=(32, 48))

    async def measure(self, session: Session, record: Record) -> None:
        """A closed loop of streams, then in the first round whole answers to compare."""
        asks = mixed_asks(session.prompts, self.requests, self.prompt_tokens, self.output_tokens, session.seed)
        before = await session.metric("num_preemptions_total")
        steps = await session.metric("engine_steps_total")
        loop = await closed_loop(session.client, asks, self.clients)
        require(loop.requests, [ask.max_tokens for ask in asks])
        await session.idle()
        steps = await session.metric("engine_steps_total") - steps
        preemptions = await session.metric("num_preemptions_total") - before
        arm, add = session.arm, record.add
        add(_PREEMPTIONS, "", arm, [preemptions], better="lower", digits=0)
        add("throughput", "tokens/s", arm, [loop.output_tokens / loop.seconds], better="higher")
        add("tokens per step", "tokens", arm, [loop.output_tokens / steps], better="higher", digits=2)
        gaps = [1000 * gap for result in loop.requests for gap in result.inter_token_latencies]
        add("ITL", "ms", arm, gaps, better="lower", figures=("median", "p99", "max"), digits=0)
        record.latencies(arm, "", loop.requests)
        if session.round_index == 0:
            before = await session.metric("num_preemptions_total")
            asks = mixed_asks(session.prompts, self.clients, self.prompt_tokens, self.output_tokens, session.seed)
            record.outputs[arm] = await whole_answers(session.base_url, session.model, asks, self.timeout_s)
            if any(not text for text in record.outputs[arm]):
                raise CaseError("an answer had no text, so it can't be compared")
            preempted = await session.metric("num_preemptions_total") - before
            record.count(arm, "preemptions during the compared answers", preempted)

    def conclude(self, record: Record) -> None:
        """No preemption with ample memory, some with little, and the same answers everywhere."""
        ample, *others = (arm.name for arm in self.arms)
        counts = record.samples(_PREEMPTIONS, ample)
        record.check("nothing is preempted with ample memory", bool(counts) and not any(counts), f"{counts}")
        tightest = record.samples(_PREEMPTIONS, others[-1])
        compared = record.counters.get(others[-1], {}).get("preemptions during the compared answers", 0)
        record.check(
            "running sequences are preempted when memory is short",
            bool(tightest) and all(tightest) and compared > 0,
            f"{tightest} in the timed load, {compared:.0f} during the compared answers",
        )
        reference = record.outputs.get(ample)
        for arm in others:
            texts = record.outputs.get(arm)
            if reference is None or texts is None:
                record.check(f"same answers, {arm}", False, "not measured")
                continue
            same = sum(a == b for a, b in zip(reference, texts, strict=True))
            detail = f"{same} of {len(reference)} greedy answers are the same text"
            record.check(f"same answers, {arm}", same == len(reference), detail)
