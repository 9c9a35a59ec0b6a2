"""The comparison of our own ways to run a step, between two ways that need no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench_decode
from loadtest.gpu_profile import summed
from loadtest.report.load import read

SMALL = ["--shape", "tiny", "--dtype", "float32", "--arms", "fused,gather", "--contexts", "20", "--batches", "1,3",
         "--steps", "3", "--rounds", "2", "--requests", "10", "--longest", "40", "--output-tokens", "24"]  # fmt: skip


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {name: {"attention_backend_options": {"decode": decode}}
            for name, decode in (("fused", "gather_sdpa"), ("gather", "auto"))}  # fmt: skip
    monkeypatch.setattr(bench_decode, "ARMS", ways)
    head = {"benchmark": "decode", "environment": bench_decode.environment.describe(), "device": {}}
    monkeypatch.setattr(bench_decode, "new_result", lambda _: dict(head))


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = folder / "decode.json"
    status = bench_decode.main([*SMALL, "--out", str(out), *arguments])
    return status, json.loads(out.read_text())


def test_tokens_are_compared_and_steps_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path)
    assert status == 0
    found = result["tokens"]["fused"]
    assert (found["requests"], found["wrong"]) == (10, 0)
    assert found["same"] + len(found["different"]) == 10
    assert found["counters"]["gather_sdpa"] > 0
    assert found["counters"]["preemptions"] > 0, "there must be some, to be right in them too"
    assert [(case["arm"], case["batch"], len(case["rounds"])) for case in result["cases"]] == [
        ("fused", 1, 2), ("gather", 1, 2), ("fused", 3, 2), ("gather", 3, 2),
    ]  # fmt: skip
    assert all(len(each["gaps_ms"]) == 3 for case in result["cases"] for each in case["rounds"])
    assert read([tmp_path / "decode.json"]).unread == ()
    assert "gather's tokens" in capsys.readouterr().out


def test_other_tokens_are_near_ties_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_decode.answer
    answers = iter((True, False))

    def one_token_off(*arguments: Any) -> list[list[int]]:
        tokens = right(*arguments)
        if next(answers):
            tokens[2][5] = (tokens[2][5] + 1) % 1024
        return tokens

    monkeypatch.setattr(bench_decode, "answer", one_token_off)
    status, result = run(tmp_path, "--tokens-only")
    found = result["tokens"]["fused"]
    assert (status, found["same"], found["wrong"]) == (1, 9, 1)
    (different,) = found["different"]
    assert (different["request"], different["token"]) == (2, 5)
    assert different["gap"] > 20 * different["near_tie"]
    assert result["cases"] == []


def test_what_is_wrong_in_every_arm_is_seen_by_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_decode.answer

    def one_token_off(*arguments: Any) -> list[list[int]]:
        tokens = right(*arguments)
        tokens[4][7] = (tokens[4][7] + 1) % 1024
        return tokens

    monkeypatch.setattr(bench_decode, "answer", one_token_off)
    status, result = run(tmp_path, "--tokens-only")
    assert (status, result["tokens"]["fused"]["same"]) == (1, 10)
    found = result["tokens"]["gather"]
    assert (found["same"], found["wrong"]) == (9, 1)
    assert (found["different"][0]["request"], found["different"][0]["token"]) == (4, 7)


@pytest.mark.parametrize(
    ("us", "rest"),
    [
        (30.0, "the GPU waits"),
        (3e7, "of it at the same time"),  # kernels that overlap take longer than the step, together
    ],
)
def test_the_profile_is_of_one_step_of_the_first_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], us: float, rest: str
) -> None:
    def profiled(run: Callable[[], None], steps: int) -> dict[str, Any]:
        run()
        kernel = "void mlx::core::cu::quire_gemv_0123456789abcdef(float*)"
        return summed([(kernel, us), ("void other", 10.0)] * steps * 2, steps)

    monkeypatch.setattr(bench_decode, "profile_steps", profiled)
    monkeypatch.setattr(bench_decode, "can_profile", lambda: True)
    status, result = run(tmp_path, "--profile", "--requests", "0")
    assert (status, result["tokens"]) == (0, {})
    profile = result["profile"]
    assert (profile["arm"], profile["batch"]) == ("fused", 1)
    assert profile["busy_ms"] == pytest.approx((2 * us + 20) / 1e3)
    assert profile["kernels"] == [
        {"name": "quire_gemv(float*)", "calls": 2.0, "us": 2 * us}, {"name": "other", "calls": 2.0, "us": 20.0},
    ]  # fmt: skip
    assert rest in capsys.readouterr().out


@pytest.mark.usefixtures("full_disk")
def test_tables_are_printed_before_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_decode, "time_steps", lambda *_: ([{"arm": "fused", "context": 20, "batch": 1,
                                                                    "step_ms": 2.5, "rounds": []}], None))  # fmt: skip
    with pytest.raises(OSError, match="no space"):
        run(tmp_path, "--requests", "0")
    assert "2.500" in capsys.readouterr().out


def test_what_is_compared_with_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_decode.parse_args(["--arms", "fused"])
    assert "add it to --arms" in capsys.readouterr().err


def test_no_profile_without_a_profiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_decode, "can_profile", lambda: False)
    with pytest.raises(SystemExit):
        bench_decode.parse_args([*SMALL, "--profile"])
    assert "PyTorch is not installed" in capsys.readouterr().err
