"""Peers without their programs: environments by a fake uv, servers by a script, weights by their real worker."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from loadtest import processes
from loadtest.peers import commands, worker_weights
from loadtest.peers.base import (
    PORT,
    Launch,
    PeerServer,
    PeerUnavailableError,
    Setup,
    Weights,
    probe,
)
from loadtest.peers.commands import StepError, without_paths
from loadtest.peers.mlx_lm import MLXLMPeer
from loadtest.peers.registry import all_peers, chosen
from loadtest.peers.sweep import KeptRounds, machine_load, run_sweep, settings_key
from loadtest.peers.venvs import PeerVenv, uv_environment
from loadtest.peers.weights import ensure_weights
from mlx_engine.models.load import load_model
from tests.loadtest.fake_peers import SERVER
from tests.mlx_engine.models.tiny import TinyGGUF, parameters

# Makes what uv would make, as far as our code looks: bin/python, which exits with what the file `health` holds.
_UV = """#!/bin/sh
echo "$@" >> "$FAKE_UV_CALLS"
if [ "$1" = venv ]; then
    for last; do :; done
    case "$*" in *--clear*) rm -rf "$last" ;; esac
    mkdir -p "$last/bin"
    printf '#!/bin/sh\\nexit $(cat "%s/health" 2>/dev/null || echo 1)\\n' "$last" > "$last/bin/python"
    chmod +x "$last/bin/python"
    exit 0
fi
case "$*" in *broken*) echo "no wheel for this platform in $HOME/somewhere/index"; exit 1 ;; esac
case "$*" in *slow*) sleep 600 ;; esac
echo 0 > "$(dirname "$(dirname "$4")")/health"
"""


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "cache", tmp_path / "logs", install_timeout_s=60)


@pytest.fixture
def uv_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "path/uv"
    program.parent.mkdir()
    program.write_text(_UV)
    program.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_UV_CALLS", str(calls))
    return calls


def _venv(*attempts: str) -> PeerVenv:
    return PeerVenv("p", tuple((attempt,) for attempt in attempts), ("python", "-c", "pass"))


def test_an_environment_is_made_once(setup: Setup, uv_calls: Path) -> None:
    for _ in range(2):
        folder = _venv("package==1").ensure(setup)
    assert (folder / "bin/python").exists()
    assert len(uv_calls.read_text().splitlines()) == 2  # one venv, one install


def test_other_requirements_or_a_broken_environment_are_installed_again(setup: Setup, uv_calls: Path) -> None:
    folder = _venv("package==1").ensure(setup)
    _venv("package==2").ensure(setup)
    assert "package==2" in uv_calls.read_text()
    (folder / "health").write_text("1")
    _venv("package==2").ensure(setup)
    assert uv_calls.read_text().count("package==2") == 2


def test_a_half_done_environment_is_gone_on_with_and_only_then_made_afresh(setup: Setup, uv_calls: Path) -> None:
    (setup.cache / "p").mkdir(parents=True)
    _venv("package==1").ensure(setup)
    assert "--allow-existing" in uv_calls.read_text()
    assert "--clear" not in uv_calls.read_text()


def test_a_second_way_to_install_is_tried(setup: Setup, uv_calls: Path) -> None:
    _venv("broken==1", "package==1").ensure(setup)
    assert "package==1" in uv_calls.read_text()


def test_what_cannot_be_installed_is_unavailable_with_the_logs_last_words(setup: Setup, uv_calls: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="no wheel for this platform in index"):
        _venv("broken==1").ensure(setup)


def test_an_installation_that_takes_too_long_ends_with_its_processes(setup: Setup, uv_calls: Path) -> None:
    with pytest.raises(StepError, match=r"not done after|time for the installation"):
        _venv("slow==1").ensure(replace(setup, install_timeout_s=1))
    assert not any("slow==1" in process.command for process in processes.snapshot().values())


def test_without_uv_a_peer_is_unavailable_and_the_message_says_why(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PeerUnavailableError, match="uv is not on PATH"):
        _venv("package==1").ensure(setup)


def test_uv_is_told_of_pips_wheels_and_not_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    environment = uv_environment()
    assert environment["UV_FIND_LINKS"] == "/a,/b"
    assert "VIRTUAL_ENV" not in environment


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/.cache/quire/peers/vllm/bin/vllm", "vllm"),
        ("serve", "serve"),
        ("/a/weights/hf-float32", "hf-float32"),
        ("libtcmalloc_minimal.so.4:/a/b/libiomp5.so", "libtcmalloc_minimal.so.4:libiomp5.so"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("configs/local.yaml", "configs/local.yaml"),
        ('File "/usr/lib/python3/x.py", line 3', 'File "x.py", line 3'),
        ("LD_PRELOAD=/a/b/c.so", "LD_PRELOAD=c.so"),
        ("in /a/b/folder/: no", "in folder: no"),
        ("10 tokens/s/client", "10 tokens/s/client"),
    ],
)
def test_paths_of_this_machine_are_shortened(text: str, shown: str) -> None:
    assert without_paths(text) == shown


def test_last_words_leave_out_what_a_progress_bar_overwrote(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\n\n10%\r90%\r100%\nValueError in /a/b/c.py\n")
    assert commands.last_words(log, 2) == "100%\nValueError in c.py"
    assert commands.last_words(tmp_path / "none") == ""


def _launch(*arguments: str, environment: Mapping[str, str] | None = None) -> Launch:
    return Launch((sys.executable, "-c", SERVER, PORT, *arguments), "m", environment or {})


def test_a_server_is_ready_inside_answers_and_is_gone_outside(tmp_path: Path) -> None:
    with PeerServer(_launch(), tmp_path / "log", 60) as server:
        assert server.ready_s is not None
        assert probe(server) == " Paris"
        port = server.base_url.rsplit(":", 1)[1]
        assert any(f" {port}" in process.command for process in processes.snapshot().values())
    assert not any(f" {port}" in process.command for process in processes.snapshot().values())


def test_a_server_that_ends_says_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(StepError, match=r"ended with 3:\nno memory in x.py"),
        PeerServer(_launch("dies"), tmp_path / "log", 60),
    ):
        pass


def test_a_server_that_does_not_get_ready_is_ended(tmp_path: Path) -> None:
    server = PeerServer(_launch("loads"), tmp_path / "log", 1)
    with pytest.raises(StepError, match="not ready after 1 s"), server:
        pass
    port = server.base_url.rsplit(":", 1)[1]
    assert not any(f" {port}" in process.command for process in processes.snapshot().values())


def test_a_server_whose_program_is_missing_is_a_failed_step(tmp_path: Path) -> None:
    with (
        pytest.raises(StepError, match=r"^server can't be started"),
        PeerServer(Launch(("/no/such/server",), "m"), tmp_path / "log", 5),
    ):
        pass


def test_a_server_that_refuses_the_first_request_is_a_failed_step(tmp_path: Path) -> None:
    with (
        PeerServer(_launch("refuses"), tmp_path / "log", 60) as server,
        pytest.raises(StepError, match="500: out of memory"),
    ):
        probe(server)


def test_a_launch_shows_no_paths() -> None:
    launch = Launch(("/e/bin/x", "--model", "/w/hf-float32", "--port", PORT), "m", {"LD_PRELOAD": "/e/lib/a.so"})
    assert launch.shown() == {
        "command": ["x", "--model", "hf-float32", "--port", "PORT"],
        "environment": {"LD_PRELOAD": "a.so"},
        "notes": [],
    }


def test_every_peer_is_known_by_its_name_and_says_how_it_starts(tmp_path: Path) -> None:
    peers = all_peers(tmp_path)
    assert [peer.spec.name for peer in peers] == [
        "quire-haproxy", "quire-proxy", "vllm-bf16", "llama-q4_1", "llama-bf16", "llama-f32", "mlx-lm",
        "mlx-lm-openblas",
    ]  # fmt: skip
    (tmp_path / "llama.cpp/lib/python3.11/site-packages").mkdir(parents=True)
    (tmp_path / "mlx-lm/lib/python3.11/site-packages").mkdir(parents=True)
    files = {name: tmp_path / name for name in ("hf_float32", "hf_bfloat16", "gguf_shipped", "gguf_bf16", "gguf_f32")}
    weights = Weights(**files, sha256="0")
    for peer in peers:
        shown = peer.launch(weights).shown()
        assert str(tmp_path) not in json.dumps(shown)
    assert "LD_PRELOAD" not in MLXLMPeer(tmp_path, openblas=False).launch(weights).environment


def test_unknown_peers_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    peers = all_peers(tmp_path)
    assert [peer.spec.name for peer in chosen(peers, ["mlx-lm", "vllm-bf16"])] == ["vllm-bf16", "mlx-lm"]
    with pytest.raises(ValueError, match=r"'sglang'; there are: quire-haproxy, .*mlx-lm-openblas"):
        chosen(peers, ["sglang"])


def test_weights_come_from_a_worker_and_its_failure_is_a_failed_step(setup: Setup) -> None:
    names = ("hf_float32", "hf_bfloat16", "gguf_shipped", "gguf_bf16", "gguf_f32", "sha256")
    good = f"import json; print('hello'); print(json.dumps({{name: name for name in {names}}}))"
    found = ensure_weights(setup, 60, (sys.executable, "-c", good))
    assert found.gguf_f32 == Path("gguf_f32")
    with pytest.raises(StepError, match="no space"):
        ensure_weights(setup, 60, (sys.executable, "-c", "raise SystemExit('no space')"))
    with pytest.raises(StepError, match="something else"):
        ensure_weights(setup, 60, (sys.executable, "-c", "print('done')"))


def test_the_weights_are_the_stored_numbers_in_each_formats_order(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    tiny = TinyGGUF(qtype=gguf.GGMLQuantizationType.Q4_1)
    tiny.write(source)
    found = worker_weights.make_weights(tmp_path, source)
    assert worker_weights.make_weights(tmp_path, source) == found  # nothing is made twice
    assert Path(found["gguf_shipped"]) == source
    expected = tiny.stored_weights()
    for kind, tolerance in (("hf_float32", 0.0), ("hf_bfloat16", 2**-8)):
        loaded = load_model(Path(found[kind]), "float32").model
        actual = parameters(loaded)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(np.array(actual[name]), value, rtol=tolerance, err_msg=name)
    stored = gguf.GGUFReader(source)
    for kind, tolerance in (("gguf_f32", 0.0), ("gguf_bf16", 2**-8)):
        written = gguf.GGUFReader(found[kind])
        assert {name for name in written.fields if name != "general.file_type"} >= {
            name for name in stored.fields if not name.startswith("GGUF.") and name != "general.file_type"
        }
        for ours, theirs in zip(written.tensors, stored.tensors, strict=True):
            assert ours.name == theirs.name
            np.testing.assert_allclose(
                gguf.dequantize(ours.data, ours.tensor_type), gguf.dequantize(theirs.data, theirs.tensor_type),
                rtol=tolerance,
            )  # fmt: skip
    config = json.loads((Path(found["hf_bfloat16"]) / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not list(tmp_path.glob("*/making-*"))


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 0.0], np.float32)  # the second and third are ties
    bits = worker_weights._bfloat16_bits(values).astype(np.uint32) << 16
    assert bits.view(np.float32).tolist() == [1.0, 1.0, 1.015625, -2.5, 0.0]


def test_a_kept_round_is_for_its_settings_only(tmp_path: Path) -> None:
    kept = KeptRounds(tmp_path)
    key = settings_key({"levels": [1], "seed": 0})
    assert key == settings_key({"seed": 0, "levels": [1]}) != settings_key({"seed": 1, "levels": [1]})
    kept.put(1, "p", key, {"a": 1})
    assert kept.get(1, "p", key) == {"a": 1}
    assert kept.get(1, "p", "other") is None
    assert kept.get(2, "p", key) is None
    (tmp_path / "round-1-p.json").write_text("{half")
    assert kept.get(1, "p", key) is None
    kept.clear()
    assert not list(tmp_path.iterdir())


def test_a_sweeps_result_is_read_whatever_its_exit_code_and_its_absence_is_a_failed_step(tmp_path: Path) -> None:
    result, log = tmp_path / "r/result.json", tmp_path / "log"
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.exit(1)"
    good = [sys.executable, "-c", write, str(result), '{"levels": [{"level": 1}]}']
    assert run_sweep(good, 60, result, log) == (1, {"levels": [{"level": 1}]})
    with pytest.raises(StepError, match=r"ended with 2 and left no result:\nno route"):
        run_sweep([sys.executable, "-c", "print('no route'); raise SystemExit(2)"], 60, result, log)
    with pytest.raises(StepError, match="can't be read"):
        run_sweep([*good[:-1], '{"levels": 3}'], 60, result, log)
    with pytest.raises(StepError, match="not done after 1 s"):
        run_sweep([sys.executable, "-c", "import time; time.sleep(600)"], 1, result, log)


def test_the_machines_load_is_known() -> None:
    load = machine_load()
    assert load["load_average_1min"] is not None
    busy = load["cpu_busy_fraction"]
    assert busy is None or 0 <= busy <= 1
