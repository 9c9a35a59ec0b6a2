from __future__ import annotations

import pytest

from mlx_engine.errors import ModelLoadError
from mlx_engine.models.embedded import EMBEDDED_MODEL_NAME, embedded_gguf


def test_the_package_is_found() -> None:
    with embedded_gguf().open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert embedded_gguf().name.startswith(EMBEDDED_MODEL_NAME)


def test_missing_embedded_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install"):
        embedded_gguf()
