"""Bugs planted in the scheduler and the engine, one at a time: the state machine must find each of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mlx_engine import scheduler
from mlx_engine.drafts import DraftSource
from mlx_engine.engine import Engine
from mlx_engine.errors import IntegrityError
from mlx_engine.interfaces import KVCacheManager
from mlx_engine.scheduler import Scheduler
from mlx_engine.types import CacheKey, RequestOutput
from plugins.kv_managers.paged import PagedKVManager
from tests.mlx_engine.engine_machine import run_engine_machine

FOUND = (AssertionError, IntegrityError, KeyError, IndexError)


def edited(owner: type[Any], method: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A patch that replaces a piece of a method's source, which must be there exactly once."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        function = getattr(owner, method)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{owner.__name__}.{method} has changed: {old!r} isn't in it once"
        namespace: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source.replace(old, new), function.__globals__, namespace)
        monkeypatch.setattr(owner, method, namespace[method])

    return patch


def _salt_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CacheKey", lambda model, adapter, salt: CacheKey(model, adapter, None))


def _late_free_on_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abort forgets the request, but not its blocks."""
    original = Scheduler.abort_request

    def abort_request(self: Scheduler, request_id: str) -> bool:
        free = self._kv.free
        self._kv.free = lambda request_id: None  # type: ignore[method-assign]
        try:
            return original(self, request_id)
        finally:
            self._kv.free = free  # type: ignore[method-assign]

    monkeypatch.setattr(Scheduler, "abort_request", abort_request)


def _table_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager hands out a table with two blocks in the wrong order."""
    original = PagedKVManager.block_table

    def block_table(self: KVCacheManager, request_id: str) -> list[int]:
        table = list(original(self, request_id))  # type: ignore[arg-type]
        return [table[1], table[0], *table[2:]] if len(table) > 2 else table

    monkeypatch.setattr(PagedKVManager, "block_table", block_table)


def _outputs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a finished request comes again."""
    original = Scheduler.update_from_output

    def update_from_output(self: Scheduler, *args: Any) -> list[RequestOutput]:
        outputs = original(self, *args)
        return outputs + [msgspec.structs.replace(o) for o in outputs if o.finish_reason is not None]

    monkeypatch.setattr(Scheduler, "update_from_output", update_from_output)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "starts one token late after a prefix hit": edited(
        Scheduler, "_start", "= match.num_tokens\n    if", "= match.num_tokens + (match.num_tokens > 0)\n    if"
    ),
    "starts at 0 after a prefix hit": edited(
        Scheduler, "_start", "state.num_computed_tokens = match.num_tokens", "state.num_computed_tokens = 0"
    ),
    "caches results of before a preemption": edited(Scheduler, "_cache", "slot.epoch == state.epoch and ", ""),
    "keeps a preempted request in the step": edited(Scheduler, "_preempt", "plan.slots.pop(victim_id, None)", "None"),
    "preempts without freeing": edited(Scheduler, "_preempt", "self._kv.free(victim_id)", "pass"),
    "samples one token early": edited(Scheduler, "_take", "samples=end == total", "samples=end >= total - 1"),
    "caches one block too many": edited(Scheduler, "_cache", "state.token_ids[:end]", "state.token_ids[: end + 1]"),
    "caches the whole prompt after its first chunk": edited(
        Scheduler, "_cache", "state.token_ids[:end]", "state.token_ids"
    ),
    "allocates for one token less": edited(Scheduler, "_take", "(request_id, end)", "(request_id, end - 1)"),
    "forgets to free at the end": edited(Scheduler, "_finish", "self._kv.free(request_id)", "pass"),
    "forgets to free on abort": _late_free_on_abort,
    "forgets the salt": _salt_forgotten,
    "goes one token past the length": edited(
        Scheduler,
        "_end_reason",
        "len(state.token_ids) >= state.max_total_tokens",
        "len(state.token_ids) > state.max_total_tokens",
    ),
    "gives the stop token out": edited(Scheduler, "_append", "new_token_ids[:-1]", "new_token_ids"),
    "ignores ignore_eos": edited(
        Scheduler, "_end_reason", "(token in self._eos and not sampling.ignore_eos)", "token in self._eos"
    ),
    "applies results to finished requests": edited(Scheduler, "update_from_output", "if state.finished:", "if False:"),
    "never wakes a preempted request": edited(
        Scheduler, "_preempt", "self._waiting = {victim_id: victim, **self._waiting}", "pass"
    ),
    "counts a preempted token twice": edited(Scheduler, "_append", "state.num_pending_tokens -= 1", "pass"),
    "launches the next step while one runs": edited(
        Engine,
        "step",
        "result = before.handle.wait() if before is not None else None\n",
        "if after is not None and self._overlap: after.handle.launch()\n"
        "    result = before.handle.wait() if before is not None else None\n",
    ),
    "swaps blocks in a table": _table_not_copied,
    "reports an end twice": _outputs_twice,
}


DRAFT_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "keeps wrong drafts": edited(Scheduler, "_accept", "draft != state.token_ids[-1] or ", ""),
    "goes on after the end within a run": edited(Scheduler, "_accept", " or reason is not None", ""),
    "counts the last token of a run as computed": edited(
        Scheduler, "_accept", "num_computed_tokens += len(tokens)", "num_computed_tokens += len(tokens) + 1"
    ),
    "caches the last token of a run": edited(Scheduler, "_append", "len(new_token_ids) - 1", "len(new_token_ids)"),
    "runs drafts without blocks": edited(
        Scheduler,
        "_add_drafts",
        "if not drafts or not self._kv.allocate_slots(request_id, slot.start + 1 + len(drafts)):",
        "if not drafts:",
    ),
    "runs drafts for nothing": edited(Scheduler, "_add_drafts", "plan.budget -= len(drafts)", "pass"),
    "runs any drafts": edited(DraftSource, "_checked", "if tokens and not", "if False and not"),
    "runs any number of drafts": edited(DraftSource, "_checked", "len(guess) > wanted", "False"),
    "schedules before drafts are known": edited(Engine, "step", "before.step.has_drafts", "False"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_state_machine_finds_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(FOUND):
        run_engine_machine(max_examples=300, shrink=False)


@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_the_state_machine_finds_it_in_drafts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DRAFT_FAULTS[fault](monkeypatch)
    with pytest.raises(FOUND):
        run_engine_machine(max_examples=400, drafters=("oracle", "malicious"), shrink=False)


def test_patches_leave_a_working_engine_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine fails because of the faults, not because a method was replaced."""
    edited(Scheduler, "_cache", "state = slot.state", "state = slot.state")(monkeypatch)
    run_engine_machine(max_examples=20, shrink=False)
