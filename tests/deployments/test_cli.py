"""`quire`: which config it finds, what it sets for Ray, and what it becomes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments import cli, haproxy

ROOT = Path(__file__).parents[2]


class Became(Exception):
    """What os.execve was called with."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> None:
    def execve(path: str, command: list[str], environment: dict[str, str]) -> Any:
        raise Became(command, environment)

    monkeypatch.setattr(os, "execve", execve)
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)


def run(*arguments: str) -> tuple[list[str], dict[str, str]]:
    with pytest.raises(Became) as caught:
        cli.main(arguments)
    command, environment = caught.value.args
    if "--scratch" in command:
        folder = Path(command[command.index("--scratch") + 1])
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return command, environment


@pytest.mark.usefixtures("became")
def test_it_becomes_the_driver_with_what_ray_reads_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the default config is found from anywhere
    command, environment = run("serve")
    assert command[:4] == [sys.executable, "-m", "deployments.driver", str(ROOT / "configs" / "local.yaml")]
    assert environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert int(environment["OPENBLAS_NUM_THREADS"]) >= 1
    assert (environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1") is (haproxy.bundled_binary() is not None)


@pytest.mark.usefixtures("became")
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    command, environment = run("serve", "--dashboard", "--num-cpus", "5")
    assert environment["RAY_USAGE_STATS_ENABLED"] == "1"
    assert environment["OPENBLAS_NUM_THREADS"] == "3"
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert command[4:] == ["--dashboard", "--num-cpus", "5"]


@pytest.mark.usefixtures("became")
def test_haproxy_can_be_turned_off() -> None:
    command, environment = run("serve", "--no-haproxy")
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment
    assert "--scratch" not in command


def test_configs_are_found_by_path_and_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.find_config("configs/mac.yaml") == ROOT / "configs" / "mac.yaml"
    assert cli.find_config("cuda") == ROOT / "configs" / "cuda.yaml"
    assert cli.find_config("nope") is None
    mine = tmp_path / "configs" / "mac.yaml"
    mine.parent.mkdir()
    mine.write_text("")
    assert cli.find_config("configs/mac.yaml") == Path("configs/mac.yaml"), "what is here comes first"


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "no/such.yaml"]) == 2
    assert "no/such.yaml" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("quire ")


def test_the_command_starts_without_ray_or_mlx() -> None:
    """Ray reads its environment while it is imported, so it must not be in before that is set."""
    heavy = ("ray", "mlx.core", "transformers", "plotly", "numpy")
    code = f"import sys, deployments.cli; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_report_makes_a_page_of_the_kept_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["report", str(ROOT / "docs" / "benchmarks"), "--out", str(out), "--title", "Kept"]) == 0
    assert str(out) in capsys.readouterr().out
    assert "<h1>Kept</h1>" in out.read_text()


def test_report_without_results_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "run a benchmark first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


needs_haproxy = pytest.mark.skipif(haproxy.bundled_binary() is None, reason="Ray ships no HAProxy here")


@needs_haproxy
def test_haproxy_runs_without_splice_and_with_ports_and_files_of_its_own() -> None:
    added, folder = haproxy.prepare({})
    assert folder is not None
    try:
        wrapper = Path(added[haproxy.BINARY])
        version = subprocess.run([wrapper, "-v"], capture_output=True, text=True, check=True)
        assert "HAProxy version" in version.stdout
        assert ' -dS "$@"' in wrapper.read_text()
        assert folder.stat().st_mode & 0o077 == 0, "nobody else's business"
        files = [value for name, value in added.items() if value.startswith(str(folder))]
        assert len(files) == 6
        node_id = "0" * 56
        assert all(len(os.path.join(folder, node_id, Path(file).name)) < 108 for file in files), (
            "socket paths are short"
        )
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@needs_haproxy
def test_haproxys_own_pages_stay_on_loopback_and_the_api_where_it_is_told_to_be() -> None:
    added, folder = haproxy.prepare({"RAY_SERVE_HAPROXY_STATS_PORT": "1936"})
    assert folder is not None
    try:
        metrics = added["RAY_SERVE_HAPROXY_METRICS_PORT"]
        config = folder / "haproxy.cfg"
        lines = [f"    bind :{metrics}", "  bind *:1936", "    bind *:8000", "    bind 10.0.0.1:19360"]
        config.write_text("\n".join(lines) + "\n")
        # -c only checks the file; what it thinks of this one doesn't matter.
        subprocess.run([added[haproxy.BINARY], "-c", "-f", str(config)], capture_output=True, check=False)
        changed = [f"    bind 127.0.0.1:{metrics}", "  bind 127.0.0.1:1936"]
        assert config.read_text().splitlines() == [*changed, *lines[2:]]
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@needs_haproxy
def test_ports_that_are_taken_are_avoided() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # Never one that the system deals: it could before HAProxy binds it.
        assert 1024 < haproxy._free_port(port) < 32768
    assert haproxy._free_port(port) == port


def test_haproxy_stays_out_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert haproxy.prepare({haproxy.ENABLE: "0"}) == ({}, None)
    monkeypatch.setattr(haproxy, "bundled_binary", lambda: None)
    assert haproxy.prepare({}) == ({}, None)


def test_a_haproxy_that_does_not_run_here_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o700)
    monkeypatch.setattr(haproxy, "bundled_binary", lambda: broken)
    assert haproxy.prepare({}) == ({}, None)
    assert "Serve's own proxy" in capsys.readouterr().err
