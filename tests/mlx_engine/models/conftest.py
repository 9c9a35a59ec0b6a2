from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def quire_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder in place of the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(folder))
    return folder
