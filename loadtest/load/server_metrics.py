"""What the server under test says of itself: its models, and its /metrics page where it has one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from loadtest.load.options import OptionError
from loadtest.load.sse import BlockingClient

_TIMEOUT_S = 10.0
# Of the client library and the runtime, not of serving.
_NOT_SERVING = ("python_", "process_", "go_", "ray_")


def first_model(client: BlockingClient) -> str:
    """The first id that /v1/models lists. Raises OptionError."""
    try:
        status, text = client.get("/v1/models")
        found = json.loads(text)["data"][0]["id"] if status == 200 else None
    except (OSError, http.client.HTTPException) as error:
        raise OptionError(
            f"the server's models can't be asked for ({error}): is it there? Or name one with --model"
        ) from None
    except (ValueError, LookupError, TypeError):
        found = None
    if not isinstance(found, str):
        raise OptionError("the server lists no model at /v1/models: name one with --model")
    return found


def scrape(base_url: str, api_key: str | None) -> Mapping[str, float] | None:
    """The figures of a /metrics page by name, summed over labels; None where there is no such page. Never raises."""
    client = BlockingClient(base_url, timeout_s=_TIMEOUT_S, api_key=api_key)
    try:
        status, text = client.get("/metrics")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        client.close()
    return parse(text) if status == 200 else None


def parse(page: str) -> Mapping[str, float] | None:
    """Sums of a Prometheus text page's samples by name, without histograms' buckets; None if it is no such page."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")) and not sample.name.startswith(_NOT_SERVING):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    return found or None


def difference(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float] | None:
    """How far counters went between two pages, and how gauges stood at the second.

    With it the server's own mean TTFT and ITL in seconds, from its histograms, where it has them.
    """
    if before is None or after is None:
        return None
    found = {
        name: value - before.get(name, 0.0) if name.endswith(("_total", "_sum", "_count")) else value
        for name, value in after.items()
    }
    for short, histogram in (("ttft", "time_to_first_token_seconds"), ("itl", "inter_token_latency_seconds")):
        for name in list(found):
            if name.endswith(f"{histogram}_sum") and found.get(f"{name.removesuffix('_sum')}_count"):
                found[f"server_{short}_mean_s"] = found[name] / found[f"{name.removesuffix('_sum')}_count"]
    return found
