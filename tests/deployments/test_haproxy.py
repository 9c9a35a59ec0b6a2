"""HAProxy mode: what is changed of Ray Serve's way to run it."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from deployments.haproxy import ENABLE, _write_wrapper, bundled_binary, prepare


def test_statistics_and_metrics_listen_on_loopback_only(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text("frontend f\n    bind :9101\n    bind 10.1.2.3:8000\nlisten stats\n  bind *:8404\n")
    wrapper = _write_wrapper(tmp_path, Path("/bin/echo"), ["9101", "8404"])
    result = subprocess.run([wrapper, "-db", "-f", config], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["-dS", "-db", "-f", str(config)], "all arguments go on, and splice() is off"
    binds = [line.split()[1] for line in config.read_text().splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:9101", "10.1.2.3:8000", "127.0.0.1:8404"]


def test_turned_off_it_changes_nothing() -> None:
    assert prepare({ENABLE: "0"}) == ({}, None)


@pytest.mark.parametrize(("hard", "connections"), [(20000, None), (resource.RLIM_INFINITY, None), (4096, "948")])
def test_connections_fit_the_limit_on_open_files(
    monkeypatch: pytest.MonkeyPatch, hard: int, connections: str | None
) -> None:
    """HAProxy would not start: with 4096 files, which importing mlx-lm sets for a process and its children, for one."""
    if bundled_binary() is None:
        pytest.skip("Ray brings no HAProxy for this platform")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    added, folder = prepare({})
    assert folder is not None
    shutil.rmtree(folder)
    assert added.get("RAY_SERVE_HAPROXY_MAXCONN") == connections
