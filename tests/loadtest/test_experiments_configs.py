"""The configs of configs/experiments: valid, explained, and different only in what their experiment is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.settings import load_settings
from loadtest.experiments.base import Experiment
from loadtest.experiments.catalog import EXPERIMENTS
from loadtest.experiments.harness import CONFIGS, config_path
from loadtest.experiments.prefix import Prefix
from mlx_engine.types import cdiv
from plugins.kv_managers.contiguous import ContiguousKVManager
from plugins.prefix_caches.none import NoPrefixCache

PATHS = sorted(CONFIGS.glob("*.yaml"))
KINDS = sorted(EXPERIMENTS.values(), key=lambda kind: kind.name)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def _engine(path: Path) -> dict[str, Any]:
    engine: dict[str, Any] = load_settings(_read(path)["applications"][0]["args"]).engine.model_dump()
    return engine


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_config_is_valid_and_every_line_says_what_it_does(path: Path) -> None:
    (application,) = _read(path)["applications"]
    load_settings(application["args"])
    assert f"quire serve configs/experiments/{path.name}" in path.read_text()
    for line in path.read_text().splitlines():
        key = line.split("#")[0].strip()
        has_value = key and not key.endswith(":") and "import_path" not in key
        assert not has_value or "#" in line, f"no comment: {line}"


def test_every_config_is_the_arm_of_one_experiment() -> None:
    used = [config_path(arm) for kind in KINDS for arm in kind.arms]
    assert sorted(used) == PATHS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_arms_differ_in_what_the_experiment_says_and_in_nothing_else(kind: type[Experiment]) -> None:
    configs = [_read(config_path(arm)) for arm in kind.arms]
    engines = [_engine(config_path(arm)) for arm in kind.arms]
    different = {key for key in engines[0] if len({str(engine[key]) for engine in engines}) > 1}
    assert different == kind.differs
    for config in configs:
        del config["applications"][0]["args"]["engine"]
    assert all(config == configs[0] for config in configs)
    names = [arm.name for arm in kind.arms]
    assert len(set(names)) == len(names)
    assert set(kind.quick_arms or ()) <= set(names)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_marks_in_the_files_are_the_differences(kind: type[Experiment]) -> None:
    for arm in kind.arms:
        lines = config_path(arm).read_text().splitlines()
        marked = {line.split(":")[0].strip() for line in lines if "# * " in line}
        assert marked == kind.differs


def test_the_prefix_arms_cache_as_the_expectation_assumes() -> None:
    for arm, block_size in zip(Prefix.arms, Prefix.block_sizes, strict=True):
        engine = _engine(config_path(arm))
        assert (None if engine["prefix_cache"] == "none" else engine["block_size"]) == block_size
        assert engine["num_blocks"] * engine["block_size"] == 16_384


def test_the_contiguous_arm_holds_four_slabs() -> None:
    engine = _engine(CONFIGS / "paging-contiguous.yaml")
    assert engine["num_blocks"] // cdiv(engine["max_model_len"], engine["block_size"]) == 4
    ContiguousKVManager(
        num_blocks=engine["num_blocks"],
        block_size=engine["block_size"],
        prefix_cache=NoPrefixCache(block_size=engine["block_size"]),
        max_model_len=engine["max_model_len"],
    )


def test_the_preemption_arms_are_ever_tighter() -> None:
    blocks = [_engine(config_path(arm))["num_blocks"] for arm in EXPERIMENTS["preemption"].arms]
    assert blocks == sorted(blocks, reverse=True)
