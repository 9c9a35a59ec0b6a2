from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from loadtest.load.options import SCENARIOS, LoadOptions, OptionError, add_arguments, checked
from loadtest.load.traces import SMALL_TRACE


class _Parser(ArgumentParser):
    """Takes the keywords of Locust's parser too."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        for name in ("include_in_web_ui", "is_secret", "env_var"):
            kwargs.pop(name, None)
        return super().add_argument(*args, **kwargs)


def _namespace(**values: Any) -> Namespace:
    parser = _Parser()
    add_arguments(parser)
    return Namespace(**{**vars(parser.parse_args([])), **values})


def test_the_defaults_are_good_for_every_scenario() -> None:
    for scenario in SCENARIOS:
        options = checked(_namespace(scenario=scenario))
        assert options.levels == (1, 2, 4, 8, 16, 32, 64)
        assert options.trace == SMALL_TRACE
        assert options.plan(scenario, 3, 60.0).values


def test_every_default_has_a_type_for_the_browsers_form() -> None:
    # Locust gives a changed field the type of what was there before: None would make it a string.
    assert all(value is not None for value in vars(_namespace()).values())
    assert set(LoadOptions.__slots__) == set(vars(_namespace()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("levels", "1,x"),
        ("levels", ""),
        ("levels", "1,0"),
        ("rates", "nan"),
        ("mixed_inputs", "10,-1"),
        ("input_tokens", 0),
        ("output_tokens", 10**9),
        ("mixed_inputs", "10,1000000000"),
        ("warmup_seconds", math.inf),
        ("api_key", "schlüssel"),
        ("turns", 0),
        ("level_requests_per_user", -1),
        ("level_seconds", 0.0),
        ("level_seconds", math.inf),
        ("trace_speed", 0.0),
        ("max_failure_ratio", 1.5),
        ("scenario", "nothing"),
        ("extra_body", "[1]"),
        ("extra_body", "{"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionError, match="--" + name.replace("_", "-")):
        checked(_namespace(**{name: value}))


def test_a_run_without_levels_is_one_level_after_its_warmup() -> None:
    options = checked(_namespace(warmup_seconds=5.0))
    plan = options.plan("shared_prefix", 7, 60.0)
    assert (plan.values, plan.seconds, plan.warmup_s) == ((7,), 55.0, 5.0)
    assert options.plan("shared_prefix", 7, None).seconds == math.inf
    # Nothing of a trace is dropped, nor of a run that is shorter than its warm-up.
    assert options.plan("trace_replay", 1, None).warmup_s == 0
    assert options.plan("shared_prefix", 7, 4.0).warmup_s == 0


def test_extra_fields_go_into_every_request() -> None:
    assert checked(_namespace(extra_body='{"top_k": 1}')).extra_body == {"top_k": 1}
