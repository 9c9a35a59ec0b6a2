from __future__ import annotations

from loadtest.metrics_page import by_label, samples, value

PAGE = """# HELP quire:kv_blocks KV blocks by state.
# TYPE quire:kv_blocks gauge
quire:kv_blocks{model_name="a b",state="free"} 992.0
quire:kv_blocks{model_name="a b",state="private"} 3.0
quire:kv_blocks_other 7
quire:requests_aborted_total{model_name="quoted \\"name\\", {x}"} 1.2e+03
"""


def test_samples_are_found_by_their_whole_name() -> None:
    assert by_label(PAGE, "quire:kv_blocks", "state") == {"free": 992.0, "private": 3.0}
    assert value(PAGE, "quire:kv_blocks") == 995.0
    assert value(PAGE, "quire:kv_blocks_other") == 7.0
    assert value(PAGE, "quire:requests_aborted_total") == 1200.0
    assert samples(PAGE, "quire:nothing") == []
    assert value(PAGE, "quire:nothing") is None
