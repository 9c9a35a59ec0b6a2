"""The comparison with fake peers and a fake load generator; nothing here needs a network or a real server."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from loadtest import compare, processes
from loadtest.compare import Comparison, main, parse_args
from loadtest.peers.base import LevelLimit
from loadtest.peers.report import PeerRecord, level_entries, render, trimmed_level
from loadtest.peers.sweep import Sweep, SweepCommand, locust_command
from tests.loadtest.fake_peers import WEIGHTS_WORKER, FakePeer, level, sweep_command


def _args(out: Path, *more: str) -> argparse.Namespace:
    return parse_args(["--quick", "--out", str(out), *more])


def _run(
    out: Path, peers: list[FakePeer], *more: str, command: SweepCommand = sweep_command
) -> tuple[Comparison, dict[str, Any]]:
    comparison = Comparison(_args(out, *more), peers, out / "cache", command, WEIGHTS_WORKER)
    comparison.run()
    result: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return comparison, result


def test_peers_alternate_and_each_round_has_prompts_of_its_own(tmp_path: Path) -> None:
    seen = []

    def command(sweep: Sweep, base_url: str, model: str, result: Path) -> list[str]:
        seen.append((result.stem, sweep.seed))
        return sweep_command(sweep, base_url, model, result)

    _, result = _run(tmp_path, [FakePeer("a"), FakePeer("b")], "--rounds", "2", "--seed", "5", command=command)
    assert seen == [("sweep-1-a", 5), ("sweep-1-b", 5), ("sweep-2-a", 6), ("sweep-2-b", 6)]
    assert result["benchmark"] == "compare"
    for server in result["servers"]:
        assert server["status"] == "measured"
        assert len(server["ready_s"]) == 2
        assert [found["level"] for found in server["rounds"][1]["levels"]] == [1, 4]
        assert server["rounds"][0]["probe_text"] == " Paris"
        assert server["rounds"][0]["before"]["load_average_1min"] is not None
    assert str(tmp_path) not in json.dumps(result["servers"])


def test_a_second_run_skips_what_is_measured_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = _run(tmp_path, [FakePeer("a")])
    peer = FakePeer("a")
    _, second = _run(tmp_path, [peer], "--rounds", "2")
    assert peer.num_starts == 1  # of the second round only
    assert "round 1, a: already measured" in capsys.readouterr().err
    assert second["servers"][0]["rounds"][0] == first["servers"][0]["rounds"][0]


@pytest.mark.parametrize("change", ["version", "levels", "fresh"])
def test_what_was_measured_otherwise_is_measured_again(tmp_path: Path, change: str) -> None:
    _run(tmp_path, [FakePeer("a")])
    peer = FakePeer("a")
    more = {"version": [], "levels": ["--levels", "1,2"], "fresh": ["--fresh"]}[change]
    if change == "version":
        peer.version = "2.0"
    _run(tmp_path, [peer], *more)
    assert peer.num_starts == 1


def test_a_failed_start_is_recorded_with_the_last_words_and_others_go_on(tmp_path: Path) -> None:
    comparison, result = _run(tmp_path, [FakePeer("a", "dies"), FakePeer("b")])
    failed, measured = result["servers"]
    assert failed["status"] == "failed"
    assert failed["reason"] == "round 1, start: the server ended with 3:\nno memory in x.py"
    assert measured["status"] == "measured"
    assert "no memory in x.py" in render(result["servers"])
    assert comparison.records[0].failures


def test_an_unavailable_peer_is_reported_and_no_failure(tmp_path: Path) -> None:
    comparison, result = _run(tmp_path, [FakePeer("a", unavailable="no wheel for this platform"), FakePeer("b")])
    assert result["servers"][0]["status"] == "unavailable"
    assert result["servers"][0]["reason"] == "no wheel for this platform"
    assert not comparison.records[0].failures
    table = render(result["servers"])
    assert "no wheel for this platform" in table
    assert table.count("| A ") == 1  # among the servers, and in no table of figures


def test_a_sweep_that_hangs_is_ended_and_the_server_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweep, "timeout_s", 1.0)
    mark = f"hangs-{os.getpid()}"

    def hang(sweep: Sweep, base_url: str, model: str, result: Path) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)", mark]

    _, result = _run(tmp_path, [FakePeer("a")], command=hang)
    assert result["servers"][0]["status"] == "failed"
    assert result["servers"][0]["reason"].startswith("round 1, sweep: not done after 1 s")
    assert not any(mark in process.command for process in processes.snapshot().values())


def test_a_slow_peer_is_asked_for_fewer_levels_and_the_result_says_why(tmp_path: Path) -> None:
    slow = FakePeer("a", level_limit=LevelLimit(2, "it is slow"))
    never = FakePeer("b", level_limit=LevelLimit(0, "it is slower"))
    _, result = _run(tmp_path, [slow, never])
    assert result["servers"][0]["levels_limited"] == {"up_to": 2, "reason": "it is slow"}
    assert result["servers"][0]["status"] == "measured"
    assert [found["level"] for found in result["servers"][0]["rounds"][0]["levels"]] == [1]
    assert result["servers"][1]["status"] == "unavailable"


def test_weights_that_cannot_be_made_fail_every_peer(tmp_path: Path) -> None:
    worker = (sys.executable, "-c", "raise SystemExit('no space')")
    comparison = Comparison(_args(tmp_path), [FakePeer("a")], tmp_path, sweep_command, worker)
    comparison.run()
    assert comparison.records[0].status == "failed"
    assert "no space" in (comparison.records[0].reason or "")


def _server(name: str, *rounds: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    record = PeerRecord(FakePeer(name), (1, 4), is_installed=True, versions={name: "1.0"})
    record.shown = {"command": [name, "serve"], "environment": {}, "notes": []}
    record.rounds = [
        {"levels": levels, "ready_s": 2.0, "generator": None, "probe_text": " Paris.\n\nIt is"} for levels in rounds
    ]
    return record.to_json() | other


def test_the_table_has_gaps_ranges_ratios_and_failures() -> None:
    servers = [
        _server("quire-haproxy", [level(1, 10.0), level(4, 40.0)], [level(1, 20.0), level(4, 50.0)]),
        _server("b", [level(1, 30.0), level(4, 5.0, complete=False, failures=3, unfinished=2)]),
        _server("c", [level(1, 7.5)]),
    ]
    table = render(servers)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert ["Quire-Haproxy", "15.0 (10.0 to 20.0)", "45.0 (40.0 to 50.0)"] in rows
    assert ["B", "30.0", "5.0, 3 failed*"] in rows
    assert ["C", "7.5", "-"] in rows
    assert ["B", "2.00", "0.11"] in rows
    assert ["C", "0.50", "-"] in rows
    assert ["B", "4", "8", "3", "0", "2"] in rows
    assert ["C", "Paris. It is"] in rows
    assert "not complete in time at 4 clients" in table
    assert [server["status"] for server in servers] == ["measured", "partial", "partial"]


def test_the_table_of_nothing_measured_has_the_servers_only() -> None:
    table = render([_server("a", status="failed")])
    assert "failed" in table
    assert "tokens per second" not in table


def test_samples_that_make_the_file_large_are_left_out() -> None:
    whole = level(1, 10.0)
    whole["by_tag"] = {"uniform": {"itl_s": whole["itl_s"], "ttft_s": whole["ttft_s"]}}
    found = trimmed_level(whole)
    assert found["by_tag"]["uniform"]["ttft_s"] == {
        name: value for name, value in whole["ttft_s"].items() if name != "samples"
    }
    assert "samples" not in found["itl_s"]
    assert found["itl_s"]["count"] == 2
    assert found["ttft_s"]["samples"] == [0.1, 0.2]
    assert found["server_metrics"] is None


def test_levels_of_a_round_that_lacks_them_are_skipped() -> None:
    assert len(level_entries(_server("a", [level(1, 1.0)], []), 1)) == 1


def test_the_load_generators_command_has_what_was_asked_for(tmp_path: Path) -> None:
    sweep = Sweep((1, 2), 3, 100, 64, 7, 240, ignore_eos=False)
    command = locust_command(sweep, "http://h", "m", tmp_path / "r.json")
    for option, value in (
        ("--host", "http://h"), ("--model", "m"), ("--levels", "1,2"), ("--level-requests-per-user", "3"),
        ("--seed", "7"), ("--level-timeout", "240"), ("--result", str(tmp_path / "r.json")),
    ):  # fmt: skip
        assert command[command.index(option) + 1] == value
    assert command[-1] == "--no-ignore-eos"


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "sglang", "--out", str(tmp_path)]) == 2
    assert "'sglang'; there are: quire-haproxy" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--levels", "1,x"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(("mode", "code"), [("", 0), ("dies", 1)])
def test_the_program_writes_everything_and_fails_only_for_a_failed_peer(
    mode: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = [FakePeer("quire-haproxy", mode), FakePeer("b"), FakePeer("c", unavailable="no")]
    monkeypatch.setattr(compare, "all_peers", lambda cache: peers)
    monkeypatch.setattr(compare, "exit_on_sigterm", lambda: None)
    made = Comparison
    monkeypatch.setattr(compare, "Comparison", lambda args, chosen, cache: made(
        args, chosen, tmp_path / "cache", sweep_command, WEIGHTS_WORKER))  # fmt: skip
    assert main(["--quick", "--out", str(tmp_path / "out")]) == code
    written = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert written == {"compare.json", "compare.md", "throughput.png", "latency.png", "ttft-itl.png"}
    assert "Output tokens per second" in capsys.readouterr().out


def test_sigterm_ends_the_server_and_keeps_what_is_measured(tmp_path: Path) -> None:
    mark = tmp_path / "sweeping"
    script = textwrap.dedent(f"""
        import pathlib, sys, time
        from loadtest import compare
        from loadtest.options import exit_on_sigterm
        from tests.loadtest.fake_peers import WEIGHTS_WORKER, FakePeer, sweep_command
        out = pathlib.Path({str(tmp_path)!r})
        def command(sweep, base_url, model, result):
            if "-b" not in result.stem:
                return sweep_command(sweep, base_url, model, result)
            hang = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); time.sleep(600)"
            return [sys.executable, "-c", hang, {str(mark)!r}, base_url]
        exit_on_sigterm()
        args = compare.parse_args(["--quick", "--out", str(out)])
        compare.Comparison(args, [FakePeer("a"), FakePeer("b")], out / "cache", command, WEIGHTS_WORKER).run()
    """)
    root = Path(compare.__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-c", script], cwd=root, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        port = mark.read_text().rsplit(":", 1)[1]
        assert any(f" {port}" in found.command for found in processes.snapshot().values())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    left = [found.command for found in processes.snapshot().values()]
    assert not any(f" {port}" in command or str(mark) in command for command in left)
    assert (tmp_path / "rounds/round-1-a.json").exists()
    assert not (tmp_path / "rounds/round-1-b.json").exists()
