"""Locust with our users, as the command that people type, against a server whose timing is known."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TTFT_S, ITL_S, EVENTS = 0.4, 0.04, 10


@contextlib.contextmanager
def timed_server(**options: float) -> Iterator[str]:
    """A server of known timing; gives its URL."""
    values = {"ttft": TTFT_S, "itl": ITL_S, "tokens": EVENTS, **options}
    flags = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.loadtest.timed_server", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def truth(url: str) -> dict[str, float]:
    """What the server really did."""
    with urllib.request.urlopen(f"{url}/truth", timeout=30) as response:
        found: dict[str, float] = json.load(response)
        return found


def command(*arguments: str) -> list[str]:
    """Locust's command line."""
    return [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary", *arguments]


def run(folder: Path, url: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs Locust to its end; gives its result file too, {} if there is none."""
    path = folder / "result.json"
    path.unlink(missing_ok=True)
    done = subprocess.run(
        command("--host", url, "--result", str(path), *arguments), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done, json.loads(path.read_text()) if path.exists() else {}


def _off_by(measured: dict[str, Any], real: dict[str, float]) -> dict[str, float]:
    level = measured["levels"][0]
    itl = mean(level["itl_s"]["samples"])
    tokens = sum(level["completion_tokens"]["samples"]) / level["requests"]
    return {
        "ttft": level["ttft_s"]["median"] / real["ttft"] - 1,
        "itl": itl / real["itl"] - 1,
        "tokens": tokens / (real["tokens"] / real["requests"]) - 1,
    }


@pytest.mark.parametrize("users", [1, 20, 50])
def test_ttft_itl_and_tokens_are_within_five_percent_of_the_truth(tmp_path: Path, users: int) -> None:
    off: dict[str, float] = {}
    for _ in range(3):  # another program that takes the CPU for a moment makes the truth itself unclear
        with timed_server() as url:
            done, result = run(tmp_path, url, "--levels", str(users))
            off = _off_by(result, truth(url))
        assert done.returncode == 0, done.stderr
        if all(abs(share) < 0.05 for share in off.values()):
            break
    assert all(abs(share) < 0.05 for share in off.values()), off
    (level,) = result["levels"]
    assert (level["level"], level["requests"], level["failures"]) == (users, 2 * users, 0)
    assert level["complete"]
    assert not result["generator"]["saturated"]
    assert "MonkeyPatch" not in done.stderr


def test_metrics_have_rows_of_their_own_and_add_no_requests(tmp_path: Path) -> None:
    with timed_server(ttft=0.05, itl=0.01) as url:
        done, result = run(tmp_path, url, "--levels", "2")
    assert done.returncode == 0, done.stderr
    # The summary's rows: type, name, requests, failures(share), …
    rows = re.findall(r"^(\w*) +(\S.*?) +(\d+) +\d+\([\d.]+%\) \|", done.stderr, re.MULTILINE)
    counts = {name: int(count) for _, name, count in rows}
    assert counts["Aggregated"] == counts["/v1/completions"] == result["requests"]
    assert counts["TTFT (ms)"] == counts["Output tokens"] == result["requests"]
    assert counts["ITL (ms)"] == result["requests"] * (EVENTS - 1)


def test_broken_streams_are_failures_and_decide_the_exit_code(tmp_path: Path) -> None:
    with timed_server(ttft=0.02, itl=0.005, break_every=4) as url:
        done, result = run(tmp_path, url, "--levels", "2", "--level-requests-per-user", "8")
        assert done.returncode == 1
        assert result["failures"] > 0
        assert sum(result["errors"].values()) == result["failures"]
        assert "--max-failure-ratio" in done.stderr
        done, result = run(tmp_path, url, "--levels", "2", "--level-requests-per-user", "8",
                           "--max-failure-ratio", "0.5")  # fmt: skip
        assert result["failures"] > 0
        assert done.returncode == 0, done.stderr


def test_a_server_that_is_not_there_fails_the_run(tmp_path: Path) -> None:
    with timed_server() as url:
        pass
    done, result = run(tmp_path, url, "--levels", "1", "--model", "m", "--level-timeout", "5")
    assert done.returncode == 1
    assert "Refused" in str(result["errors"])


def test_a_run_without_a_request_fails(tmp_path: Path) -> None:
    with timed_server() as url:
        done, result = run(tmp_path, url, "--scenario", "poisson", "--rates", "0.0001", "--level-seconds", "1",
                           "--warmup-seconds", "0")  # fmt: skip
    assert done.returncode == 1
    assert "no request has ended" in done.stderr
    assert result["requests"] == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--levels", "1,x"), "--levels must be"),
        (("--extra-body", "["), "--extra-body must be"),
        (("--scenario", "trace_replay", "--trace", "nowhere.jsonl"), "--trace can't be replayed"),
        (("TraceReplay", "--trace", "README.md"), "README.md, line 1"),
        (("--scenario", "trace_replay", "--trace-scale", "1e6"), "--trace-scale"),
        (("--users", "-3"), "--users must be"),
        (("--result", "tests"), "--result must be"),
        (("--api-key", "a\nb"), "--api-key must be printable ASCII"),
        (("--host", "127.0.0.1:8000"), "must be a URL"),
        (("--host", "http://127.0.0.1:99999"), "no good port"),
    ],
)
def test_bad_options_end_it_before_it_begins(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    done, result = run(tmp_path, "http://127.0.0.1:9", *arguments)
    assert done.returncode == 2, done.stderr
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert "a\nb" not in done.stderr
    assert result == {}


def test_a_slow_metrics_page_delays_nobody(tmp_path: Path) -> None:
    with timed_server(ttft=0.05, itl=0.01, metrics_delay=3) as url:
        done, result = run(tmp_path, url, "--levels", "1,8")
    assert done.returncode == 0, done.stderr
    one, eight = (level["output_tokens_per_second"] for level in result["levels"])
    assert eight > 4 * one


def test_a_server_without_models_ends_the_run_at_once(tmp_path: Path) -> None:
    with timed_server(no_models=1) as url:
        done, _ = run(tmp_path, url, "--levels", "1")
    assert done.returncode == 1
    assert "name one with --model" in done.stderr
    assert len(done.stderr.splitlines()) < 60


def test_a_run_time_ends_a_sweep_too(tmp_path: Path) -> None:
    with timed_server() as url:
        done, result = run(tmp_path, url, "--levels", "1,2", "--level-requests-per-user", "100", "--run-time", "4s")
    assert done.returncode == 0, done.stderr
    assert [level["complete"] for level in result["levels"]] == [False]


def test_a_generator_without_cpu_left_says_so(tmp_path: Path) -> None:
    # A server that answers at once leaves the client nothing to wait for.
    with timed_server(ttft=0, itl=0, tokens=200) as url:
        done, result = run(tmp_path, url, "--levels", "50", "--level-requests-per-user", "0", "--level-seconds", "6",
                           "--warmup-seconds", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert result["generator"]["saturated"], result["generator"]
    assert "used up its own CPU" in done.stderr


def test_processes_share_the_load_and_their_samples_meet(tmp_path: Path) -> None:
    with timed_server(ttft=0.1, itl=0.01) as url:
        done, result = run(tmp_path, url, "--processes", "2", "--levels", "4")
    assert done.returncode == 0, done.stderr
    assert result["levels"][0]["requests"] >= 8
    assert result["levels"][0]["complete"]
    assert result["generator"]["cpu_percent_max"] is not None


def test_a_run_that_is_interrupted_keeps_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with timed_server(ttft=0.05, itl=0.005) as url:
        arguments = ("--host", url, "--result", str(path), "-u", "2", "--scenario", "mixed_lengths", "-t", "60s",
                     "--warmup-seconds", "0")  # fmt: skip
        with subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            while "users spawned" not in process.stderr.readline():
                pass
            # Until some requests have ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
            process.send_signal(signal.SIGTERM)
            stderr = process.stderr.read()
            assert process.wait(60) == 0, stderr
    assert json.loads(path.read_text())["levels"][0]["requests"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--scenario", "shared_prefix", "-u", "3", "-r", "3", "-t", "3s"),
        ("--scenario", "mixed_lengths", "-u", "3", "-r", "3", "-t", "3s"),
        ("MultiTurnAgents", "-u", "2", "-r", "3", "-t", "3s"),
        ("--scenario", "long_prefill_intruder", "-u", "3", "-r", "3", "-t", "4s", "--intruder-every", "0.5"),
        ("Poisson", "--rates", "5,20", "--level-seconds", "2"),
        ("--scenario", "trace_replay", "--trace-speed", "20"),
    ],
    ids=lambda arguments: next(text for text in arguments if text[0] != "-"),
)
def test_each_scenario_runs_by_option_or_by_class(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with timed_server(ttft=0.05, itl=0.005, tokens=4) as url:
        done, result = run(tmp_path, url, *arguments, "--warmup-seconds", "0")
    assert done.returncode == 0, done.stderr
    scenario = result["scenario"]
    assert all(level["requests"] > 0 and level["complete"] for level in result["levels"])
    tags = set(result["levels"][0]["by_tag"])
    expected = {
        "shared_prefix": {"shared prefix"},
        "long_prefill_intruder": {"victim", "intruder"},
        "poisson": {"uniform"},
        "trace_replay": {"trace"},
    }
    assert tags == expected.get(scenario, tags)
    if scenario == "poisson":
        assert [level["level"] for level in result["levels"]] == [5, 20]
        assert result["levels"][0]["requests"] < result["levels"][1]["requests"]
    if scenario == "trace_replay":
        # The trace's own time, without that of starting and stopping: its last request comes after 2.98 s.
        assert result["levels"][0]["duration_s"] < 4.5
        assert result["requests"] == len((ROOT / "loadtest/load/small_trace.jsonl").read_text().splitlines())
    if scenario == "multi_turn_agents":
        assert {f"turn {turn:02}" for turn in (1, 2, 3)} <= tags


def test_classes_of_two_scenarios_are_refused(tmp_path: Path) -> None:
    with timed_server() as url:
        done, _ = run(tmp_path, url, "SharedPrefix", "MixedLengths", "-t", "3s")
    assert done.returncode == 2
    assert "choose one scenario's class" in done.stderr
