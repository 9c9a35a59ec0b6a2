"""What a deployment is configured by: the `args` of a Serve config, overridden by QUIRE_… environment variables.

`QUIRE_ENGINE__MAX_NUM_SEQS=8` sets `engine.max_num_seqs`. Nothing here reads files or starts anything.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from mlx_engine.config import EngineConfig
from mlx_engine.errors import ConfigError, nearest_name
from mlx_engine.models.embedded import served_name

ENV_PREFIX = "QUIRE_"
_NESTED = "__"
_OTHER_VARIABLES = ("CACHE_DIR",)  # ours too, but no settings

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Resources = dict[str, Annotated[float, Field(gt=0)]]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Section):
    """The HTTP side: one Serve replica that validates, tokenizes and streams. Host and port are Serve's own."""

    cors_origins: list[str] | None = Field(
        None, description="origins that browsers may call from; null is '*' on loopback and none elsewhere"
    )
    max_ongoing_requests: int = Field(
        1024,
        ge=1,
        description="requests a replica takes at once; far above engine.max_num_seqs, or the batch is capped",
    )
    max_open_sequences: int = Field(
        2048, ge=1, description="sequences running and waiting at once; beyond it requests get 429 with Retry-After"
    )
    max_prompts_per_request: int = Field(128, ge=1, description="longest list of prompts in one request")
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="largest request body; beyond it 413")
    num_cpus: float = Field(0.1, ge=0, description="CPUs that Ray reserves for a replica; a scheduling figure only")
    resources: Resources = Field(default_factory=dict, description="custom Ray resources, to choose nodes")
    graceful_shutdown_timeout_s: float = Field(
        5.0, ge=0, description="time for open requests when Serve replaces a replica; Ctrl-C doesn't wait for any"
    )


class EngineActorSettings(_Section):
    """The engine's process: one Ray actor on the replica's node."""

    num_cpus: float = Field(0.1, ge=0, description="CPUs that Ray reserves for the actor; a scheduling figure only")
    num_gpus: float | Literal["auto"] = Field(
        "auto", description="GPUs that Ray reserves; auto is 1 where there are NVIDIA devices, else 0"
    )
    resources: Resources = Field(default_factory=dict, description="custom Ray resources")
    num_threads: int | None = Field(None, ge=1, description="OpenBLAS threads on CPU; the machine's cores if null")


class HealthSettings(_Section):
    """When an engine counts as sick, and what is done about it."""

    check_period_s: float = Field(5.0, gt=0, description="how often Serve asks a replica for its health")
    check_timeout_s: float = Field(10.0, gt=0, description="how long it waits for the answer")
    heartbeat_timeout_s: float = Field(
        15.0, ge=2, description="/health is 503 when the engine's process has been silent for this long"
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="/health is 503 when work is pending and no step has ended for this long"
    )
    restart_after_s: float = Field(
        300.0, gt=0, description="an engine that is silent or stalled for this long is killed and started again"
    )
    max_failed_starts: int = Field(
        5, ge=1, description="starts in a row that may fail before the replica gives up and asks Serve for a new one"
    )


class QuireSettings(BaseSettings):
    """All of it: `args` of the application in a Serve config."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=_NESTED,
        env_parse_none_str="null",
        protected_namespaces=(),
    )

    model_id: Name | None = Field(None, description="the id that clients send as `model`; the model's own name if null")
    model_aliases: list[Name] = Field(default_factory=list, description="other ids for the same model")
    num_replicas: int = Field(1, ge=1, description="replicas, each with an engine of its own")
    max_replicas_per_node: int = Field(1, ge=1, description="1 pins one engine to each Mac's or host's GPU")
    engine: EngineConfig = Field(EngineConfig.model_validate({}), description="the engine, see EngineConfig")
    server: ServerSettings = Field(ServerSettings.model_validate({}), description="the HTTP side")
    engine_actor: EngineActorSettings = Field(
        EngineActorSettings.model_validate({}), description="the engine's process"
    )
    health: HealthSettings = Field(HealthSettings.model_validate({}), description="health checks and restarts")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file, so that one value can be tried without editing it."""
        return env_settings, init_settings

    @property
    def served_ids(self) -> tuple[str, ...]:
        """What clients may send as `model`: the id first, then its aliases."""
        return tuple(dict.fromkeys((self.primary_id, *self.model_aliases)))

    @property
    def primary_id(self) -> str:
        """The id that responses carry."""
        return self.model_id or served_name(self.engine.model)


def load_settings(args: Mapping[str, Any] | None) -> QuireSettings:
    """Validates `args` and the environment together. Raises ConfigError naming every wrong key, dotted."""
    # A section whose lines are all commented out reads as null.
    args = {str(key): value for key, value in (args or {}).items() if value is not None}
    problems = list(_unknown_env_keys())
    try:
        settings = QuireSettings(**args)
    except ValidationError as error:
        problems += [_explain(dict(item)) for item in error.errors(include_url=False, include_input=False)]
    # Sources fail on their own when a variable for a list or a section is not JSON.
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = f"{ENV_PREFIX}{field[1].upper()}" if field else ENV_PREFIX
        problems.append(f"environment variable {name}: lists and sections are written as JSON, for example '[\"a\"]'")
    if problems:
        raise ConfigError("The configuration is wrong. " + "; ".join(problems))
    return settings


def _explain(item: dict[str, Any]) -> str:
    location = tuple(item["loc"])
    dotted = ".".join(str(part) for part in location if not _is_union_branch(part)) or "args"
    if item["type"] == "extra_forbidden":
        return f"{dotted}: unknown key{_suggestion(location)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{dotted}: {message[:1].lower()}{message[1:]}"


def _is_union_branch(part: object) -> bool:
    # pydantic puts the tried type into the path: ('engine_actor', 'num_gpus', 'float').
    return isinstance(part, str) and (part in ("float", "int", "str") or part.startswith("literal["))


def _suggestion(location: tuple[Any, ...]) -> str:
    known = _keys_at(location[:-1])
    near = nearest_name(str(location[-1]), known)
    return f" (did you mean {near!r}?)" if near else f" (known keys: {', '.join(sorted(known))})"


def _keys_at(path: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = QuireSettings
    for part in path:
        field = model.model_fields.get(str(part))
        inner = next(_models_in(field.annotation), None) if field is not None else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _models_in(argument)


def _unknown_env_keys() -> Iterator[str]:
    """Variables of ours that name no key of the first level. pydantic only looks for those that it knows."""
    known = [name.upper() for name in QuireSettings.model_fields]
    nested = [f"{name}{_NESTED}{key}".upper() for name in QuireSettings.model_fields for key in _keys_at((name,))]
    for variable in os.environ:
        name = variable.upper().removeprefix(ENV_PREFIX)
        if not variable.upper().startswith(ENV_PREFIX) or name in _OTHER_VARIABLES:
            continue
        if name.split(_NESTED, 1)[0] not in known:
            near = nearest_name(name, [*known, *nested])
            hint = f" (did you mean {ENV_PREFIX}{near}?)" if near else ""
            yield f"environment variable {variable}: unknown key{hint}"
