from __future__ import annotations

from typing import Any

import pytest

from loadtest.bench_engine import cases, parse_args
from loadtest.engine_cases import METRICS, Prompts, mixed_case, render, run_case, uniform_case
from loadtest.prompts import PromptSource


class FakeArms:
    """Two arms that decode at known rates: ours takes 0.5 s a token, the peer 1 s."""

    def __init__(self, **faults: Any) -> None:
        self.calls: list[tuple[str, Prompts]] = []
        self.faults = faults

    def __call__(self, arm: str, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
        self.calls.append((arm, prompts))
        if self.faults.get("fail_at") == len(self.calls):
            raise RuntimeError("ran out of time")
        step = 0.5 if arm == "quire" else 1.0
        count = max_tokens - (self.faults.get("short", 0) if arm == "mlx_lm" else 0)
        reply: dict[str, Any] = {
            "tokens": [[7] * count for _ in prompts],
            "times": [[step * (index + 1) for index in range(count)] for _ in prompts],
        }
        if arm == "quire":
            reply |= {"cached_tokens": self.faults.get("cached", 0), "preemptions": 1, "dispatch": {"path": 2}}
        return reply


def test_arms_take_turns_on_the_same_new_prompts() -> None:
    arms = FakeArms()
    result = run_case(uniform_case(2, 10, 8), 3, PromptSource(range(100)), arms)
    assert [arm for arm, _ in arms.calls] == ["quire", "mlx_lm"] * 4  # the first pair is the warm-up
    rounds = arms.calls[2:]
    assert all(ours[1] == theirs[1] for ours, theirs in zip(rounds[::2], rounds[1::2], strict=True))
    first_tokens = [prompt[0] for _, prompts in arms.calls[:2] + rounds[::2] for prompt in prompts]
    assert len(set(first_tokens)) == len(first_tokens)
    found = result.to_json()
    assert found["tokens_per_second"]["decode"]["quire"]["samples"] == [4.0] * 3
    assert found["tokens_per_second"]["decode"]["ratio_of_medians"] == 2.0
    assert found["tokens_per_second"]["end_to_end"]["ratios_by_round"] == [2.0] * 3
    assert found["greedy_agreement_by_round"] == [{"sequences": 1.0, "tokens": 1.0}] * 3
    assert found["dispatch"] == {"path": 6}
    assert found["preemptions"] == 3
    assert found["failure"] is None


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"short": 1}, "mlx_lm: expected 8 tokens"),
        ({"cached": 5}, "came from a cache"),
        ({"fail_at": 6}, "out of time"),
    ],
)
def test_a_run_that_means_something_else_is_a_failure_and_not_a_sample(faults: dict[str, Any], reason: str) -> None:
    result = run_case(uniform_case(2, 10, 8), 3, PromptSource(range(100)), FakeArms(**faults))
    assert result.failure is not None
    assert reason in result.failure
    found = result.to_json()["tokens_per_second"]["decode"]
    assert found["quire"]["count"] == found["mlx_lm"]["count"] == (1 if "fail_at" in faults else 0)
    assert "FAILED" in render([result])


def test_the_table_has_a_row_for_each_metric_and_says_the_target() -> None:
    result = run_case(uniform_case(16, 10, 8), 1, PromptSource(range(100)), FakeArms())
    table = render([result])
    assert len(table.splitlines()) == 2 + len(METRICS)
    decode = next(line for line in table.splitlines() if "decode" in line)
    assert "2.00x" in decode
    assert "1.3x" in decode
    assert "100%" in decode


def test_the_issues_cases_are_the_defaults() -> None:
    planned = cases(parse_args([]))
    assert [case.num_sequences for case in planned] == [1, 4, 8, 16, 32, 24]
    assert {case.max_tokens for case in planned} == {64}
    assert planned[3].prompt_lengths == (100,) * 16
    assert planned[-1].prompt_lengths[:4] == (10, 200, 1500, 10)
    assert [case.targets for case in planned] == [
        {"decode": 1.0}, {}, {}, {"decode": 1.3}, {"decode": 1.3}, {"end_to_end": 2.0},
    ]  # fmt: skip


def test_the_command_line() -> None:
    args = parse_args(["--quick", "--sequences", "2,3", "--engine", "block_size=32", "--engine", "scheduler=wave"])
    assert [case.num_sequences for case in cases(args)][:2] == [2, 3]
    assert args.rounds == 1
    assert args.engine == [("block_size", 32), ("scheduler", "wave")]
    assert len(cases(parse_args(["--quick", "--mixed-count", "0"]))) == 2
    assert mixed_case(2, [1, 2], 3).prompt_lengths == (1, 2, 1, 2)


@pytest.mark.parametrize(
    "wrong", [["--sequences", "0"], ["--rounds", "x"], ["--engine", "no"], ["--output-tokens", "1"]]
)
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_decode_rate_needs_two_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--output-tokens", "1"])
    assert "two tokens" in capsys.readouterr().err
