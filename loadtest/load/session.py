"""A load test's state beside Locust's own: options, samples, levels. One for each Locust environment."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import STATE_INIT, MasterRunner, WorkerRunner

from loadtest import environment as surroundings
from loadtest.load import levels_table, server_metrics
from loadtest.load.monitor import GeneratorMonitor
from loadtest.load.options import SWEEPS, LoadOptions, OptionError, checked
from loadtest.load.recorder import Recorder, Sample, errors, level_figures, tokens_per_event
from loadtest.load.sse import BlockingClient
from loadtest.load.sweep import USERS, Level, Sweep
from loadtest.load.traces import MAX_LENGTH, TraceError, TraceRequest, block_size_of, read_trace
from loadtest.stats import gaps
from loadtest.stream import RequestResult

logger = logging.getLogger(__name__)
_LIVE_SAMPLES = 400
_SCRAPE_TIMEOUT_S = 12.0
_LEVEL_MESSAGE = "quire_level"
_METRIC = "metric"  # the type of those rows of Locust's table that are no requests


class LoadSession:
    """What users, shape and hooks share. Methods run in Locust's greenlets of one process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.recorder = Recorder()
        self.monitor = GeneratorMonitor()
        self.options: LoadOptions | None = None  # None before a run and after options that can't be used
        self.sweep: Sweep | None = None
        self.trace_over = False
        self.rate = 0.0  # arrivals per second that this process's open-loop users share
        self.max_failure_ratio = 0.0  # of the last run
        self.outcome = 0, 0  # requests and failures of the last run, those of warm-ups too
        self.lost: str | None = None  # why the last run's result file is not there
        self.last_result: dict[str, Any] | None = None  # the result file of the last run
        self.results: list[dict[str, Any]] = []  # the levels' figures, of this run or the last
        self._rows: list[dict[str, str]] = []  # of levels that have ended, for the browser
        self._scrapes: list[gevent.Greenlet] = []  # of /metrics, when each level was entered and at the end
        self.open: dict[int, RequestResult] = {}  # requests that are growing, by id()
        self._users = itertools.count()
        self.model = ""  # that is asked for
        self.trace: tuple[list[TraceRequest], int] = [], 0  # what trace_replay replays, and its block size
        self._max_users = 0
        self._began = 0.0
        runner = environment.runner
        if isinstance(runner, WorkerRunner):
            runner.register_message(_LEVEL_MESSAGE, self._take_level)

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended."""
        return self.options is not None

    # --- for users -------------------------------------------------------------------------------------------------

    def next_user(self) -> tuple[int, int]:
        """Worker and number of a new user, for its seed."""
        runner = self.environment.runner
        self._max_users = max(self._max_users, runner.target_user_count if runner is not None else 0)
        return int(getattr(runner, "worker_index", 0)), next(self._users)

    def client(self, most_s: float = math.inf) -> BlockingClient:
        """A client of the server under test, that waits for at most most_s. Raises ValueError."""
        options = self.checked_options
        timeout_s = min(options.request_timeout, most_s)
        return BlockingClient(self.environment.host or "", timeout_s=timeout_s, api_key=options.api_key or None)

    @property
    def checked_options(self) -> LoadOptions:
        """The options of the run that is going on."""
        assert self.options is not None, "no run has begun"
        return self.options

    def record(self, tag: str, name: str, result: RequestResult) -> None:
        """Takes a request that has ended into the samples and into Locust's own tables."""
        offset = time.time() - time.perf_counter()
        sample = Sample.of(tag, result, offset)
        self.recorder.add([sample])
        if sample.unfinished:
            return
        elapsed = 1000 * (sample.ended - sample.started)
        self.environment.events.request.fire(
            request_type="POST",
            name=name,
            response_time=elapsed,
            response_length=sum(len(text) for text in result.texts),
            exception=None if sample.error is None else RequestFailed(sample.error),
            context={},
        )
        if sample.ok:
            self._log_metrics(sample)

    def _log_metrics(self, sample: Sample) -> None:
        # Into their rows alone: what goes through the request event is counted as a request.
        def log(name: str, value: float) -> None:
            self.environment.stats.entries[(name, _METRIC)].log(value, 0)  # type: ignore[arg-type]

        if sample.ttft is not None:
            log("TTFT (ms)", 1000 * sample.ttft)
        for gap in gaps(sample.content):
            log("ITL (ms)", 1000 * gap)
        log("Output tokens", sample.completion_tokens or 0)

    # --- for the shape and hooks -----------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Starts a run with the options as they are now. False, and the reason in Locust's log, if they won't do."""
        self.lost = None
        self.options, self.sweep, self.trace_over, self._began = None, None, False, time.time()
        self.recorder, self.results, self._scrapes, self.model = Recorder(), [], [], ""
        self._users, self._max_users, self._rows = itertools.count(), 0, []
        try:
            self.prepare()
            assert self.options is not None
            self.model = self.options.model or server_metrics.first_model(self.client(_SCRAPE_TIMEOUT_S))
        except OptionError as error:
            self.options = None
            logger.error("%s", error)
            if self.environment.runner is not None:
                # The browser groups exceptions by what stands for the traceback here.
                self.environment.runner.log_exception("local", str(error), str(error))
            return False
        if not isinstance(self.environment.runner, WorkerRunner):
            self._scrapes.append(gevent.spawn(self._scrape))
        if not isinstance(self.environment.runner, MasterRunner):
            self.monitor.start()
        return True

    def prepare(self) -> None:
        """Checks the options as they are now, without asking the server. Raises OptionError."""
        self.options = checked(self.environment.parsed_options)  # type: ignore[arg-type]
        scenario = self.scenario()
        try:
            self.client().close()
            if scenario == "trace_replay":
                self.trace = self._read_trace(self.options)
        except TraceError as error:
            raise OptionError(f"--trace can't be replayed: {error}") from None
        except ValueError as error:
            raise OptionError(str(error)) from None

    @staticmethod
    def _read_trace(options: LoadOptions) -> tuple[list[TraceRequest], int]:
        requests = read_trace(options.trace)
        longest = max(max(r.input_length, r.output_length) for r in requests)
        if longest * options.trace_scale > MAX_LENGTH:
            raise OptionError(f"--trace-scale {options.trace_scale:g} makes of {longest} tokens too many")
        return requests, block_size_of(requests)

    def scenario(self) -> str:
        """The scenario of this run: of the class that was named, else by option. Raises OptionError for several."""
        named = {getattr(user_class, "scenario", None) for user_class in self.environment.user_classes} - {None}
        if len(named) == 1:
            return str(named.pop())
        available = {getattr(c, "scenario", None) for c in (self.environment.available_user_classes or {}).values()}
        if available and named != available - {None}:
            raise OptionError(f"choose one scenario's class, not those of {', '.join(sorted(map(str, named)))}")
        return self.checked_options.scenario

    def tick(self) -> tuple[int, float, list[type]] | None:
        """How many users of which classes there should be now; None ends the run. Called once a second."""
        runner = self.environment.runner
        assert runner is not None
        if runner.state == STATE_INIT and not self.begin():
            return None
        options, parsed = self.checked_options, self.environment.parsed_options
        assert parsed is not None
        scenario, now = self.scenario(), time.time()
        num_users, spawn_rate = int(parsed.num_users or 1), float(parsed.spawn_rate or 1)
        run_time = float(getattr(parsed, "run_time", None) or 0) or None
        if self.sweep is None:
            self.sweep = Sweep(options.plan(scenario, num_users, run_time), now)
            self._enter_level()
        else:
            before = len(self.sweep.levels)
            if run_time and now - self._began >= run_time and scenario in SWEEPS:
                self.sweep.stop(now, complete=False)
            self.sweep.advance(now, self.recorder.finished_since(self.sweep.current.entered))
            if self.sweep.done or self.trace_over:
                return None
            if len(self.sweep.levels) > before:
                self._enter_level()
        level = self.sweep.current
        if scenario == "concurrency_sweep":
            num_users, spawn_rate = int(level.value), max(100.0, level.value)
        elif scenario == "poisson":
            num_users, spawn_rate = max(1, int(getattr(runner, "worker_count", 1))), 100.0
        elif scenario == "trace_replay":
            num_users = 1
        classes = [c for c in self.environment.user_classes if getattr(c, "scenario", scenario) == scenario]
        return num_users, spawn_rate, classes

    def _enter_level(self) -> None:
        assert self.sweep is not None
        runner, level = self.environment.runner, self.sweep.current
        if len(self.sweep.levels) > len(self._scrapes):
            # Beside everything else: a slow page must not delay the level's users.
            self._scrapes.append(gevent.spawn(self._scrape))
        logger.info("level: %g %s", level.value, level.unit)
        if level.unit == USERS or runner is None:
            return
        if isinstance(runner, MasterRunner):
            runner.send_message(_LEVEL_MESSAGE, {"rate": level.value / max(1, runner.worker_count)})
        else:
            self.rate = level.value

    def _take_level(self, environment: Environment, msg: Any, **kwargs: Any) -> None:
        self.rate = float(msg.data["rate"])

    def _scrape(self) -> Mapping[str, float] | None:
        return server_metrics.scrape(self.environment.host or "", self.checked_options.api_key or None)

    def finish(self) -> None:
        """Ends a run: figures of all levels, the table in the log, the result file."""
        if not self.running:
            return
        self.monitor.stop()
        if isinstance(self.environment.runner, WorkerRunner):
            self.options = None
            return
        now = time.time()
        sweeps = self.scenario() in SWEEPS
        if self.sweep is None:  # Locust's default shape was chosen in the class picker
            self.sweep = Sweep(self.checked_options.plan("", self._max_users or 1, None), self._began)
            self.sweep.advance(now, [])
        if not self.sweep.done:
            # A run without levels of its own ends when it is stopped, or when its trace is over.
            self.sweep.stop(now, complete=not sweeps)
        level = self.sweep.current
        if not sweeps:
            level.value = max(1, self._max_users)
        if self.scenario() == "trace_replay" and (done := [s for s in self.recorder.samples if not s.unfinished]):
            # The trace's own time: from its first request to its last answer.
            level.entered = level.measured_from = min(s.started for s in done)
            level.ended = max(s.ended for s in done)
        self._scrapes.append(gevent.spawn(self._scrape))
        gevent.joinall(self._scrapes, timeout=_SCRAPE_TIMEOUT_S)
        self.results = self.figures()
        options = self.checked_options
        result = self.last_result = self.result()
        self.options, self.rate = None, 0.0
        self.outcome, self.max_failure_ratio = (result["requests"], result["failures"]), options.max_failure_ratio
        for line in levels_table.markdown(self.results).splitlines():
            logger.info("%s", line)
        if result["generator"]["saturated"]:
            logger.warning(
                "the load generator used up its own CPU: these figures may be its limit, not the server's. "
                "Run with --processes 2 or more, or fewer users."
            )
        if options.result:
            try:
                surroundings.write_json(Path(options.result), result)
                logger.info("raw samples: %s", options.result)
            except OSError as error:
                self.lost = f"the result could not be written: {error}"

    def figures(self) -> list[dict[str, Any]]:
        """The figures of all levels of a run that is over."""
        assert self.sweep is not None
        found = []
        for index, level in enumerate(self.sweep.levels):
            figures = level_figures(level, self.recorder.samples)
            before, after = (scrape.value for scrape in self._scrapes[index : index + 2])
            figures["server_metrics"] = server_metrics.difference(before, after)
            found.append(figures)
        return found

    def result(self) -> dict[str, Any]:
        """The result file of the run that is ending: all figures and raw samples."""
        options, samples = self.checked_options, self.recorder.samples
        arguments = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in ((name, getattr(options, name)) for name in LoadOptions.__slots__)
            if name not in ("api_key", "result", "trace")
        }
        if self.scenario() == "trace_replay":
            arguments["trace"] = options.trace.name
        return {
            "benchmark": "load",
            **surroundings.describe(),
            "scenario": self.scenario(),
            "host": self.environment.host,
            "model": self.model,
            "label": options.label,
            "arguments": arguments,
            "levels": self.results,
            "generator": self.monitor.summary(),
            "errors": errors(samples),
            "requests": sum(not s.unfinished for s in samples),
            "failures": sum(s.error is not None for s in samples),
        }

    def tokens_since(self, seconds: float) -> float:
        """Output tokens of the last seconds; an event of a request that has no usage yet counts as an average one."""
        now = time.time()
        ended = self.recorder.tokens_between(now - seconds, now)
        since = time.perf_counter() - seconds
        events = sum(moment > since for result in list(self.open.values()) for moment in result.content_times)
        return ended + events * tokens_per_event(self.recorder.samples[-_LIVE_SAMPLES:])

    def live_rows(self) -> list[dict[str, str]]:
        """A row for each level, for the browser's table. That of a running level is of its last requests only.

        The browser asks every other second, and what takes long here delays the users' own clocks.
        """
        if self.sweep is None or not self.running:
            return [levels_table.row(figures) for figures in self.results]
        while len(self._rows) < len(self.sweep.levels) - 1:
            figures = level_figures(self.sweep.levels[len(self._rows)], self.recorder.samples)
            self._rows.append(levels_table.row(figures))
        level, recent = self.sweep.current, self.recorder.samples[-_LIVE_SAMPLES:]
        start = level.entered if level.measured_from is None else level.measured_from
        if len(recent) == _LIVE_SAMPLES:
            start = max(start, min(s.ended for s in recent))
        now = time.time() if level.ended is None else level.ended
        live = Level(level.value, level.unit, level.entered, start, now, complete=True)
        return [*self._rows, levels_table.row(level_figures(live, recent))]

    # --- between the processes of a distributed run -----------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What this worker has not yet told the master."""
        return {
            "samples": [sample.to_json() for sample in self.recorder.take_unsent()],
            "generator": self.monitor.take(),
            "trace_over": self.trace_over,
        }

    def take_report(self, report: Mapping[str, Any]) -> None:
        """What a worker tells the master."""
        self.recorder.add(Sample.from_json(fields) for fields in report["samples"])
        self.monitor.add(report["generator"])
        self.trace_over |= report["trace_over"]


class RequestFailed(Exception):
    """A request failed; Locust's tables group failures by this text."""

    def __repr__(self) -> str:
        return str(self)
