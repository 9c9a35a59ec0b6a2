"""Runs an experiment: round by round, each arm on a server of its own, started anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from loadtest.client import Client
from loadtest.experiments.base import Arm, Experiment, Record, Session
from loadtest.prompts import PromptSource
from loadtest.serve_cases import CaseError
from loadtest.serve_process import ServeError, read_config

CONFIGS = Path(__file__).parents[2] / "configs" / "experiments"


class Server(Protocol):
    """A running server, as `ServeProcess` is one."""

    base_url: str

    def model_id(self) -> str:
        """The id that the server serves."""


OpenServer = Callable[[dict[str, Any]], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What of an experiment is run."""

    experiment: Experiment
    arms: Sequence[Arm]
    rounds: int
    configs: dict[str, dict[str, Any]]  # by arm: the whole Serve config

    @classmethod
    def of(cls, experiment: Experiment, *, quick: bool, rounds: int | None, engine: dict[str, Any]) -> Plan:
        """The experiment's own arms and rounds, fewer if quick; `engine` replaces keys in every arm.

        Raises ValueError where `engine` would take away what the arms differ in.
        """
        same = sorted(experiment.differs & engine.keys())
        if same:
            raise ValueError(f"the arms of {experiment.name} differ in {', '.join(same)}, so no value can be given")
        chosen = experiment.quick_arms if quick else None
        arms = [arm for arm in experiment.arms if chosen is None or arm.name in chosen]
        configs = {arm.name: read_config(config_path(arm), engine) for arm in arms}
        return cls(experiment, arms, rounds or (1 if quick else experiment.rounds), configs)

    @property
    def num_runs(self) -> int:
        """Servers that it starts."""
        return len(self.arms) * self.rounds

    def engine(self, arm: str) -> dict[str, Any]:
        """The engine section of an arm's config."""
        section: dict[str, Any] = self.configs[arm]["applications"][0]["args"]["engine"]
        return section

    def described_arms(self, record: Record) -> list[dict[str, Any]]:
        """For the result: each arm's config and engine, and the server's counters that the experiment kept."""
        return [
            {
                "name": arm.name,
                "config": f"configs/experiments/{arm.config}.yaml",
                "engine": self.engine(arm.name),
                "counters": record.counters.get(arm.name, {}),
            }
            for arm in self.arms
        ]


def config_path(arm: Arm) -> Path:
    """The arm's Serve config."""
    return CONFIGS / f"{arm.config}.yaml"


def run(
    plan: Plan,
    open_server: OpenServer,
    ids: Sequence[int],
    *,
    seed: int,
    timeout_s: float,
    progress: Callable[[str], None] = lambda text: None,
    done: Callable[[], None] = lambda: None,
) -> Record:
    """All rounds, arms alternating in each. A run that fails is kept as a failure, and the next one goes on.

    ids: what prompts are made of. timeout_s bounds one arm's load in one round. progress is told what begins, and
    `done` is called after each run.
    """
    record = Record()
    record.notes += plan.experiment.notes
    for round_index in range(plan.rounds):
        for arm in plan.arms:
            what = f"{plan.experiment.name}, round {round_index + 1}, {arm.name}"
            progress(what)
            try:
                with open_server(plan.configs[arm.name]) as server:
                    asyncio.run(_load(plan.experiment, arm, round_index, server, ids, seed, timeout_s, record))
            except TimeoutError:
                record.failures.append(f"{what}: not done after {timeout_s:.0f} s")
            except (CaseError, ServeError, httpx.HTTPError, OSError) as error:
                record.failures.append(f"{what}: {type(error).__name__}: {error}")
            done()
    plan.experiment.conclude(record)
    return record


async def _load(
    experiment: Experiment,
    arm: Arm,
    round_index: int,
    server: Server,
    ids: Sequence[int],
    seed: int,
    timeout_s: float,
    record: Record,
) -> None:
    model = await asyncio.to_thread(server.model_id)
    async with Client(server.base_url, model, timeout_s=timeout_s) as client:
        round_seed = seed + round_index
        prompts = PromptSource(ids, round_seed)
        session = Session(arm.name, round_index, client, prompts, round_seed, server.base_url, model)
        async with asyncio.timeout(timeout_s):
            await experiment.warm_up(session)
            await experiment.measure(session, record)
