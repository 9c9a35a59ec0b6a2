"""An arm of the GPU comparison that needs no engine. Its options say what goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from loadtest.stepping import StepLoop
from loadtest.worker_protocol import Handler, claim_stdout, serve


class FakeStepper:
    """Admits one request a step, and gives each admitted one a token, or leaves all but the first out of some steps.

    From step drafts_from on a step gives three tokens at once.
    """

    def __init__(
        self,
        *,
        partial_every: int = 0,
        fail_at: int = 0,
        exit_at: int = 0,
        sleep_at: int = 0,
        drafts_from: int = 0,
    ) -> None:
        self.steps = 0
        self.prompts: list[list[int]] = []
        self.longest = 0  # tokens that a request has got
        self.settled = 0
        self._partial_every = partial_every
        self._fail_at = fail_at
        self._exit_at = exit_at
        self._sleep_at = sleep_at
        self._drafts_from = drafts_from
        self._waiting: list[tuple[str, int]] = []
        self._running: dict[str, list[int]] = {}  # tokens so far, and at most

    def add(self, request_id: str, prompt: list[int], max_tokens: int, temperature: float) -> None:
        self.prompts.append(prompt)
        self._waiting.append((request_id, max_tokens))

    def step(self) -> list[tuple[str, int]]:
        self.steps += 1
        if self.steps == self._fail_at:
            raise RuntimeError("out of memory")
        if self.steps == self._exit_at:
            os._exit(3)
        if self.steps == self._sleep_at:
            time.sleep(600)
        if self._waiting:
            request_id, max_tokens = self._waiting.pop(0)
            self._running[request_id] = [0, max_tokens]
        served = list(self._running)
        if self._partial_every and self.steps % self._partial_every == 0:
            served = served[:1]
        found = []
        for request_id in served:
            tokens = self._running[request_id]
            count = min(3 if self._drafts_from and self.steps >= self._drafts_from else 1, tokens[1] - tokens[0])
            found.append((request_id, count))
            tokens[0] += count
            self.longest = max(self.longest, tokens[0])
            if tokens[0] == tokens[1]:
                del self._running[request_id]
        return found

    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] not in request_ids]
        self._running = {key: value for key, value in self._running.items() if key not in request_ids}

    def settle(self) -> None:
        self.settled += 1

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps, "never": 0}


def main() -> None:
    """Serves until standard input ends."""
    channel = claim_stdout()
    handlers: dict[str, Handler] = {}

    def build(model: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
        if engine.get("broken"):
            raise RuntimeError("no such library")
        faults = {name: engine[name] for name in ("fail_at", "exit_at", "sleep_at") if name in engine}
        handlers.update(StepLoop(FakeStepper(**faults), model["vocab_size"]).handlers())
        path = os.environ.get("PYTHONPATH", "")
        return {
            "options": engine, "chosen": {"path": path}, "device": {"device_name": "fake"},
            "on_gpu": not engine.get("on_cpu", False), "versions": {"fake": "1.0"},
        }  # fmt: skip

    handlers["build"] = build
    serve(handlers, channel)


if __name__ == "__main__":
    main()
