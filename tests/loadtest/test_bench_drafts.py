from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench_drafts
from loadtest.bench_drafts import KINDS, Case, parse_args, question, render
from loadtest.throughput import BatchRun


def replies(accepted: int, same: bool = True) -> dict[str, dict[str, Any]]:
    """Two sequences of four tokens: one a second, or in the first second and in the second one."""
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    plain = {"tokens": tokens, "times": [[1.0, 2.0, 3.0, 4.0]] * 2, "steps": 4, "draft_tokens": 0}
    drafts = {
        "tokens": tokens if same else [[1, 2, 9, 9], [5, 6, 7, 8]],
        "times": [[1.0, 2.0, 2.0, 2.0]] * 2,
        "steps": 2,
        "draft_tokens": 6,
        "accepted_draft_tokens": accepted,
    }
    return {"plain": plain, "drafts": drafts}


def add(case: Case, found: dict[str, dict[str, Any]]) -> None:
    case.add({arm: BatchRun.from_reply([[1], [2]], reply) for arm, reply in found.items()}, found)


def test_rates_ratios_and_acceptance_are_of_all_rounds() -> None:
    case = Case("repeats", 2)
    add(case, replies(4))
    add(case, replies(5, same=False))
    found = case.to_json()
    decode = found["tokens_per_second"]["decode"]
    assert decode["plain"]["samples"] == [2.0, 2.0]
    assert decode["drafts"]["samples"] == [6.0, 6.0]
    assert decode["ratio_of_medians"] == 3.0
    assert decode["ratios_by_round"] == [3.0, 3.0]
    assert found["tokens_per_second"]["end_to_end"]["ratio_of_medians"] == 2.0
    assert found["acceptance"] == 9 / 12
    assert found["steps"] == {"plain": [4, 4], "drafts": [2, 2]}
    row = render([case]).splitlines()[-1]
    assert "3.00x" in row
    assert "75%" in row
    assert "50%" in row, "the least agreement of a round"


def test_without_drafts_there_is_no_acceptance() -> None:
    case = Case("free", 1)
    assert case.to_json()["acceptance"] is None
    assert "free x 1" in render([case])


@pytest.mark.parametrize("kind", KINDS)
def test_questions_vary_and_only_one_kind_brings_its_answer(kind: str) -> None:
    rng = random.Random(1)
    found = {question(kind, rng) for _ in range(20)}
    assert len(found) > 15
    assert all((len(text) > 300) == (kind == "repeats") for text in found)


def test_quick_fills_only_what_is_not_given() -> None:
    args = parse_args(["--quick", "--rounds", "7"])
    assert (args.rounds, args.sequences, args.output_tokens) == (7, [1, 2], 24)
    with pytest.raises(SystemExit):
        parse_args(["--output-tokens", "1"])


@pytest.mark.usefixtures("full_disk")
def test_the_table_is_printed_before_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Built:
        def __init__(self, *_: Any) -> None: ...

        def call(self, *_: Any, **params: Any) -> dict[str, Any]:
            return {"blas": {"active": True, "library": None, "num_threads": 1}, "folder": "f"}

        def close(self) -> None: ...

    case = Case("repeats", 2)
    add(case, replies(4))
    monkeypatch.setattr(bench_drafts, "Worker", Built)
    monkeypatch.setattr(bench_drafts, "measure", lambda args, workers: [case])
    monkeypatch.setattr(bench_drafts, "exit_on_sigterm", lambda: None)
    with pytest.raises(OSError, match="no space"):
        bench_drafts.main(["--quick", "--out", str(tmp_path / "drafts.json")])
    assert "repeats x 2" in capsys.readouterr().out
