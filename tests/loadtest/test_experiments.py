"""The harness, with servers and an experiment that only pretend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from loadtest.experiments import __main__ as command
from loadtest.experiments import harness
from loadtest.experiments.base import Arm, Experiment, Record, Session, require
from loadtest.experiments.catalog import EXPERIMENTS
from loadtest.experiments.harness import Plan
from loadtest.serve_cases import CaseError
from loadtest.serve_process import ServeError
from loadtest.stream import RequestResult

IDS = range(1000)


@dataclass
class FakeServers:
    """Opens servers that nobody listens at, and remembers their order."""

    opened: list[str] = field(default_factory=list)
    num_open: int = 0
    broken: str = ""

    @contextmanager
    def __call__(self, config: dict[str, Any]) -> Iterator[harness.Server]:
        scheduler = config["applications"][0]["args"]["engine"]["scheduler"]
        self.opened.append(scheduler)
        if scheduler == self.broken:
            raise ServeError("no such luck")
        self.num_open += 1
        try:
            yield _FakeServer()
        finally:
            self.num_open -= 1


class _FakeServer:
    base_url = "http://127.0.0.1:9"

    def model_id(self) -> str:
        return "m"


@dataclass(frozen=True)
class FakeExperiment(Experiment):
    holds: bool = True
    fails_in: str = ""

    name: ClassVar[str] = "fake"
    title: ClassVar[str] = "A title"
    question: ClassVar[str] = "Does it?"
    arms: ClassVar[tuple[Arm, ...]] = (Arm("a", "batching-fcfs"), Arm("b", "batching-wave"))
    quick_arms: ClassVar[tuple[str, ...] | None] = ("b",)
    differs: ClassVar[frozenset[str]] = frozenset({"scheduler"})
    notes: ClassVar[tuple[str, ...]] = ("a note",)

    @classmethod
    def quick(cls) -> FakeExperiment:
        return cls()

    async def warm_up(self, session: Session) -> None:
        pass

    async def measure(self, session: Session, record: Record) -> None:
        if session.arm == self.fails_in:
            raise CaseError("it went wrong")
        record.add("speed", "m/s", session.arm, [float(session.round_index)], better="higher", case="x")
        record.outputs.setdefault(session.arm, []).append(str(session.prompts.take(3)))
        record.count(session.arm, "calls", 2)

    def conclude(self, record: Record) -> None:
        record.check("it holds", self.holds, "so they say")


def _run(experiment: Experiment, servers: FakeServers, rounds: int = 2) -> Record:
    plan = Plan.of(experiment, quick=False, rounds=rounds, engine={})
    return harness.run(plan, servers, IDS, seed=0, timeout_s=30)


def test_arms_alternate_round_by_round_each_on_a_server_of_its_own() -> None:
    servers = FakeServers()
    record = _run(FakeExperiment(), servers)
    assert servers.opened == ["fcfs", "wave", "fcfs", "wave"]
    assert servers.num_open == 0
    assert record.samples("speed", "a", "x") == record.samples("speed", "b", "x") == [0, 1]
    assert record.counters == {"a": {"calls": 4}, "b": {"calls": 4}}
    assert record.notes == ["a note"]


def test_the_arms_of_a_round_get_the_same_prompts_and_each_round_others() -> None:
    outputs = _run(FakeExperiment(), FakeServers()).outputs
    assert outputs["a"] == outputs["b"]
    assert outputs["a"][0] != outputs["a"][1]


@pytest.mark.parametrize(
    ("experiment", "servers", "text"),
    [
        (FakeExperiment(fails_in="a"), FakeServers(), "it went wrong"),
        (FakeExperiment(), FakeServers(broken="fcfs"), "luck"),
    ],
)
def test_a_run_that_fails_is_kept_and_the_others_go_on(experiment: Experiment, servers: FakeServers, text: str) -> None:
    record = _run(experiment, servers, rounds=1)
    assert len(record.failures) == 1
    assert "round 1, a" in record.failures[0]
    assert text in record.failures[0]
    assert record.samples("speed", "b", "x") == [0]
    assert record.checks


def test_quick_takes_fewer_arms_and_one_round() -> None:
    plan = Plan.of(FakeExperiment(), quick=True, rounds=None, engine={})
    assert ([arm.name for arm in plan.arms], plan.rounds, plan.num_runs) == (["b"], 1, 1)
    assert Plan.of(FakeExperiment(), quick=False, rounds=None, engine={}).num_runs == 4


def test_an_override_goes_to_every_arm_but_not_where_the_arms_differ() -> None:
    plan = Plan.of(FakeExperiment(), quick=False, rounds=1, engine={"model": "other"})
    assert [plan.engine(arm.name)["model"] for arm in plan.arms] == ["other", "other"]
    with pytest.raises(ValueError, match="differ in scheduler"):
        Plan.of(FakeExperiment(), quick=False, rounds=1, engine={"scheduler": "wave"})


@pytest.mark.parametrize(
    ("experiment", "status"),
    [(FakeExperiment(), 0), (FakeExperiment(holds=False), 1), (FakeExperiment(fails_in="b"), 1)],
)
def test_a_failed_check_or_request_ends_with_1(
    experiment: Experiment, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "open_server", FakeServers())
    monkeypatch.setattr(command, "prompt_ids", lambda model, folder: list(IDS))
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(command, "make_plans", lambda args: [Plan.of(experiment, quick=False, rounds=1, engine={})])
    assert command.main(["batching", "--out", str(tmp_path)]) == status
    result = json.loads((tmp_path / "fake.json").read_text())
    assert (result["benchmark"], result["name"], result["question"]) == ("experiment", "fake", "Does it?")
    assert result["arms"][0]["config"] == "configs/experiments/batching-fcfs.yaml"
    assert result["arms"][0]["engine"]["scheduler"] == "fcfs"
    assert result["arms"][0]["counters"] == {"calls": 2}
    assert result["metrics"][0]["values"]["a"]["samples"] == [0]
    assert {"commit", "machine", "versions"} <= result.keys()
    assert "A title" in capsys.readouterr().out


def test_a_model_that_gives_no_prompts_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_words(model: str, folder: Path) -> list[int]:
        raise ValueError(f"{model} has no words")

    monkeypatch.setattr(command, "prompt_ids", no_words)
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)
    assert command.main(["batching", "--engine", "model=mine"]) == 1
    assert "mine has no words" in capsys.readouterr().err


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["nonsense"], []):
        with pytest.raises(SystemExit) as exit_info:
            command.main(argv)
        assert exit_info.value.code == 2
        message = capsys.readouterr().err
        assert all(name in message for name in [*EXPERIMENTS, "all"])


def test_what_every_server_would_heed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)
    assert command.main(["batching", "--engine", "scheduler=wave"]) == 2
    assert "scheduler" in capsys.readouterr().err
    monkeypatch.setenv("QUIRE_ENGINE__SCHEDULER", "wave")
    assert command.main(["batching"]) == 2
    assert "QUIRE_ENGINE__SCHEDULER" in capsys.readouterr().err


def test_all_is_every_experiment() -> None:
    plans = command.make_plans(command.parse_args(["all", "--quick"]))
    assert [plan.experiment.name for plan in plans] == list(EXPERIMENTS)


def test_a_request_with_too_few_tokens_is_no_measurement() -> None:
    result = RequestResult(0.0, completion_tokens=3)
    require([result])
    require([result], [3])
    with pytest.raises(CaseError, match="3 tokens instead of 4"):
        require([result], [4])
