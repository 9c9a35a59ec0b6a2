from __future__ import annotations

import socket
from pathlib import Path

import pytest

from loadtest.serve_process import free_ports, read_config


def test_free_ports_can_be_bound_and_are_none_of_those_dealt_to_clients() -> None:
    ports = free_ports(4)
    assert len(set(ports)) == 4
    assert max(ports) < 32768
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports[0]))


def test_engine_values_replace_the_files_and_leave_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n  - args:\n      model_id: m\n      engine: {num_blocks: 10, block_size: 16}\n")
    config = read_config(path, {"num_blocks": 99})
    assert config["applications"][0]["args"] == {"model_id": "m", "engine": {"num_blocks": 99, "block_size": 16}}


@pytest.mark.parametrize("content", ["", "applications: []", "a: 1", "[]"])
def test_what_is_no_serve_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match="no Serve config"):
        read_config(path, {})
