"""What Locust calls at the moments of its life, for our samples to reach its tables, its browser and its exit code."""

from __future__ import annotations

import logging
import signal
from typing import Any

import gevent
import locust.stats
from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtest.load import web
from loadtest.load.options import OptionError, add_arguments
from loadtest.load.session import LoadSession
from loadtest.load.users import session_of
from loadtest.stats import three_digits

logger = logging.getLogger(__name__)
_REPORT = "quire"


def install() -> None:
    """Registers all hooks with Locust. Call once, from the locustfile."""
    # Locust's own buckets have two digits and whole milliseconds, too coarse for the time between two tokens.
    locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]
    locust.stats.PERCENTILES_TO_STATISTICS = [0.9, 0.95, 0.99]  # beside the median
    locust.stats.PERCENTILES_TO_CHART = [0.5, 0.9, 0.95, 0.99]
    events.init_command_line_parser.add_listener(add_arguments)
    events.init.add_listener(_init)
    events.test_start.add_listener(_test_start)
    events.test_stop.add_listener(_test_stop)
    events.quitting.add_listener(_quitting)


def _init(environment: Environment, web_ui: Any = None, **kwargs: Any) -> None:
    session = LoadSession(environment)
    environment.quire_session = session  # type: ignore[attr-defined]
    parsed = environment.parsed_options
    if parsed is not None and parsed.headless and not parsed.worker:
        try:
            session.prepare()
        except OptionError as error:
            logger.error("%s", error)
            raise SystemExit(2) from None
        session.options = None
        # Locust's own handler is set only after a headless run with a shape is over.
        gevent.signal_handler(signal.SIGTERM, _stop, environment)

    def report_to_master(client_id: str, data: dict[str, Any], **kwargs: Any) -> None:
        data[_REPORT] = session.report()

    def worker_report(client_id: str, data: dict[str, Any], **kwargs: Any) -> None:
        if _REPORT in data:
            session.take_report(data[_REPORT])

    environment.events.report_to_master.add_listener(report_to_master)
    environment.events.worker_report.add_listener(worker_report)
    if web_ui is not None:
        web.install(web_ui, session)


def _stop(environment: Environment) -> None:
    if environment.runner is not None:
        environment.runner.quit()


def _test_start(environment: Environment, **kwargs: Any) -> None:
    session = session_of(environment)
    # A worker, or a run with Locust's default shape, has had no tick before its users start.
    if not session.running:
        session.begin()


def _test_stop(environment: Environment, **kwargs: Any) -> None:
    session_of(environment).finish()


def _quitting(environment: Environment, **kwargs: Any) -> None:
    session, runner = session_of(environment), environment.runner
    if isinstance(runner, WorkerRunner) or runner is None:
        return
    if session.running:
        runner.stop()  # Ctrl-C: users end, and what they measured is kept
    environment.process_exit_code = exit_code(session, bool(runner.exceptions))


def exit_code(session: LoadSession, crashed: bool) -> int:
    """0 if at least one request ended, few enough of them failed and no user crashed; else 1, and the log says why."""
    requests, failures = session.outcome
    allowed = session.max_failure_ratio
    reason = None
    if crashed:
        reason = "there were exceptions"
    elif requests == 0:
        reason = "no request has ended"
    elif failures > allowed * requests:
        reason = f"{failures} of {requests} requests failed, more than --max-failure-ratio {allowed:g} allows"
    reason = reason or session.lost
    if reason is not None:
        logger.error("%s", reason)
    return int(reason is not None)
