"""Policies without a model: the engine's own loop over simulated K/V, timed on a virtual clock.

    config = EngineConfig(num_blocks=512, max_model_len=4096, scheduler="priority")
    report = simulate(config, requests, step_time=LinearStepTime(0.010, per_token=0.0002))
    report.throughput, report.percentile("ttft", 95)

Everything above the ModelRunner is the real thing: Engine, Scheduler, policies, KV manager and prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlx_engine.config import EngineConfig
from mlx_engine.drafts import DraftSource
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError, RequestError
from mlx_engine.interfaces import Drafter, KVCacheManager, SchedulerPolicy
from mlx_engine.scheduler import Scheduler
from mlx_engine.types import EngineInfo, EngineStats, FinishReason, Request
from plugins.registry import KV_MANAGERS, PREFIX_CACHES, SCHEDULERS, create, create_drafter
from plugins.simulated_runner import (
    Domain,
    LinearStepTime,
    SimulatedRunner,
    StepTime,
    VirtualClock,
    no_time,
    one_domain,
    reference_tokens,
)

__all__ = [
    "LinearStepTime",
    "RequestTimes",
    "SimulatedEngine",
    "SimulatedRunner",
    "SimulationReport",
    "VirtualClock",
    "build_simulated_engine",
    "reference_tokens",
    "simulate",
]

Metric = Literal["ttft", "itl", "e2e"]


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """An engine over simulated K/V, and the parts that a test or an experiment looks at."""

    engine: Engine
    runner: SimulatedRunner
    scheduler: Scheduler
    kv: KVCacheManager
    clock: VirtualClock


def build_simulated_engine(
    config: EngineConfig,
    *,
    vocab_size: int = 1 << 20,
    eos_token_ids: frozenset[int] = frozenset(),
    step_time: StepTime = no_time,
    domain: Domain = one_domain,
    verify: bool = True,
    policy: SchedulerPolicy | None = None,
    drafter: Drafter | None = None,
) -> SimulatedEngine:
    """The engine of a config, its policies created by name, around a SimulatedRunner.

    `policy` takes the place of the config's scheduler, `drafter` that of its drafter. Raises ConfigError unless the
    config has num_blocks, and PluginError as `build_engine` does.
    """
    if config.num_blocks is None:
        raise ConfigError("a simulation has no memory to measure: set num_blocks")
    max_model_len = config.max_model_len or config.num_blocks * config.block_size
    clock = VirtualClock()
    prefix_cache = create(
        PREFIX_CACHES,
        config.prefix_cache,
        kwargs={"block_size": config.block_size},
        options=config.prefix_cache_options,
    )
    sizes = {"num_blocks": config.num_blocks, "block_size": config.block_size}
    kv = create(
        KV_MANAGERS,
        config.kv_manager,
        kwargs={**sizes, "prefix_cache": prefix_cache, "max_model_len": max_model_len},
        options=config.kv_manager_options,
    )
    drafter = drafter or create_drafter(config.drafter, config.drafter_options)
    scheduler = Scheduler(
        policy or create(SCHEDULERS, config.scheduler, kwargs={}, options=config.scheduler_options),
        kv,
        model_name="simulated",
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        # "auto" asks the model's shape, and there is none.
        chunk_halving_context=None if config.chunk_halving_context == "auto" else config.chunk_halving_context,
        drafts=DraftSource(drafter, vocab_size) if drafter is not None else None,
        seed=config.seed,
        **sizes,
    )
    runner = SimulatedRunner(
        vocab_size=vocab_size, clock=clock, step_time=step_time, domain=domain, verify=verify, **sizes
    )
    info = EngineInfo(
        model_name="simulated",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_tokens_per_request=scheduler.max_total_tokens,
        device="none",
        dtype="none",
        kv_dtype="none",
        policies={
            "scheduler": config.scheduler,
            "kv_manager": config.kv_manager,
            "prefix_cache": config.prefix_cache,
            "drafter": config.drafter,
        },
        num_blocks=sizes["num_blocks"],
        block_size=sizes["block_size"],
    )
    return SimulatedEngine(
        Engine(scheduler, runner, info, overlap=config.overlap, clock=clock), runner, scheduler, kv, clock
    )


@dataclass(slots=True)
class RequestTimes:
    """When things happened to one request, in virtual seconds."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    finish: float | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Arrival to first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e(self) -> float | None:
        """Arrival to the end."""
        return self.finish - self.arrival if self.finish is not None else None


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What a workload met under a configuration."""

    requests: Mapping[str, RequestTimes]  # by request id, refused ones left out
    refused: Mapping[str, str]  # by request id, why
    duration: float  # from the first arrival to the last output
    stats: EngineStats

    @property
    def throughput(self) -> float:
        """Output tokens a second over the whole duration; 0 if no time passed."""
        tokens = sum(len(times.token_times) for times in self.requests.values())
        return tokens / self.duration if self.duration else 0.0

    def values(self, metric: Metric) -> list[float]:
        """Every value of a metric, ascending: one a request for ttft and e2e, one a gap for itl."""
        if metric == "itl":
            return sorted(gap for times in self.requests.values() for gap in times.itls)
        each = [times.ttft if metric == "ttft" else times.e2e for times in self.requests.values()]
        return sorted(value for value in each if value is not None)

    def percentile(self, metric: Metric, percent: float) -> float:
        """The smallest value with at least `percent` % of the values at or below it. Raises ValueError without any."""
        values = self.values(metric)
        if not values or not 0 < percent <= 100:
            raise ValueError(f"no {percent}th percentile of {len(values)} values of {metric}")
        return values[max(-int(-percent * len(values) // 100), 1) - 1]


def simulate(
    config: EngineConfig,
    requests: Sequence[Request],
    *,
    step_time: StepTime,
    policy: SchedulerPolicy | None = None,
    verify: bool = False,
) -> SimulationReport:
    """Runs requests to their end, each added at its arrival_time (0 if None), in virtual seconds.

    A simulation is exact and repeatable: the same arguments give the same report. Raises what
    `build_simulated_engine` raises, and IntegrityError where an engine would die.
    """
    simulated = build_simulated_engine(config, step_time=step_time, policy=policy, verify=verify)
    engine, clock = simulated.engine, simulated.clock
    arrivals = sorted(requests, key=lambda request: request.arrival_time or 0.0)
    start = arrivals[0].arrival_time or 0.0 if arrivals else 0.0
    clock.advance_to(start)
    times: dict[str, RequestTimes] = {}
    refused: dict[str, str] = {}
    index = 0
    while index < len(arrivals) or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            clock.advance_to(arrivals[index].arrival_time or 0.0)
        while index < len(arrivals) and (arrivals[index].arrival_time or 0.0) <= clock():
            request = arrivals[index]
            index += 1
            try:
                engine.add_request(request)
                times[request.request_id] = RequestTimes(request.arrival_time or 0.0)
            except RequestError as error:
                refused[request.request_id] = str(error)
        for output in engine.step():
            entry = times[output.request_id]
            entry.token_times += [clock()] * len(output.new_token_ids)
            entry.num_cached_tokens, entry.num_preemptions = output.num_cached_tokens, output.num_preemptions
            if output.finish_reason is not None:
                entry.finish, entry.finish_reason = clock(), output.finish_reason
    return SimulationReport(times, refused, clock() - start, engine.stats())
