"""What `quire serve` checks before it starts Ray, and when its watcher ends it. The rest is in tests/integration."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import haproxy
from deployments.driver import ServeConfig, Watcher, bind_failure, main, read_config
from mlx_engine.errors import ConfigError
from tests.deployments.fakes import DEADLINE_S

APP = {"name": "quire", "route_prefix": "/", "import_path": "deployments.app:build_app"}


def write(folder: Path, content: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_config_is_read_for_its_applications_and_its_address(tmp_path: Path) -> None:
    other = {"name": "other", "import_path": "somewhere:app", "args": {"engine": {"nonsense": 1}}}
    content = {
        "http_options": {"host": "0.0.0.0", "port": 1234},
        "applications": [other, {**APP, "route_prefix": "/x"}],
    }
    assert read_config(write(tmp_path, content)) == ServeConfig(
        ("other", "quire"), "http://127.0.0.1:1234/x/health", ("0.0.0.0", 1234)
    )
    assert read_config(write(tmp_path, {"applications": [APP]})).health_url == "http://127.0.0.1:8000/health"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[", "can't be read"),
        ("5", "applications"),
        ({"applications": {}}, "applications"),
        ({"applications": [{**APP, "args": 5}]}, "applications.0.args: "),
        ({"applications": [{**APP, "args": {"engine": {"max_num_seq": 1}}}]}, "did you mean 'max_num_seqs'?"),
        ({"applications": [{**APP, "args": {"engine": {"model": "/no/such/model"}}}]}, "there is no /no/such/model"),
        ({"applications": [{**APP, "args": {"engine": {"model": "no.gguf"}}}]}, "there is no no.gguf"),
        ({"applications": [APP], "http_option": {}}, "http_option: unknown key (did you mean 'http_options'?)"),
        ({"applications": [APP], "http_options": {"prot": 1}}, "http_options.prot: unknown key (did you mean 'port'?)"),
        ({"applications": [APP], "http_options": {"port": "x"}}, "http_options.port: "),
        ({"applications": [APP], "http_options": {"port": 99999}}, "http_options.port: must be 1 to 65535"),
        ({"applications": []}, "nothing to serve"),
        (
            {"applications": [{**APP, "import_path": "deployments.app:build_ap"}]},
            "did you mean 'deployments.app:build_app",
        ),
        ({"applications": [{**APP, "arg": {}}]}, "applications.0.arg: unknown key (did you mean 'args'?)"),
        ({"applications": [{**APP, "route_prefix": None}]}, "applications.0.route_prefix: must begin with '/'"),
        ({"applications": [{**APP, "args": {"engine": {"model": ""}}}]}, "engine.model: "),
        ({"applications": [{**APP, "deployments": [{"name": "X", "num_replicas": "two"}]}]}, "num_replicas"),
    ],
)
def test_what_is_wrong_is_named_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, expected: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert expected in str(caught.value)
    assert main([str(path)]) == 1
    assert expected in capsys.readouterr().err


def test_both_spellings_of_the_import_path_are_checked(tmp_path: Path) -> None:
    app = {**APP, "import_path": "deployments.app.build_app", "args": {"engine": {"max_num_seq": 1}}}
    with pytest.raises(ConfigError, match="max_num_seqs"):
        read_config(write(tmp_path, {"applications": [app]}))


def test_a_port_in_use_is_said_before_ray_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(write(tmp_path, {"applications": [APP], "http_options": {"port": port}}))]) == 1
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


@pytest.mark.skipif(haproxy.bundled_binary() is None, reason="Ray ships no HAProxy here")
def test_a_port_that_is_taken_while_ray_starts_is_named(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f"defaults\n  mode http\n  timeout client 1s\nfrontend prometheus\n  bind {where}\n")
        ended = subprocess.run(
            [str(haproxy.bundled_binary()), "-f", str(config)], capture_output=True, text=True, timeout=60, check=False
        )
    failure = bind_failure(f"HAProxy crashed during startup: {ended.stderr}")
    assert failure is not None
    assert failure.startswith(f"HAProxy can't listen on {where} (its prometheus): Address already in use. ")
    assert bind_failure("HAProxy crashed during startup: exit code 1") is None


def test_a_port_in_use_is_serves_own_matter_in_a_ray_of_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr("deployments.driver.scripts.cli", lambda arguments, **_: given.append(arguments))
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            path = write(tmp_path, {"applications": [APP], "http_options": {"port": taken.getsockname()[1]}})
            assert main([str(path)]) == 0
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    assert given == [["run", str(path)]]


def test_a_process_that_inherited_ignored_signals_listens_to_them_again() -> None:
    code = (
        "import os, signal, time; from deployments.driver import _end_on_signals\n"
        "assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
        "_end_on_signals()\n"
        "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    ignoring = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    result = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=ignoring, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout.strip() == "interrupted", result.stderr


def test_a_hub_id_is_no_path(tmp_path: Path) -> None:
    read_config(write(tmp_path, {"applications": [{**APP, "args": {"engine": {"model": "org/model"}}}]}))


def test_the_scratch_folder_goes_however_it_ends(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "file").write_text("")
    assert main([str(write(tmp_path, "[")), "--scratch", str(scratch)]) == 1
    assert not scratch.exists()


class _Health:
    """A server whose /health says what it is told to."""

    def __init__(self, status: int, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/health"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def watch(status: int, body: bytes) -> tuple[Watcher, bool]:
    """The watcher after it has ended, and whether it sent SIGINT."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    health = _Health(status, body)
    watcher = Watcher(ServeConfig(("quire",), health.url, ("127.0.0.1", 8000)))
    try:
        watcher.start()
        deadline = time.monotonic() + DEADLINE_S
        while watcher.is_alive and time.monotonic() < deadline:
            time.sleep(0.02)  # lets the signal handler run
        assert not watcher.is_alive
    finally:
        health.server.shutdown()
        health.server.server_close()
        signal.signal(signal.SIGINT, before)
    return watcher, interrupted.is_set()


def test_the_watcher_ends_what_can_never_serve() -> None:
    watcher, interrupted = watch(503, b'{"status": "failed", "error": "num_blocks is 4"}')
    assert watcher.failure == "num_blocks is 4"
    assert interrupted


def test_the_watcher_goes_when_all_is_well() -> None:
    watcher, interrupted = watch(200, b'{"status": "ok"}')
    assert watcher.failure is None
    assert not interrupted


def test_the_watcher_waits_while_nothing_is_known() -> None:
    watcher = Watcher(ServeConfig(("quire",), "http://127.0.0.1:9/health", ("127.0.0.1", 8000)))
    watcher.start()
    time.sleep(1.2)
    assert watcher.is_alive
    assert watcher.failure is None
    watcher.stop()
