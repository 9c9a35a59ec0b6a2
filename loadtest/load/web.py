"""Locust's browser UI with our figures in it: a tab with the levels, charts of TTFT, ITL and tokens, a download.

The tab and the download are Locust's own extension points. Its charts are a fixed list in its bundle, so the list
is lengthened as the bundle goes out; if a later Locust's bundle looks different, its own charts are all there is.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

import gevent
from flask import Response, request

from loadtest.load import levels_table
from loadtest.load.recorder import latencies
from loadtest.load.session import LoadSession

logger = logging.getLogger(__name__)

WINDOW_S = 10.0  # what the charts show is of the requests that ended in the last seconds
_TAB = "quire-levels"
_RESULT_PATH = "/quire/result.json"
_LAST_CHART = re.compile(r"""\{title:[`"]Number of Users[`"],lines:\[""")
_PERCENTILES = {"median": "50th percentile", "p90": "90th percentile", "p95": "95th percentile",
                "p99": "99th percentile"}  # fmt: skip
_CHARTS = (
    ("Time to first token, last 10 s (ms)", {name: f"ttft{key.capitalize()}" for key, name in _PERCENTILES.items()}),
    ("Inter-token latency, last 10 s (ms)", {name: f"itl{key.capitalize()}" for key, name in _PERCENTILES.items()}),
    ("Output tokens per second, last 10 s", {"tokens/s": "tokensPerSecond"}),
)
_COLOURS = ("#ff9f00", "#9966CC", "#8A2BE2", "#8E4585")
_HISTORY_PERIOD_S = 1.0


def install(web_ui: Any, session: LoadSession) -> None:
    """Adds all of it to Locust's UI, before it starts."""
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Levels", "key": _TAB}],
        "extended_tables": [{"key": _TAB, "structure": levels_table.columns()}],
        "extended_csv_files": [{"href": "." + _RESULT_PATH, "title": "Download levels and latencies as JSON"}],
    }

    @web_ui.app.route(_RESULT_PATH)  # type: ignore[untyped-decorator]
    @web_ui.auth_required_if_enabled  # type: ignore[untyped-decorator]
    def result() -> Response:
        content = session.last_result if session.last_result is not None else {"error": "no run has ended yet"}
        headers = {"Content-Disposition": "attachment; filename=quire-load.json"}
        return Response(json.dumps(content), mimetype="application/json", headers=headers)

    @web_ui.app.after_request  # type: ignore[untyped-decorator]
    def extend(response: Response) -> Response:
        if response.status_code != 200:
            return response
        path = request.path
        if path.endswith("/stats/requests"):
            content = json.loads(response.get_data(as_text=True))
            content.setdefault("current_response_time_percentiles", {}).update(current(session))
            if content.get("state") in ("cleanup", "stopping"):
                # The page stops asking when it sees one of these, and would never learn that the run has stopped.
                content["state"] = "running"
            content["extended_stats"] = [{"key": _TAB, "data": session.live_rows()}]
            response.set_data(json.dumps(content))
        elif path.endswith((".js", "/stats/report")):
            response.direct_passthrough = False
            response.set_data(with_charts(response.get_data(as_text=True)))
        return response

    gevent.spawn(_keep_history, session)


def current(session: LoadSession) -> dict[str, float]:
    """The charts' newest points: milliseconds and tokens per second of the last seconds; 0 where there is nothing."""
    now = time.time()
    recent = [s for s in reversed(session.recorder.samples[-2000:]) if s.ok and s.ended > now - WINDOW_S]
    figures = latencies(recent)
    points = {
        f"{short}_{which}": round(1000 * (figures[f"{short}_s"][which] or 0.0), 2)
        for short in ("ttft", "itl")
        for which in _PERCENTILES
    }
    return {**points, "tokens_per_second": round(session.tokens_since(WINDOW_S) / WINDOW_S, 1)}


def with_charts(text: str) -> str:
    """Locust's bundle, or its report that contains it, with our charts before its last one."""
    ours = "".join(
        json.dumps({"title": title, "lines": [{"name": name, "key": key} for name, key in lines.items()],
                    "colors": list(_COLOURS)}) + ","
        for title, lines in _CHARTS
    )  # fmt: skip
    longer, count = _LAST_CHART.subn(lambda found: ours + found[0], text, count=1)
    if not count and "Number of Users" in text:
        logger.warning("this Locust's charts can't be added to: TTFT and ITL are in its tables only")
    return longer


def _keep_history(session: LoadSession) -> None:
    # Locust writes a point of its history every five seconds, for its report and for pages that are opened later.
    while True:
        gevent.sleep(_HISTORY_PERIOD_S)
        history = session.environment.stats.history
        if history and "ttft_median" not in history[-1]:
            moment = history[-1]["time"]
            history[-1] |= {name: [moment, value] for name, value in current(session).items()}
