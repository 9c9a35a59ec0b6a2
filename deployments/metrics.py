"""/metrics in Prometheus's text format.

Names follow vLLM's, with the prefix `quire:`, where the meaning is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from deployments.engine_api import EngineHealth, HealthStatus
from mlx_engine.types import EngineInfo, EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "quire:"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """One replica's figures. Belongs to one event loop's thread."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        labels = ("model_name",)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first sampled token.", _TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Time between two tokens of a sequence.", _ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to the end of a sequence.", _E2E_BUCKETS)
        self._success = Counter(
            _PREFIX + "request_success",
            "Sequences that ended, by how.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._http = Counter(
            _PREFIX + "http_responses",
            "Answers to /v1 requests, by status.",
            ("path", "status"),
            registry=self._registry,
        )
        self._model_name = model_name

    def sequence(self, arrival_time: float) -> SequenceMetrics:
        """The clock of one sequence that arrived at `arrival_time` (monotonic)."""
        return SequenceMetrics(self, arrival_time)

    def ended(self, reason: str) -> None:
        """Counts a sequence that ended: stop, length, abort or error."""
        self._success.labels(self._model_name, reason).inc()

    def answered(self, path: str, status: int) -> None:
        """Counts an HTTP answer."""
        self._http.labels(path, str(status)).inc()

    def render(self, stats: EngineStats | None, health: EngineHealth, info: EngineInfo | None) -> bytes:
        """The page. `stats` None leaves out the engine's figures: better no value than an old one.

        `info` is None as long as it isn't known.
        """
        self._engine.update(stats, health, info)
        return generate_latest(self._registry)


class SequenceMetrics:
    """TTFT, ITL and E2E of one sequence."""

    def __init__(self, metrics: Metrics, arrival_time: float) -> None:
        self._metrics = metrics
        self._arrival_time = arrival_time
        self._last: float | None = None

    def tokens(self, count: int, first_token_time: float | None) -> None:
        """`count` tokens came. Several that came together count as evenly spaced."""
        if count == 0:
            return
        now = time.monotonic()
        if self._last is None:
            first = now if first_token_time is None else first_token_time
            self._metrics.ttft.observe(max(0.0, first - self._arrival_time))
            count -= 1
            self._last = first
        for _ in range(count):
            self._metrics.itl.observe(max(0.0, now - self._last) / count)
        self._last = now

    def ended(self, reason: str) -> None:
        """The sequence ended: stop, length, abort or error."""
        self._metrics.e2e.observe(time.monotonic() - self._arrival_time)
        self._metrics.ended(reason)


class _EngineCollector(Collector):
    """Turns the engine's own counters into metric families, as they are at the time of the scrape."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._stats: EngineStats | None = None
        self._health = EngineHealth(HealthStatus.LOADING)
        self._info: EngineInfo | None = None

    def update(self, stats: EngineStats | None, health: EngineHealth, info: EngineInfo | None) -> None:
        self._stats = stats
        self._health = health
        self._info = info

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "1 when the engine serves.", float(self._health.status is HealthStatus.OK))
        yield self._counter("engine_restarts", "Times that the engine died and was started again.",
                            self._health.num_restarts)  # fmt: skip
        if self._info is not None:
            yield self._cache_config(self._info)
        stats = self._stats
        if stats is None:
            return
        kv = stats.kv
        yield self._gauge("num_requests_running", "Sequences that hold KV blocks.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for admission.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks that can't be had now, 0 to 1.",
                          1.0 - (kv.free + kv.evictable) / kv.num_blocks)  # fmt: skip
        yield self._by_state()
        yield self._gauge("kv_internal_fragmentation", "Share of the slots held by requests that no token fills.",
                          kv.internal_fragmentation)  # fmt: skip
        yield self._gauge("kv_external_fragmentation", "Share of the free blocks outside the largest run.",
                          kv.external_fragmentation)  # fmt: skip
        for name, text, value in (
            ("num_preemptions", "Times that a running sequence gave its blocks back.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of admitted sequences.", stats.prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hit_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefill_tokens", "Tokens run through prefill chunks.", stats.prefill_tokens),
            ("wasted_tokens", "Tokens sampled one step after the end and dropped.", stats.wasted_tokens),
            ("spec_decode_num_draft_tokens", "Tokens guessed by the drafter and run.", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Of those, right and kept.", stats.accepted_draft_tokens),
            ("engine_steps", "Steps of the engine.", stats.steps),
            (
                "rejected_proposals",
                "Proposals of scheduler policy or drafter that made no sense.",
                stats.rejected_proposals,
            ),
            ("stalled_steps", "Steps in which the scheduler policy had to be overruled.", stats.stalled_steps),
            ("requests_finished", "Sequences that the engine finished.", stats.num_finished),
            ("requests_aborted", "Sequences that the engine dropped because the client left.", stats.num_aborted),
        ):
            yield self._counter(name, text, value)
        dispatch = CounterMetricFamily(
            _PREFIX + "attention_dispatch",
            "Calls of a layer's attention by path; of compiled and recorded steps, steps.",
            labels=("model_name", "path"),
        )
        for path, count in sorted(stats.dispatch.items()):
            dispatch.add_metric((self._model_name, path), count)
        yield dispatch

    def _cache_config(self, info: EngineInfo) -> GaugeMetricFamily:
        found = {
            "model_name": self._model_name,
            "cache_dtype": info.kv_dtype,
            "block_size": str(info.block_size),
            "num_blocks": str(info.num_blocks),
        }
        family = GaugeMetricFamily(_PREFIX + "cache_config_info", "1; its labels say how K/V is kept.",
                                   labels=tuple(found))  # fmt: skip
        family.add_metric(tuple(found.values()), 1)
        return family

    def _by_state(self) -> GaugeMetricFamily:
        assert self._stats is not None
        kv = self._stats.kv
        family = GaugeMetricFamily(_PREFIX + "kv_blocks", "KV blocks by state.", labels=("model_name", "state"))
        for state, count in (
            ("free", kv.free),
            ("private", kv.private),
            ("cached_in_use", kv.cached - kv.evictable),
            ("cached_evictable", kv.evictable),
        ):
            family.add_metric((self._model_name, state), count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(_PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family
