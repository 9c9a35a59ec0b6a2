"""What several benchmarks' tests need."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest import environment


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result can be written."""

    def full(*_: Any) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(environment, "write_json", full)
