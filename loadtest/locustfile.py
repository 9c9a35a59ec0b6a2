"""Load tests of any server with OpenAI's API: `uv run locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.

The scenario is chosen in the browser, with --scenario, or by naming its class. README.md says what there is.
"""

from __future__ import annotations

from locust import LoadTestShape

from loadtest.load import hooks
from loadtest.load.users import (
    ConcurrencySweep,
    LongPrefillIntruder,
    MixedLengths,
    MultiTurnAgents,
    Poisson,
    SharedPrefix,
    TraceReplay,
    session_of,
)

__all__ = [
    "ConcurrencySweep",
    "LongPrefillIntruder",
    "MixedLengths",
    "MultiTurnAgents",
    "Poisson",
    "ScenarioShape",
    "SharedPrefix",
    "TraceReplay",
]


class ScenarioShape(LoadTestShape):
    """As many users as the scenario wants: those of the form, or a sweep's level by level."""

    use_common_options = True

    def tick(self) -> tuple[int, float, list[type]] | None:
        """See LoadSession.tick."""
        assert self.runner is not None
        return session_of(self.runner.environment).tick()


hooks.install()
