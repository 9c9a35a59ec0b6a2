"""Continuous batching against waves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadtest.experiments.base import Arm, Experiment, Record, Session, require
from loadtest.experiments.load import closed_loop, mixed_asks
from loadtest.stats import ratio


@dataclass(frozen=True, slots=True)
class Batching(Experiment):
    """Answers of mixed lengths, clients that start one after the other."""

    clients: tuple[int, ...] = (2, 16)
    requests: tuple[int, ...] = (16, 64)  # for each of them
    prompt_tokens: tuple[int, int] = (32, 32)
    output_tokens: tuple[int, int] = (8, 64)
    stagger_s: float = 0.1  # between the starts of two clients

    name: ClassVar[str] = "batching"
    title: ClassVar[str] = "Continuous batching against waves"
    question: ClassVar[str] = (
        "What does it save to let a request join the batch at every step, instead of between waves?"
    )
    arms: ClassVar[tuple[Arm, ...]] = (Arm("continuous", "batching-fcfs"), Arm("waves", "batching-wave"))
    differs: ClassVar[frozenset[str]] = frozenset({"scheduler"})

    @classmethod
    def quick(cls) -> Batching:
        """See Experiment."""
        return cls(clients=(2, 6), requests=(4, 12), output_tokens=(4, 24))

    async def measure(self, session: Session, record: Record) -> None:
        """Each number of clients in turn, in a closed loop."""
        for clients, count in zip(self.clients, self.requests, strict=True):
            case = f"{clients} clients"
            seed = 1000 * session.seed + clients
            asks = mixed_asks(session.prompts, count, self.prompt_tokens, self.output_tokens, seed)
            steps = await session.metric("engine_steps_total")
            loop = await closed_loop(session.client, asks, clients, self.stagger_s)
            require(loop.requests, [ask.max_tokens for ask in asks])
            await session.idle()
            steps = await session.metric("engine_steps_total") - steps
            arm = session.arm
            record.add("throughput", "tokens/s", arm, [loop.output_tokens / loop.seconds], better="higher", case=case)
            record.latencies(arm, case, loop.requests)
            record.add("tokens per step", "tokens", arm, [loop.output_tokens / steps], better="higher", case=case,
                       digits=2)  # fmt: skip

    def conclude(self, record: Record) -> None:
        """Continuous batching must put more tokens into a step where many clients come and go."""
        case = f"{self.clients[-1]} clients"
        continuous, waves = (record.samples("tokens per step", arm.name, case) for arm in self.arms)
        gain = ratio(sum(continuous) / len(continuous), sum(waves) / len(waves)) if continuous and waves else None
        record.check(
            "continuous batching fills the steps better",
            gain is not None and gain > 1,
            "not measured" if gain is None else f"{gain:.2f} times the tokens per step at {case}",
        )
