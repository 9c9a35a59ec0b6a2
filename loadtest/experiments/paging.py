"""Paged KV against one contiguous slab per sequence, with equally many blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from loadtest import metrics_page
from loadtest.experiments.base import Arm, Experiment, Record, Series, Session, require
from loadtest.experiments.load import Page, closed_loop, mixed_asks, watched
from loadtest.stats import median

_WASTED, _RUNNING = "reserved slots that hold no token", "sequences at once"


@dataclass(frozen=True, slots=True)
class Paging(Experiment):
    """More clients than the memory holds sequences, lengths mixed."""

    clients: int = 24
    requests: int = 48
    prompt_tokens: tuple[int, int] = (32, 96)
    output_tokens: tuple[int, int] = (16, 96)
    period_s: float = 0.2  # between two looks at /metrics

    name: ClassVar[str] = "paging"
    title: ClassVar[str] = "Paged KV against contiguous KV"
    question: ClassVar[str] = (
        "How much of the KV memory is reserved for tokens that never come, and how many sequences fit at once?"
    )
    arms: ClassVar[tuple[Arm, ...]] = (Arm("paged", "paging-paged"), Arm("contiguous", "paging-contiguous"))
    differs: ClassVar[frozenset[str]] = frozenset({"kv_manager"})
    notes: ClassVar[tuple[str, ...]] = (
        "Fragmentation is sampled over HTTP while the load runs, so the samples are spaced by the server's answers.",
    )

    @classmethod
    def quick(cls) -> Paging:
        """See Experiment."""
        return cls(clients=12, requests=12, output_tokens=(8, 32))

    async def measure(self, session: Session, record: Record) -> None:
        """One closed loop, with /metrics read all the while."""
        asks = mixed_asks(session.prompts, self.requests, self.prompt_tokens, self.output_tokens, session.seed)
        preemptions = await session.metric("num_preemptions_total")
        async with watched(session.client, self.period_s) as pages:
            loop = await closed_loop(session.client, asks, self.clients)
        require(loop.requests, [ask.max_tokens for ask in asks])
        arm = session.arm
        usages = [usage for page in pages if (usage := _usage(page)) is not None]
        running = [usage.running for usage in usages]
        add = record.add
        add(_WASTED, "%", arm, [100 * u.wasted for u in usages], better="lower")
        add("KV slots that hold a token", "%", arm, [100 * u.filled for u in usages], better="higher")
        add(_RUNNING, "sequences", arm, running, better="higher", figures=("median", "max"), digits=0)
        add("throughput", "tokens/s", arm, [loop.output_tokens / loop.seconds], better="higher")
        record.latencies(arm, "", loop.requests)
        preemptions = await session.metric("num_preemptions_total") - preemptions
        add("preemptions", "", arm, [preemptions], better="lower", digits=0)
        if session.round_index == 0:
            record.series += _series(arm, usages)

    def conclude(self, record: Record) -> None:
        """Paging must waste less of what it reserves, and admit more at once."""
        paged, contiguous = ([record.samples(metric, arm.name) for metric in (_WASTED, _RUNNING)] for arm in self.arms)
        if not all(paged + contiguous):
            record.check("both arms were measured", False, "there are no samples of an arm's memory")
            return
        ours, theirs = median(paged[0]), median(contiguous[0])
        detail = f"{ours:.1f} % of the reserved slots hold no token, and {theirs:.1f} % with slabs"
        record.check("paging reserves less for nothing", ours < theirs, detail)
        ours, theirs = max(paged[1]), max(contiguous[1])
        detail = f"up to {ours:.0f} sequences at once, and {theirs:.0f} with slabs"
        record.check("paging admits more sequences at once", ours > theirs, detail)


@dataclass(frozen=True, slots=True)
class _Usage:
    seconds: float
    running: float
    wasted: float  # share of the reserved slots that no token fills
    filled: float  # share of all slots that a token fills


def _usage(page: Page) -> _Usage | None:
    """What a page says of the memory; None while no sequence holds any."""
    blocks = metrics_page.by_label(page.text, "quire:kv_blocks", "state")
    wasted = metrics_page.value(page.text, "quire:kv_internal_fragmentation")
    running = metrics_page.value(page.text, "quire:num_requests_running")
    held = blocks.get("private", 0.0)
    if wasted is None or not running or not held:
        return None
    return _Usage(page.seconds, running, wasted, (1 - wasted) * held / sum(blocks.values()))


def _series(arm: str, usages: Sequence[_Usage]) -> list[Series]:
    seconds = [usage.seconds for usage in usages]
    wasted = [100 * usage.wasted for usage in usages]
    running = [usage.running for usage in usages]
    return [
        Series(f"fragmentation, {arm}", seconds, wasted, "seconds", "reserved slots that hold no token, %"),
        Series(f"sequences, {arm}", seconds, running, "seconds", "sequences at once"),
    ]
