from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.gpu_cases import SKIP, Case, CaseResult, Settings, arrivals, plan, render, run_case
from loadtest.stepping import StepLoop
from tests.loadtest.fake_gpu_worker import FakeStepper


class Arms:
    """Arms whose every round takes the same time: ours 2 ms a step, the peer 3."""

    def __init__(self, fail: tuple[str, str, int] | None = None) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self._fail = fail  # arm, method, at which call of it

    def __call__(self, arm: str, method: str, params: dict[str, Any]) -> Any:
        self.calls.append((arm, method, params))
        same = [call for call in self.calls if call[:2] == (arm, method)]
        if self._fail == (arm, method, len(same)):
            raise RuntimeError(f"{arm} broke")
        factor = {"quire": 2.0, "peer": 3.0}[arm] + 0.5 * (len(same) - 1)
        replies: dict[str, Any] = {
            "decode_begin": {"prefill_tokens_per_s": 1.0},
            "decode_round": {"step_ms": factor, "gaps_ms": [factor], "counters": {"fused": 1}},
            "prefill": {"seconds": 1.0, "tokens_per_s": 600 / factor, "counters": {}},
            "arrivals": {"output_tokens_per_s": 60 / factor, "ttft_s": [factor, 2 * factor], "itl_s": [0.001] * 5,
                         "unfinished": 0},
            "end": None,
        }  # fmt: skip
        return replies[method]


def never() -> bool:
    return False


def test_arms_take_turns_in_every_round_and_rest_at_the_end() -> None:
    arms = Arms()
    result = run_case(Case("decode", 512, 8), ["quire", "peer"], arms, Settings(rounds=3), never)
    assert [(arm, method) for arm, method, _ in arms.calls] == [
        *[("quire", "decode_begin"), ("peer", "decode_begin")],
        *[("quire", "decode_round"), ("peer", "decode_round")] * 3,
        *[("quire", "end"), ("peer", "end")],
    ]
    assert arms.calls[0][2] == arms.calls[1][2], "both get the same prompts"
    assert result.figures("quire", "step_ms") == [2.0, 2.5, 3.0]
    assert result.ratio_of_medians("peer") == 3.5 / 2.5
    assert result.ratios("peer") == [3 / 2, 3.5 / 2.5, 4 / 3]
    found = result.to_json()
    assert found["arms"]["quire"]["rounds"][0]["counters"] == {"fused": 1}
    assert found["arms"]["quire"]["begun"] == {"prefill_tokens_per_s": 1.0}
    assert found["arms"]["peer"]["quire_times_as_fast"] == 3.5 / 2.5


def test_prefill_and_mixed_have_a_turn_that_is_not_counted_and_new_prompts_in_each() -> None:
    arms = Arms()
    result = run_case(Case("prefill", 512, 8), ["quire", "peer"], arms, Settings(rounds=2), never)
    assert result.figures("quire", "tokens_per_s") == [600 / 2.5, 600 / 3.0]
    assert result.ratios("peer") == pytest.approx([3.5 / 2.5, 4 / 3.0]), "more tokens/s are faster"
    seeds = [params["seed"] for arm, _, params in arms.calls if "seed" in params and arm == "quire"]
    assert len(set(seeds)) == 3

    arms = Arms()
    case = Case("mixed", rate=50.0, temperature=0.8)
    result = run_case(case, ["quire", "peer"], arms, Settings(mixed_rounds=1, duration_s=2), never)
    (warm_up, _), (ours, theirs) = ([p for _, m, p in arms.calls if m == "arrivals"][i : i + 2] for i in (0, 2))
    assert ours == theirs
    assert all(arrival == 0.0 for arrival, _, _ in warm_up["requests"])
    assert len(warm_up["requests"]) == 16
    assert ours["temperature"] == 0.8
    (reply,) = result.rounds["quire"]
    assert reply["ttft_s"]["samples"] == [2.5, 5.0]
    assert "samples" not in reply["itl_s"]
    assert result.figures("quire", "ttft_s.median") == [3.75]


@pytest.mark.parametrize(("method", "at", "rounds"), [("decode_begin", 1, 0), ("decode_round", 2, 1), ("end", 1, 3)])
def test_an_arm_that_fails_is_left_out_and_the_other_goes_on(method: str, at: int, rounds: int) -> None:
    arms = Arms(fail=("peer", method, at))
    result = run_case(Case("decode", 512, 8), ["quire", "peer"], arms, Settings(rounds=3), never)
    assert result.failures == {"peer": "peer broke"}
    assert len(result.rounds["quire"]) == 3
    assert len(result.rounds.get("peer", [])) == rounds
    assert ("peer", "end") in [(arm, name) for arm, name, _ in arms.calls], "what it began must be ended"
    assert result.to_json()["arms"]["peer"]["failure"] == "peer broke"
    assert len(result.ratios("peer")) == rounds


def test_a_case_is_cut_between_rounds_so_that_all_arms_have_the_same() -> None:
    asked = iter([False, True])
    result = run_case(Case("decode", 512, 8), ["quire", "peer"], Arms(), Settings(rounds=5), lambda: next(asked))
    assert result.cut_short
    assert {arm: len(found) for arm, found in result.rounds.items()} == {"quire": 2, "peer": 2}


@given(st.integers(1, 12), st.integers(1, 300), st.integers(1, 3), st.integers(1, 20))
def test_no_sequence_ends_before_the_rounds_do(batch: int, context: int, rounds: int, steps: int) -> None:
    """The fake admits one prompt a step: what our engine does where a prompt fills the token budget."""
    settings = Settings(rounds=rounds, steps=steps, max_num_batched_tokens=context)
    case = Case("decode", context, batch)
    stepper = FakeStepper()
    loop = StepLoop(stepper, 1000)
    for turn in range(-1, rounds):
        method, params = case.turn(turn, settings)
        loop.handlers()[method](**params)
    assert context + stepper.longest < case.sequence_tokens(settings)
    assert stepper.longest >= rounds * (steps + SKIP)
    assert case.pool_tokens(settings, 256) >= batch * case.sequence_tokens(settings)


def test_arrivals_are_seeded_poisson_with_lengths_in_bounds() -> None:
    settings = Settings(duration_s=200, prompt_tokens=(32, 4096), output_tokens=(16, 512))
    found = arrivals(8.0, settings, 1)
    assert found == arrivals(8.0, settings, 1)
    assert found != arrivals(8.0, settings, 2)
    moments = [moment for moment, _, _ in found]
    assert moments == sorted(moments)
    assert moments[-1] < 200
    assert abs(len(found) - 1600) < 5 * math.sqrt(1600)
    assert {True} == {32 <= prompt <= 4096 and 16 <= output <= 512 for _, prompt, output in found}
    # Log-uniform: as many below the geometric middle as above.
    below = sum(prompt < math.sqrt(32 * 4096) for _, prompt, _ in found)
    assert abs(below - len(found) / 2) < 5 * math.sqrt(len(found)) / 2
    assert len(arrivals(0.001, Settings(duration_s=0.01), 0)) == 1


def test_the_plan_keeps_the_order_of_kinds_contexts_and_rates() -> None:
    cases = plan(["mixed", "decode"], {512: [1, 8], 16: [2]}, {99: [1]}, [8.0, 24.0], [0.0, 0.8])
    assert [case.name for case in cases] == [
        "mixed 8/s, temperature 0", "mixed 24/s, temperature 0", "mixed 8/s, temperature 0.8",
        "mixed 24/s, temperature 0.8", "decode 1 x 512", "decode 8 x 512", "decode 2 x 16",
    ]  # fmt: skip


def test_tables_have_a_row_for_each_case_and_dashes_where_nothing_was_measured() -> None:
    arms = ["quire", "peer"]
    results = [run_case(Case("decode", 4096, 8), arms, Arms(), Settings(rounds=1), never),
               run_case(Case("decode", 512, 1), arms, Arms(("peer", "decode_begin", 1)), Settings(rounds=1), never),
               run_case(Case("mixed", rate=8.0), ["quire"], Arms(), Settings(), never)]  # fmt: skip
    table = render(results, arms)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    assert ["4,096", "8", "2.00", "3.00", "1.50x", "1.50 to 1.50"] in rows
    assert ["512", "1", "2.00", "-", "-", "-"] in rows
    assert ["8/s", "0", "quire", "24", "3,750.0", "4,975.0", "1.0", "1.0", "0"] in rows
    assert len([row for row in rows if row[0] == "8/s"]) == 1
    assert "Prefill" not in table


def test_nothing_produced_is_no_ratio() -> None:
    result = CaseResult(Case("prefill", 1, 1), {"quire": [{"tokens_per_s": 5.0}], "peer": [{"tokens_per_s": 0.0}]})
    assert result.ratio_of_medians("peer") is None
    assert result.ratios("peer") == []
