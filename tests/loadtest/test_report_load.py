"""Reading result files: old and new ones become the same, and nothing that lies in a folder stops the rest."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.report.fields import Malformed
from loadtest.report.load import NothingToRead, find, read, read_file
from loadtest.report.model import Results, Serve, Unread
from loadtest.report.sections import sections
from tests.loadtest import report_documents as documents

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks"


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_the_kept_results_are_read() -> None:
    results = read([KEPT])
    assert not results.unread
    assert {run.kind for run in results.runs} >= {"engine", "serve", "memory"}
    assert not any("/tmp" in value for run in results.runs for value in run.arguments.values())


def test_what_an_old_summary_lacks_comes_from_its_samples(tmp_path: Path) -> None:
    write(tmp_path, serve=documents.serve())
    content = read([tmp_path]).runs[0].content
    assert isinstance(content, Serve)
    ttft = content.throughput[0].ttft
    assert (ttft.count, ttft.median, ttft.samples) == (3, 0.2, (0.1, 0.2, 0.3))
    assert ttft.p90 == pytest.approx(0.28)
    assert ttft.p99 == pytest.approx(0.298)


def test_runs_are_ordered_by_argument_then_date(tmp_path: Path) -> None:
    dated = [documents.load(date=f"2026-11-2{day}T00:00:00+00:00") for day in (3, 1, 2)]
    write(tmp_path / "one", a=dated[0], b=dated[1], undated=documents.load(date=None))
    write(tmp_path / "two", a=dated[2])
    write(tmp_path / "one" / ".hidden", c=dated[0])
    assert [run.file for run in read([tmp_path / "one"]).runs] == ["b.json", "a.json", "undated.json"]
    found = [run.file for run in read([tmp_path / "two", tmp_path / "one", tmp_path / "one" / "a.json"]).runs]
    assert found == ["two/a.json", "one/b.json", "one/a.json", "one/undated.json"], "each file once"


def test_files_of_one_name_get_different_names(tmp_path: Path) -> None:
    for name in ("before", "after"):
        write(tmp_path / name, engine=documents.engine())
    paths = [tmp_path / "before" / "engine.json", tmp_path / "after" / "engine.json"]
    assert [name for _, name, _ in find(paths)] == ["before/engine.json", "after/engine.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("[1, 2]", "the document is a list"),
        ("{}", 'no "benchmark" key'),
        ('{"benchmark": "other"}', "this version knows engine"),
        ('{"benchmark": "load", "levels": [{}]}', "levels[0].level is missing"),
        ('{"benchmark": "load", "levels": [{"level": 1, "ttft_s": {"median": "fast"}}]}', "levels[0].ttft_s.median is"),
        ('{"benchmark": "memory", "samples": {"a": 1}}', "samples is an object, not a list"),
        ('{"benchmark": "load", "levels": [{"level": 1' + "0" * 400 + "}]}", "too large"),
        ("[" * 100_000, "is "),
    ],
)
def test_what_is_no_result_is_left_out_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path, good=documents.engine())
    (tmp_path / "bad.json").write_text(text)
    results = read([tmp_path])
    assert [run.file for run in results.runs] == ["good.json"]
    assert [found.file for found in results.unread] == ["bad.json"]
    assert reason in results.unread[0].reason


def test_bytes_and_folders_are_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = {unread.file: unread.reason for unread in read([tmp_path]).unread}
    assert found["bytes.json"] == "is not UTF-8 text"
    assert "No such file" in found["gone.json"]
    assert len(found) == 2


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NothingToRead, match="nowhere is not there"):
        read([tmp_path / "nowhere"])


def test_nan_is_no_number(tmp_path: Path) -> None:
    write(tmp_path, load=documents.load(levels=[documents.level(1, requests_per_second=float("nan"))]))
    (section,) = sections(read([tmp_path]))
    assert "Completed requests/s by concurrent users" not in [figure.title for figure in section.figures]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            documents.load(generator={"saturated": True, "cpu_percent_max": 98, "lag_ms_p99": 70}),
            "was saturated (CPU up",
        ),
        (documents.load(levels=[documents.level(4, failures=3)]), "3 of 40 requests failed"),
        (documents.load(levels=[documents.level(4, complete=False)]), "cut short: 4 users"),
        (documents.load(levels=[documents.level(4, unfinished=50)]), "than were done: 4 users"),
        (documents.load(errors={"timed out": 7}), "7 x timed out"),
        (documents.compare(), "Gone: unavailable: not installed"),
        (documents.memory(blocks_are_back=False), "KV blocks are missing"),
        (documents.memory(surprises=["a 500"]), "unexpected: a 500"),
        (documents.serve(failures=["too slow"]), "failed: too slow"),
        (documents.experiment(checks=[{"name": "same", "passed": False, "detail": "3 differ"}]), "same: 3 differ"),
        (documents.load(machine={"cores": 2, "load_average_1min": 9.0}), "load 9.0 on 2 cores"),
    ],
)
def test_what_casts_doubt_on_a_run_is_a_warning(tmp_path: Path, document: dict[str, Any], expected: str) -> None:
    write(tmp_path, run=document)
    assert any(expected in warning for warning in read([tmp_path]).runs[0].warnings)


def test_clean_runs_have_no_warnings(tmp_path: Path) -> None:
    every = {name.removesuffix(".json"): document for name, document in documents.every_kind().items()}
    write(tmp_path, **(every | {"compare": documents.compare(servers=documents.compare()["servers"][:2])}))
    assert [run.file for run in read([tmp_path]).runs if run.warnings] == []


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Containers and keys of all nodes below."""
    for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def test_damaged_documents_are_shown_or_left_out_and_never_raise(tmp_path: Path) -> None:
    draw = random.Random(7)
    path = tmp_path / "damaged.json"
    outcomes = set()
    for document in documents.every_kind().values():
        for _ in range(120):
            damaged = copy.deepcopy(document)
            for _ in range(draw.choice((1, 1, 3))):
                container, key = draw.choice(list(_places(damaged)))
                if isinstance(container, dict) and draw.random() < 0.4:
                    del container[key]
                else:
                    container[key] = draw.choice(
                        [None, -1, 0, "", "x", [], {}, True, float("nan"), 1e308, [[1]], {"a": 1}]
                    )
            path.write_text(json.dumps(damaged))
            try:
                run = read_file(path, path.name)
            except Malformed:
                outcomes.add("left out")
            else:
                outcomes.add("shown")
                assert sections(Results((run, run), (Unread("x", "y"),))) or run.kind in ("load", "compare")
    assert outcomes == {"left out", "shown"}


def test_a_comparison_says_how_each_server_was_started(tmp_path: Path) -> None:
    server = documents.compare()["servers"][0]
    server |= {"command": ["serve", "a b"], "environment": {"N": "2"}, "notes": ["a note"],
               "levels_limited": {"up_to": 8, "reason": "too slow"}, "ready_s": [None, 3.0]}  # fmt: skip
    gone = {"name": "gone", "status": "failed", "reason": "no port", "rounds": [], "errors": {"": 2}}
    write(tmp_path, compare=documents.compare(servers=[server, gone], model={"name": "smol", "sha": "0"}))
    results = read([tmp_path])
    assert results.runs[0].model == "smol"
    assert "gone: 2 x (no message)" in results.runs[0].warnings
    (_, table), *_ = sections(results)[0].tables
    assert table.rows[0][4:] == ("float32", "3.00 s", "serve 'a b'", "N=2", "a note; fewer levels: too slow")
    assert table.rows[1][:3] == ("gone", "failed", "no port")


def test_a_comparison_in_which_nothing_was_measured_is_shown(tmp_path: Path) -> None:
    write(tmp_path, compare=documents.compare(servers=documents.compare()["servers"][2:]))
    (section,) = sections(read([tmp_path]))
    assert (section.figures, section.folded) == ((), ())
    assert [title for title, _ in section.tables] == ["Servers"]
