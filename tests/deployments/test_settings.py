"""The configuration: every wrong key is named with its path and the nearest right one; the environment wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.settings import QuireSettings, load_settings
from mlx_engine.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_nothing_configured_is_the_embedded_model() -> None:
    settings = load_settings(None)
    assert settings.served_ids == ("SmolLM2-135M-Instruct",)
    assert settings.engine.model == "embedded"
    assert settings.engine_actor.num_gpus == "auto"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"engine": {"max_num_seq": 3}}, ["engine.max_num_seq: unknown key", "'max_num_seqs'"]),
        ({"enginee": {}}, ["enginee: unknown key", "'engine'"]),
        ({"server": {"cors": ["*"]}}, ["server.cors: unknown key", "'cors_origins'"]),
        ({"engine_actor": {"gpus": 1}}, ["engine_actor.gpus: unknown key", "'num_gpus'"]),
        ({"health": {"zzzz": 1}}, ["health.zzzz: unknown key", "known keys: check_period_s"]),
        ({"num_replicas": "two"}, ["num_replicas: ", "integer"]),
        ({"engine": {"block_size": 0}}, ["engine.block_size: ", "greater than or equal to 1"]),
        ({"engine": {"dtype": "int4"}}, ["engine.dtype: "]),
        ({"engine": {"max_num_seqs": 600}}, ["engine: ", "max_num_batched_tokens (512)"]),
        ({"engine": 5}, ["engine: "]),
        ({"model_aliases": "smollm2"}, ["model_aliases: "]),
        ({"engine_actor": {"num_gpus": "all"}}, ["engine_actor.num_gpus: "]),
        ({"a": 1, "b": 2}, ["a: unknown key", "b: unknown key"]),
    ],
)
def test_what_is_wrong_is_named(args: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(args)
    for part in expected:
        assert part in str(caught.value)


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE__MAX_NUM_SEQS", "9")
    monkeypatch.setenv("QUIRE_MODEL_ID", "mine")
    monkeypatch.setenv("QUIRE_ENGINE__SCHEDULER_OPTIONS", '{"chunk": 4}')
    settings = load_settings({"model_id": "file", "engine": {"max_num_seqs": 5, "block_size": 8}})
    assert settings.engine.max_num_seqs == 9
    assert settings.engine.block_size == 8, "what the environment doesn't name stays"
    assert settings.engine.scheduler_options == {"chunk": 4}
    assert settings.primary_id == "mine"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("QUIRE_ENGINE__MAX_NUM_SEQ", "9", "engine.max_num_seq: unknown key (did you mean 'max_num_seqs'?)"),
        ("QUIRE_ENGIN__MODEL", "x", "QUIRE_ENGIN__MODEL: unknown key (did you mean QUIRE_ENGINE__MODEL?)"),
        ("QUIRE_ENGINE_MAX_NUM_SEQS", "1", "unknown key (did you mean QUIRE_ENGINE__MAX_NUM_SEQS?)"),
        ("QUIRE_MODEL_ALIAS", "x", "unknown key (did you mean QUIRE_MODEL_ALIASES?)"),
        ("QUIRE_MODEL_ALIASES", "no json", "QUIRE_MODEL_ALIASES: lists and sections are written as JSON"),
        ("QUIRE_NUM_REPLICAS", "two", "num_replicas: "),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings({})
    assert expected in str(caught.value)


def test_a_variable_can_say_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE__NUM_BLOCKS", "null")
    monkeypatch.setenv("QUIRE_ENGINE__CHUNK_HALVING_CONTEXT", "null")
    engine = load_settings({"engine": {"num_blocks": 1024}}).engine
    assert (engine.num_blocks, engine.chunk_halving_context) == (None, None)


def test_other_quire_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", "/somewhere")
    load_settings({})


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/Model-4bit", "Model-4bit"), ("/models/x.gguf", "x"), ("folder/", "folder"), ("embedded", None)],
)
def test_a_model_is_served_under_its_own_name_unless_told_otherwise(model: str, name: str | None) -> None:
    settings = load_settings({"engine": {"model": model}, "model_aliases": ["a", "a"]})
    assert settings.served_ids == (name or "SmolLM2-135M-Instruct", "a")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_valid_and_every_line_says_what_it_does(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    for app in content["applications"]:
        load_settings(app["args"])
    for line in path.read_text().splitlines():
        key = line.split("#")[0].strip()
        has_value = key and not key.endswith(":") and "import_path" not in key
        assert not has_value or "#" in line or key.startswith("model: mlx"), f"{path.name}: no comment: {line}"


def test_the_local_config_serves_the_embedded_model_under_both_names() -> None:
    args = yaml.safe_load((CONFIGS / "local.yaml").read_text())["applications"][0]["args"]
    assert load_settings(args).served_ids == ("SmolLM2-135M-Instruct", "smollm2")


def test_every_key_has_a_description() -> None:
    sections: list[Any] = [QuireSettings]
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                sections.append(field.annotation)
