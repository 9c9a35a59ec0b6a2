from __future__ import annotations

import json

import pytest

from loadtest.load.options import OptionError
from loadtest.load.server_metrics import difference, first_model, parse, scrape
from loadtest.load.sse import BlockingClient
from tests.loadtest.responses import answer
from tests.loadtest.test_load_sse import serving

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="a"} 2
vllm:num_requests_running{model="b"} 3
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model="a"} 100
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="1.0"} 4
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4
vllm:time_to_first_token_seconds_sum 2.0
vllm:time_to_first_token_seconds_count 4
process_cpu_seconds_total 9
"""


def test_a_page_is_summed_by_name() -> None:
    assert parse(PAGE) == {
        "vllm:num_requests_running": 5,
        "vllm:generation_tokens_total": 100,
        "vllm:time_to_first_token_seconds_sum": 2,
        "vllm:time_to_first_token_seconds_count": 4,
    }


@pytest.mark.parametrize("page", ["", "<html><body>no such page</body></html>", '{"a": 1}'])
def test_a_page_of_another_kind_is_none(page: str) -> None:
    assert parse(page) is None


def test_counters_are_differences_and_gauges_stand() -> None:
    before = {"tokens_total": 10.0, "running": 7.0, "x_time_to_first_token_seconds_sum": 1.0,
              "x_time_to_first_token_seconds_count": 2.0}  # fmt: skip
    after = {"tokens_total": 30.0, "running": 3.0, "new_total": 1.0, "x_time_to_first_token_seconds_sum": 4.0,
             "x_time_to_first_token_seconds_count": 4.0}  # fmt: skip
    found = difference(before, after)
    assert found is not None
    assert (found["tokens_total"], found["running"], found["new_total"]) == (20, 3, 1)
    assert found["server_ttft_mean_s"] == 1.5
    assert "server_itl_mean_s" not in found
    assert difference(None, after) is None
    assert difference(before, None) is None


def test_a_server_is_asked_for_its_page_and_its_model() -> None:
    with serving(answer) as server:
        server.pages["/metrics"] = lambda: PAGE
        server.pages["/v1/models"] = lambda: json.dumps({"data": [{"id": "first"}, {"id": "second"}]})
        assert (scrape(server.url, None) or {})["vllm:generation_tokens_total"] == 100
        client = BlockingClient(server.url)
        assert first_model(client) == "first"
        server.pages["/v1/models"] = lambda: "[]"
        with pytest.raises(OptionError, match="--model"):
            first_model(client)
        del server.pages["/metrics"]
        assert scrape(server.url, None) is None
        client.close()
    assert scrape(server.url, None) is None
