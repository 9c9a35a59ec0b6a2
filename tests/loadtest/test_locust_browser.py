"""Locust's browser UI with our scenarios, driven in a headless Chromium as a person would.

QUIRE_SCREENSHOTS=FOLDER keeps pictures of it; QUIRE_LOAD_HOST=URL drives it against a real server instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from loadtest.load.options import SCENARIOS
from loadtest.serve_process import free_ports
from tests.loadtest.test_locust import ROOT, timed_server

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (Debian: apt-get install chromium)")


@pytest.fixture
def ui() -> Iterator[str]:
    """The URL of a Locust that has not begun yet."""
    port = free_ports(1)[0]
    with ExitStack() as stack:
        host = os.environ.get("QUIRE_LOAD_HOST") or stack.enter_context(timed_server(ttft=0.1, itl=0.02))
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--host", host,
                   "--web-host", "127.0.0.1", "--web-port", str(port)]  # fmt: skip
        process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL))
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}/"
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url


@pytest.fixture
def page() -> Iterator[Any]:
    """A browser's page, which must end without an error of a script."""
    errors: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    assert errors == []


def _keep(page: Any, name: str) -> None:
    folder = os.environ.get("QUIRE_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def _cells(page: Any, row: str) -> list[str]:
    cells: list[str] = page.get_by_role("row", name=re.compile(row)).first.get_by_role("cell").all_inner_texts()
    return cells


def test_a_sweep_is_started_watched_stopped_and_its_report_downloaded(ui: str, page: Any, tmp_path: Path) -> None:
    page.goto(ui)
    page.get_by_text("Custom parameters").click()
    _keep(page, "locust-start")
    # The scenarios are a list to choose from.
    scenario = page.get_by_role("combobox", name=re.compile("Scenario"))
    assert scenario.locator("option").all_inner_texts() == list(SCENARIOS)
    scenario.select_option("concurrency_sweep")
    page.get_by_label(re.compile(r"^Levels \(")).fill("1,4,32")
    page.get_by_label(re.compile("^Level Requests Per User")).fill("3")
    page.get_by_label(re.compile("^Model")).fill("smollm2")
    page.get_by_role("button", name="Start").click()

    # Numbers come: the metrics' rows beside the requests', which alone are counted.
    page.get_by_role("row", name=re.compile("TTFT")).wait_for()
    page.get_by_role("tab", name="Levels").click()
    page.get_by_role("row", name=re.compile("4 users")).wait_for()
    page.get_by_role("row", name=re.compile("32 users")).wait_for()
    page.wait_for_timeout(3000)
    _keep(page, "locust-levels")
    page.get_by_role("tab", name="Charts").click()
    page.wait_for_timeout(3000)
    assert page.locator("[_echarts_instance_] canvas").count() == 6
    _keep(page, "locust-charts")
    page.get_by_role("tab", name="Statistics").click()
    _keep(page, "locust-statistics")
    stop = page.get_by_role("button", name="Stop")
    if stop.is_visible():
        stop.click()
    page.get_by_role("button", name="New").wait_for()
    assert _cells(page, "TTFT")[2] != "0"
    assert int(_cells(page, "Aggregated")[2]) == int(_cells(page, "POST")[2])

    page.get_by_role("tab", name="Download Data").click()
    with page.expect_download() as download:
        page.get_by_role("link", name=re.compile("levels and latencies")).click()
    path = tmp_path / "result.json"
    download.value.save_as(path)
    result = json.loads(path.read_text())
    assert result["benchmark"] == "load"
    assert [level["level"] for level in result["levels"]] == [1, 4, 32]
    assert result["levels"][1]["ttft_s"]["count"] >= 12
    with page.expect_popup() as popup:
        page.get_by_role("link", name=re.compile("Report")).click()
    report = popup.value
    report.get_by_text("Time to first token").or_(report.locator("canvas").first).first.wait_for()
    with urllib.request.urlopen(f"{ui}stats/report?download=1", timeout=30) as response:
        text = response.read().decode()
    assert "attachment" in response.headers["Content-Disposition"]
    # Our charts are in the report, with points.
    assert "Time to first token, last 10 s" in text
    assert "ttft_median" in text


def test_a_bad_option_is_said_and_nothing_runs(ui: str, page: Any) -> None:
    page.goto(ui)
    page.get_by_text("Custom parameters").click()
    page.get_by_label(re.compile(r"^Levels \(")).fill("one,two")
    page.get_by_role("button", name="Start").click()
    page.get_by_role("tab", name="Exceptions").click()
    page.get_by_text(re.compile("--levels must be numbers above 0")).first.wait_for()
