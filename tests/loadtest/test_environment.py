from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from loadtest.environment import describe, headline, write_json


def test_a_result_says_where_and_when_it_was_measured(tmp_path: Path) -> None:
    found = describe()
    assert datetime.datetime.fromisoformat(found["date"]).tzinfo is not None
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["mlx"] in headline(found)
    write_json(tmp_path / "deep" / "result.json", found)
    assert json.loads((tmp_path / "deep" / "result.json").read_text()) == found
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["result.json"]


def test_a_result_that_can_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "result").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "result", {})
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
