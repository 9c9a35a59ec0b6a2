from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from loadtest.options import blas_summary, key_value, merged, result_file, result_folder


def test_values_are_json_or_else_text() -> None:
    assert key_value("a=1") == ("a", 1)
    assert key_value("a=null") == ("a", None)
    assert key_value('a={"b": [1]}') == ("a", {"b": [1]})
    assert key_value("a=paged") == ("a", "paged")
    assert key_value("a=b=c") == ("a", "b=c")
    assert merged([("a", 1), ("b", 2), ("a", 3)]) == {"a": 3, "b": 2}
    assert merged(None) == {}


def test_results_carry_no_folder_of_the_machine() -> None:
    status = {
        "active": True,
        "library": "/somewhere/site-packages/x/libopenblas.so.0",
        "num_threads": 2,
        "message": "m",
    }
    assert blas_summary(status) == {"active": True, "library": "x/libopenblas.so.0", "num_threads": 2}
    assert blas_summary({"active": False, "library": None, "num_threads": None})["library"] is None


def test_a_result_goes_into_folders_that_need_not_be_there_yet(tmp_path: Path) -> None:
    assert result_file(str(tmp_path / "deep/down/a.json")) == tmp_path / "deep/down/a.json"
    assert result_folder(str(tmp_path / "deep/down")) == tmp_path / "deep/down"
    assert list(tmp_path.iterdir()) == [], "to look makes nothing"
    (tmp_path / "old.json").write_text("{}")
    assert result_file(str(tmp_path / "old.json")).read_text() == "{}"


def test_what_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in (tmp_path / "file/a.json", tmp_path / "file/deep/a.json"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"nothing can be written into .*file: Not a directory"):
            result_file(str(text))
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder: name a file"):
        result_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="no regular file"):
        result_file("/dev/null")
    with pytest.raises(argparse.ArgumentTypeError, match="Not a directory"):
        result_folder(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        *((f"bench_{name}", []) for name in (
            "decode", "drafts", "engine", "gpu", "kernels", "kv_quality", "memory", "serve",
        )),
        ("compare", []),
        ("experiments.__main__", ["all"]),
    ],
)  # fmt: skip
def test_no_benchmark_begins_without_a_place_for_its_result(
    module: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"loadtest.{module}").parse_args([*arguments, "--out", str(tmp_path / "file/result")])
    assert stopped.value.code == 2
    assert "argument --out: nothing can be written into" in capsys.readouterr().err
