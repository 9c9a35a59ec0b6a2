"""A report's figures hold the numbers of the files, its page is safe and needs no network, its command gives advice."""

from __future__ import annotations

import html.parser
import json
import shutil
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from loadtest.report.cli import main
from loadtest.report.load import read
from loadtest.report.page import page, script_json
from loadtest.stats import median
from tests.loadtest import report_documents as documents

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks"
EVIL = "<script>alert(1)</script>"
CHROMIUM = shutil.which("chromium")

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, document in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document))
    return folder


class Parsed(html.parser.HTMLParser):
    """What a browser would see: plots by heading (a later section's by section and heading too), loads, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.plots: dict[str, dict[str, Any]] = {}
        self.loads: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self._stack: list[tuple[str, dict[str, str | None]]] = []
        self._heading = self._section = ""
        self._seen: set[tuple[str, str]] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [value for name, value in attrs if name in ("src", "srcset", "data", "poster") and value]
        self.loads += [found["href"] or ""] if tag == "link" else []
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag == "script" and found.get("type") is None:
            self.scripts += 1
        self._stack.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        while self._stack and self._stack.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, attrs = self._stack[-1] if self._stack else ("", {})
        if tag == "script" and attrs.get("type") == "application/json":
            place = self._section, self._heading
            assert place not in self._seen, "two figures have the same place"
            self._seen.add(place)
            known = self._heading in self.plots
            self.plots[f"{self._section}: {self._heading}" if known else self._heading] = json.loads(data)
        elif tag == "h2":
            self._section = data
        elif tag == "h3":
            self._heading = data
        if tag not in ("script", "style"):
            self.text.append(data)


def rendered(folder: Path, **options: Any) -> Parsed:
    return Parsed(page(read([folder]), "Title", **options))


def traces(parsed: Parsed, title: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in parsed.plots[title]["traces"]}


def test_every_kind_is_on_one_page_and_every_figure_is_plotlys(tmp_path: Path) -> None:
    parsed = rendered(write(tmp_path, documents.every_kind()))
    text = " ".join(parsed.text)
    for heading in ("Load over HTTP", "Engine against mlx-lm", "The server against its own engine", "Memory",
                    "Decode steps on a GPU", "Attention kernels", "Drafts",
                    "Experiment: Which policy?", "Experiment: engines on one GPU, llama-1b"):  # fmt: skip
        assert heading in text
    assert len(parsed.plots) == 31
    for name, figure in parsed.plots.items():
        go.Figure({"data": figure["traces"], "layout": figure["layout"]})  # raises for what plotly doesn't know
        assert all(len(choice) == len(figure["traces"]) for choice in figure["choices"]), name
    assert len(parsed.ids) == len(set(parsed.ids))


def test_load_curves_are_the_files_numbers(tmp_path: Path) -> None:
    document = documents.load(levels=[documents.level(4), documents.level(1), documents.level(16, failures=1)])
    parsed = rendered(write(tmp_path, {"load.json": document}))
    levels = sorted(document["levels"], key=lambda level: level["level"])
    curve = traces(parsed, "Output tokens/s by concurrent users")["quire"]
    assert curve["x"] == [1, 4, 16]
    assert curve["y"] == [level["output_tokens_per_second"] for level in levels]
    assert "error_y" not in curve, "one round has no range"
    assert curve["marker"]["symbol"] == ["circle", "circle", "circle-open"]
    for title, key, figures in (
        ("End-to-end latency", "e2e_s", ("median", "p99")),
        ("Time to first token", "ttft_s", ("median", "p90", "p99")),
        ("Gap between tokens (ITL)", "itl_s", ("median", "p90", "p99")),
    ):
        found = traces(parsed, f"{title} by concurrent users")
        assert {name: trace["y"] for name, trace in found.items()} == {
            f"quire, {figure}": [level[key][figure] for level in levels] for figure in figures
        }
    ecdf = parsed.plots["Distribution of TTFT (users)"]
    assert [trace["x"] for trace in ecdf["traces"]] == [sorted(level["ttft_s"]["samples"]) for level in levels]
    assert all(trace["y"] == [0.25, 0.5, 0.75, 1.0] for trace in ecdf["traces"])
    assert ecdf["choices"] == [[True, False, False], [False, True, False], [False, False, True]]


def test_compare_has_medians_over_rounds_and_their_range(tmp_path: Path) -> None:
    document = documents.compare()
    parsed = rendered(write(tmp_path, {"compare.json": document, "load.json": documents.load(scenario="compare")}))
    found = traces(parsed, "Output tokens/s by concurrent users")
    assert list(found) == ["Quire", "Other", "quire"], (
        "load runs lie over them, and a server without levels has no curve"
    )
    for server in document["servers"][:2]:
        curve = found[server["title"]]
        for index, level in enumerate((1, 8)):
            values = [r["levels"][index]["output_tokens_per_second"] for r in server["rounds"]]
            assert (curve["x"][index], curve["y"][index]) == (level, median(values))
            assert curve["y"][index] + curve["error_y"]["array"][index] == pytest.approx(max(values))
            assert curve["y"][index] - curve["error_y"]["arrayminus"][index] == pytest.approx(min(values))
    styles = {(trace["line"]["color"], trace["marker"]["symbol"]) for trace in found.values()}
    assert len(styles) == 3


def test_engine_serve_and_memory_are_the_files_numbers(tmp_path: Path) -> None:
    engine, serve, memory = documents.engine(), documents.serve(), documents.memory()
    parsed = rendered(write(tmp_path, {"e.json": engine, "s.json": serve, "m.json": memory}))
    ratio = traces(parsed, "Decode: ratio to mlx-lm")
    assert (ratio["e"]["x"], ratio["e"]["y"]) == (["1 x 100", "16 x 100"], [2.0, 2.0])
    assert (ratio["target (at least)"]["x"], ratio["target (at least)"]["y"]) == (["1 x 100"], [1.0])
    rates = traces(parsed, "Decode: tokens/s")
    for arm, title in (("quire", "quire"), ("mlx_lm", "mlx-lm")):
        assert rates[title]["y"] == [case["tokens_per_second"]["decode"][arm]["median"] for case in engine["cases"]]
    over = traces(parsed, "Output tokens/s over HTTP and in process")
    assert (over["HTTP"]["y"], over["in process"]["y"]) == ([81.0], [91.0])
    prefix = traces(parsed, "TTFT with a new and a cached prefix")
    assert (prefix["cold"]["y"], prefix["cached"]["y"]) == ([4.5], [0.45])
    (gaps,) = parsed.plots["Gaps while a long prompt arrives"]["traces"]
    assert gaps["y"] == [pytest.approx(0.075), 0.8, pytest.approx(0.95), 1.0]
    assert traces(parsed, "Resident memory")["engine"]["y"] == [100, 110]
    assert traces(parsed, "KV blocks by state")["free"]["y"] == [50, 40]


def test_decode_steps_and_kernels_are_the_files_numbers(tmp_path: Path) -> None:
    checks = [{"case": "a case", "right": False}, {"case": "another", "right": True}]
    kernels = documents.kernels(checks=checks)
    kernels["timings"].append({**kernels["timings"][0], "quantized": True, "share": 0.4})
    parsed = rendered(write(tmp_path, {"d.json": documents.decode(), "k.json": kernels}))
    (steps,) = parsed.plots["Decode steps"]["traces"]
    assert (steps["x"], steps["y"]) == ([1, 8], [1.5, 12.0])
    (share,) = parsed.plots["Attention kernels"]["traces"]
    assert (share["x"], share["y"]) == (["128 x 4,096, head 64", "128 x 4,096, head 64, int8"], [0.6, 0.4])
    text = " ".join(parsed.text)
    assert "wrong result: a case" in text
    assert "another" not in text


def test_engines_on_a_gpu_are_an_experiment_whose_arms_are_engines(tmp_path: Path) -> None:
    missing = {"quire": {"options": {"block_size": 16}}, "vllm": {"failure": "no such module"}}
    document = documents.gpu(arms=missing, skipped=[{"case": "decode 9 x 9", "reason": "too large"}])
    document["cases"][2]["arms"]["vllm"] = {"rounds": [], "failure": "it broke"}
    parsed = rendered(write(tmp_path, {"g.json": document}))
    steps = traces(parsed, "Decode step (ms)")
    assert {arm: (trace["x"], trace["y"]) for arm, trace in steps.items()} == {
        "quire": (["8 x 512"] * 2, [1.5, 1.7]), "vllm": (["8 x 512"], [1.5]),
    }  # fmt: skip
    assert traces(parsed, "Mixed traffic, TTFT p99 (s)")["quire"]["y"] == [pytest.approx(0.0199)]
    assert traces(parsed, "Mixed traffic, ITL median (s)")["quire"]["y"] == [0.002]
    text = " ".join(parsed.text)
    for said in ("vllm is missing: no such module", "mixed 8/s, temperature 0, vllm: it broke",
                 "skipped: decode 9 x 9: too large", '{"block_size": 16}'):  # fmt: skip
        assert said in text


def test_drafts_are_the_files_numbers(tmp_path: Path) -> None:
    parsed = rendered(write(tmp_path, {"d.json": documents.drafts()}))
    rates = traces(parsed, "Drafts")
    assert (rates["plain"]["x"], rates["plain"]["y"]) == (["repeats x 2", "free x 2"], [11.0, 11.0])
    assert rates["drafts"]["y"] == [40.0, 11.0]
    assert "0.750" in parsed.text


def test_experiments_show_their_samples_and_series(tmp_path: Path) -> None:
    parsed = rendered(write(tmp_path, {"x.json": documents.experiment()}))
    ttft = traces(parsed, "TTFT (ms)")
    assert (ttft["fcfs"]["x"], ttft["fcfs"]["y"]) == (["short"] * 2 + ["long"] * 2, [10, 20, 30, 60])
    assert {name: trace["y"] for name, trace in traces(parsed, "Steps").items()} == {"fcfs": [7], "priority": [9]}
    assert all(trace["type"] == "bar" for trace in traces(parsed, "Steps").values())
    series = traces(parsed, "queue by time (s)")
    assert (series["priority"]["x"], series["priority"]["y"]) == ([1, 2], [4, 8])


def test_ratios_are_to_the_first_run_or_to_the_baseline(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": documents.engine(2.0), "b.json": documents.engine(3.0)})
    assert "1.50x, better" in rendered(tmp_path).text
    text = rendered(tmp_path, baseline=tmp_path / "b.json").text
    assert "0.67x, worse" in text
    assert "b.json (baseline)" in text


def test_ranges_that_overlap_are_no_difference(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": documents.engine(2.0), "b.json": documents.engine(2.1)})
    assert "1.05x, ranges overlap" in rendered(tmp_path).text


def test_levels_with_failures_are_not_compared(tmp_path: Path) -> None:
    failed = documents.load(label="failed", levels=[documents.level(4, failures=1), documents.level(16)])
    text = rendered(write(tmp_path, {"a.json": documents.load(), "b.json": failed})).text
    assert "16 users: output tokens/s" in text
    assert "4 users: output tokens/s" not in text


def test_text_from_files_is_text(tmp_path: Path) -> None:
    document = documents.load(label=EVIL, model=EVIL, errors={EVIL: 1}, commit=EVIL, date=EVIL)
    experiment = documents.experiment(
        title=EVIL, question=EVIL, notes=[EVIL, "</script><img src=x>"], arms=[{"name": EVIL}]
    )
    experiment["metrics"][0]["values"] = {EVIL: {"samples": [1.0]}}
    files = {f"{EVIL.replace('/', '')}.json": document, "x.json": experiment, "m.json": documents.engine()}
    files["m.json"]["cases"][0] |= {"name": EVIL, "failure": EVIL}
    write(tmp_path, files)
    (tmp_path / "<img src=x>.json").write_text(json.dumps({"benchmark": EVIL}))
    parsed = rendered(tmp_path)
    assert parsed.scripts == 2, "plotly and ours"
    assert parsed.loads == ["data:,"]
    assert f"1 x {EVIL}" in parsed.text
    assert "<img src=x>.json" in parsed.text
    names = [trace["name"] for plot in parsed.plots.values() for trace in plot["traces"]]
    assert any("&lt;script&gt;" in name for name in names)
    assert not any("<" in name for name in names), "plotly reads HTML in names"


def test_json_in_a_script_cannot_end_it() -> None:
    text = script_json({"a": "</script><!--"})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--"}


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    text = page(read([write(tmp_path, documents.every_kind())]), "Title")
    assert Parsed(text).loads == ["data:,"], "the empty icon"
    assert "default-src 'none'" in text.split("<style>")[0]


def test_warnings_and_left_out_files_are_visible(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": documents.load(uncommitted_changes=True, generator={"saturated": True})})
    (tmp_path / "broken.json").write_text("{")
    text = " ".join(rendered(tmp_path).text)
    for wanted in (
        "uncommitted changes",
        "the load generator was saturated",
        "broken.json",
        "is not JSON",
        "1 file left out",
    ):
        assert wanted in text


def test_the_command_writes_the_page_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"deep/down/a.json": documents.engine()})
    (tmp_path / "broken.json").write_text("{")
    assert main([str(tmp_path), "--title", "A & B"]) == 0
    said = capsys.readouterr()
    assert str(tmp_path / "report.html") in said.out
    assert "broken.json" in said.err
    assert "<title>A &amp; B</title>" in (tmp_path / "report.html").read_text()
    out = tmp_path / "new" / "page.html"
    assert main([str(tmp_path / "deep" / "down" / "a.json"), str(tmp_path), "--out", str(out)]) == 0
    assert "1 run:" in capsys.readouterr().out, "the same file is read once"
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert main([str(tmp_path / "deep" / "down" / "a.json")]) == 0
    assert (tmp_path / "deep" / "down" / "a.html").is_file(), "not over the page of all"


def test_the_kept_results_make_a_page(tmp_path: Path) -> None:
    assert main([str(KEPT), "--out", str(tmp_path / "r.html")]) == 0
    assert len(Parsed((tmp_path / "r.html").read_text()).plots) >= 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "run a benchmark first"),
        (["broken"], "broken.json: is not JSON"),
        (["nowhere"], "nowhere is not there"),
        (["good", "--baseline", "broken/broken.json"], "is none of the results that were read"),
        (["good", "--out", "good/a.json"], "give another"),
        (["good", "--out", "good"], "is a folder"),
        (["good", "--out", "good/a.json/r.html"], "can't be written"),
    ],
)
def test_what_cannot_be_done_is_exit_2_with_advice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "broken.json").write_text("{")
    write(tmp_path, {"good/a.json": documents.engine()})
    before = (tmp_path / "good" / "a.json").read_text()
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "good" / "a.json").read_text() == before


def test_open_hands_the_file_to_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert main([str(write(tmp_path, {"a.json": documents.engine()})), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]


@pytest.mark.skipif(sync_playwright is None or CHROMIUM is None, reason="needs playwright and chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_a_browser_draws_every_plot_without_a_network(tmp_path: Path, width: int, scheme: Any) -> None:
    assert main([str(write(tmp_path, documents.every_kind()))]) == 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            context = browser.new_context(
                viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme, accept_downloads=False
            )
            tab = context.new_page()
            problems: list[str] = []
            requests: list[str] = []
            tab.on("console", lambda message: problems.append(message.text))
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on("request", lambda request: requests.append(request.url))
            tab.goto((tmp_path / "report.html").as_uri())
            tab.wait_for_selector("html[data-drawn]", timeout=120_000)
            plots = tab.locator(".plot")
            drawn = tab.locator(".plot.js-plotly-plot:has(.main-svg):has(.xy)")
            assert drawn.count() == plots.count() == 31
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (
                "the page itself never scrolls sideways"
            )
            # A selector works with the keyboard, and changes what is drawn.
            figure = tab.locator("figure", has_text="Distribution of TTFT (users)")
            legend = figure.locator(".legendtext").first
            before = figure.locator(".scatterlayer .js-line").first.get_attribute("d")
            figure.locator("select").focus()
            tab.keyboard.press("ArrowUp")
            assert legend.text_content()
            assert figure.locator(".scatterlayer .js-line").first.get_attribute("d") != before
            assert problems == []
            assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        finally:
            browser.close()
