"""What a load test can be told: Locust's custom arguments, on the command line and as fields in its browser UI."""

from __future__ import annotations

import json
import math
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.load.sweep import REQUESTS_PER_SECOND, USERS, LevelPlan
from loadtest.load.traces import MAX_LENGTH, SMALL_TRACE

SCENARIOS = (
    "concurrency_sweep",
    "shared_prefix",
    "mixed_lengths",
    "long_prefill_intruder",
    "multi_turn_agents",
    "poisson",
    "trace_replay",
)
SWEEPS = frozenset({"concurrency_sweep", "poisson"})  # those that go through levels of their own


class OptionError(ValueError):
    """An option's value can't be used; the message names it and says what would do."""


def add_arguments(parser: Any) -> None:
    """Adds all options to Locust's parser. Every default has its type, which is how the browser's fields get theirs."""
    add = parser.add_argument  # not of a group: only the parser's own know which belong in the browser
    add("--scenario", choices=SCENARIOS, default=SCENARIOS[0], help="what the users do")
    add("--model", default="", help="the model's id; the first that the server lists if empty")
    add("--api-key", default="", is_secret=True, env_var="QUIRE_LOAD_API_KEY", help="sent as a bearer token")
    add("--label", default="", help="a name for this server in results")
    add("--api", choices=("completions", "chat"), default="completions", help="the endpoint for plain prompts")
    add("--input-tokens", type=int, default=100, help="tokens of a prompt, or of what follows a prefix")
    add("--output-tokens", type=int, default=64, help="tokens of an answer")
    add(
        "--ignore-eos", action=BooleanOptionalAction, default=True, help="ask for full-length answers (not all servers)"
    )
    add("--levels", default="1,2,4,8,16,32,64", help="concurrency_sweep: users at each level")
    add("--rates", default="0.5,1,2,4", help="poisson: arrivals per second at each level")
    add("--level-requests-per-user", type=int, default=2,
        help="concurrency_sweep: measured requests of a user and level, after one more; 0: use seconds")  # fmt: skip
    add("--level-seconds", type=float, default=30.0, help="measured seconds of a level")
    add("--warmup-seconds", type=float, default=5.0, help="seconds before them that are dropped")
    add("--level-timeout", type=float, default=600.0, help="a level that takes longer ends the sweep, in seconds")
    add("--prefix-tokens", type=int, default=512, help="shared_prefix, multi_turn_agents: the system prompt")
    add("--num-prefixes", type=int, default=4, help="shared_prefix: different system prompts")
    add("--mixed-inputs", default="10,200,1000", help="mixed_lengths: prompt tokens")
    add("--mixed-outputs", default="16,64", help="mixed_lengths: answer tokens")
    add("--intruder-tokens", type=int, default=4000, help="long_prefill_intruder: tokens of the long prompt")
    add("--intruder-every", type=float, default=15.0, help="long_prefill_intruder: seconds between long prompts")
    add("--turns", type=int, default=6, help="multi_turn_agents: requests of a conversation")
    add("--tool-tokens", type=int, default=100, help="multi_turn_agents: tokens of a tool's result")
    add("--tool-role", choices=("tool", "user"), default="tool",
        help="multi_turn_agents: the role of results; user where a chat template knows no tools")  # fmt: skip
    add("--trace", default=str(SMALL_TRACE.name), help="trace_replay: a JSONL file in Mooncake's format")
    add("--trace-speed", type=float, default=1.0, help="trace_replay: 2 replays twice as fast")
    add("--trace-scale", type=float, default=1.0, help="trace_replay: factor for all lengths")
    add("--seed", type=int, default=0, help="of all prompts; another seed, other prompts")
    add("--extra-body", default="", help="JSON object that goes into every request as it is")
    add("--request-timeout", type=float, default=600.0, help="seconds after which a request has failed")
    add("--max-failure-ratio", type=float, default=0.0, help="largest share of failures with which the exit code is 0")
    add("--result", default="", help="a JSON file for raw samples and figures", include_in_web_ui=False)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Checked options. Lengths are tokens, times seconds."""

    scenario: str
    model: str
    api_key: str
    label: str
    api: str
    input_tokens: int
    output_tokens: int
    ignore_eos: bool
    levels: tuple[float, ...]
    rates: tuple[float, ...]
    level_requests_per_user: int
    level_seconds: float
    warmup_seconds: float
    level_timeout: float
    prefix_tokens: int
    num_prefixes: int
    mixed_inputs: tuple[int, ...]
    mixed_outputs: tuple[int, ...]
    intruder_tokens: int
    intruder_every: float
    turns: int
    tool_tokens: int
    tool_role: str
    trace: Path
    trace_speed: float
    trace_scale: float
    seed: int
    extra_body: dict[str, Any]
    request_timeout: float
    max_failure_ratio: float
    result: str

    def plan(self, scenario: str, num_users: int, run_time: float | None) -> LevelPlan:
        """The levels of a scenario; one level for as long as the run takes, where it isn't a sweep."""
        if scenario == "concurrency_sweep":
            return LevelPlan(self.levels, USERS, self.level_requests_per_user, self.level_seconds,
                             self.warmup_seconds, self.level_timeout)  # fmt: skip
        if scenario == "poisson":
            return LevelPlan(self.rates, REQUESTS_PER_SECOND, 0, self.level_seconds, self.warmup_seconds, math.inf)
        warmup = 0.0 if scenario == "trace_replay" else self.warmup_seconds
        # A run that is shorter than its warm-up has nothing else to show.
        warmup = 0.0 if run_time is not None and run_time <= warmup else warmup
        seconds = math.inf if run_time is None else run_time - warmup
        return LevelPlan((num_users,), USERS, 0, seconds, warmup, math.inf)


def checked(namespace: Namespace) -> LoadOptions:
    """The options of a command line or of the browser's form. Raises OptionError."""
    values = {name: getattr(namespace, name) for name in LoadOptions.__slots__}
    for name in ("input_tokens", "output_tokens", "prefix_tokens", "num_prefixes", "intruder_tokens", "turns",
                 "tool_tokens"):  # fmt: skip
        _require(name, values[name], 1 <= values[name] <= MAX_LENGTH, f"from 1 to {MAX_LENGTH}")
    for name in ("level_requests_per_user", "warmup_seconds"):
        _require(name, values[name], 0 <= values[name] < math.inf, "at least 0")
    key = values["api_key"]
    _require("api_key", "what was given", key.isascii() and (key.isprintable() or not key), "printable ASCII")
    for name in ("level_seconds", "level_timeout", "intruder_every", "trace_speed", "trace_scale", "request_timeout"):
        _require(name, values[name], 0 < values[name] < math.inf, "above 0")
    _require("max_failure_ratio", values["max_failure_ratio"], 0 <= values["max_failure_ratio"] <= 1, "from 0 to 1")
    _require("scenario", values["scenario"], values["scenario"] in SCENARIOS, f"one of {', '.join(SCENARIOS)}")
    for name in ("levels", "mixed_inputs", "mixed_outputs"):
        values[name] = _numbers(name, values[name], int)
    values["rates"] = _numbers("rates", values["rates"], float)
    values["extra_body"] = _object(values["extra_body"])
    for name in ("mixed_inputs", "mixed_outputs"):
        _require(name, values[name], max(values[name]) <= MAX_LENGTH, f"at most {MAX_LENGTH}")
    users = getattr(namespace, "num_users", None)
    _require("users", users, users is None or users >= 1, "at least 1")
    trace = Path(values["trace"])
    values["trace"] = SMALL_TRACE if str(trace) == SMALL_TRACE.name and not trace.is_file() else trace
    result = Path(values["result"])
    _require("result", str(result), not values["result"] or not result.is_dir(), "a file, not a folder")
    return LoadOptions(**values)


def _numbers(name: str, text: str, kind: Callable[[str], float]) -> tuple[Any, ...]:
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    _require(name, text, bool(numbers) and all(0 < number < math.inf for number in numbers),
             "numbers above 0 with commas between them, such as 1,2,4")  # fmt: skip
    return numbers


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    _require("extra_body", text, isinstance(found, dict), 'a JSON object such as {"top_k": 1}')
    assert isinstance(found, dict)
    return found


def _require(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise OptionError(f"--{name.replace('_', '-')} must be {wanted}, not {value!r}")
