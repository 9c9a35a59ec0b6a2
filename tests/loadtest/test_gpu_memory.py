"""What the arms of the GPU comparison may take, and what is said of it."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from loadtest.gpu_memory import arms_gib, gpu_gib, warning
from loadtest.random_llama import random_llama
from loadtest.shapes import SHAPES, llama_config, num_parameters
from loadtest.worker_gpu_mlx_lm import limit_memory


@pytest.mark.parametrize(("shape", "parameters"), [("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248)])
def test_parameters_are_those_of_the_models_of_that_name(shape: str, parameters: int) -> None:
    assert num_parameters(SHAPES[shape]) == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_mlx_lm_makes(tied: bool) -> None:
    shape = SHAPES["tiny"] | {"tie_word_embeddings": tied}
    arrays = tree_flatten(random_llama(llama_config(shape), mx.float32).parameters())
    assert num_parameters(shape) == sum(array.size for _, array in arrays)


def test_what_an_arm_may_take_is_read_off_its_options() -> None:
    weights = 2 * num_parameters(SHAPES["llama-8b"]) / 2**30
    options = {"quire": {"memory_limit_gib": 40}, "vllm": {"kv_cache_memory_bytes": 10 * 2**30}, "mlx-lm": {}}
    found = arms_gib(options, SHAPES["llama-8b"])
    assert found == {"quire": 40.0, "vllm": pytest.approx(10 + weights + 6), "mlx-lm": math.inf}
    assert arms_gib({"vllm": {"kv_cache_memory_bytes": None}}, SHAPES["llama-8b"]) == {"vllm": math.inf}


def test_arms_are_warned_of_where_they_may_take_more_together() -> None:
    assert warning({"quire": 40.0, "vllm": 30.0}, 70.0) is None
    assert "80.0 GiB (quire 40.0, vllm 40.0), and the GPU has 70.0 GiB" in (
        warning({"quire": 40.0, "vllm": 40.0}, 70.0) or ""
    )
    assert "inf GiB" in (warning({"quire": math.inf}, 70.0) or "")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 143771", 143771 / 1024),
        ("echo 143771; echo 81920", 80.0),
        ("echo '[N/A]'", None),
        ("true", None),
        ("echo 143771; exit 9", None),
        (None, None),
    ],
)
def test_the_gpus_memory_is_what_nvidia_smi_says(
    script: str | None, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(
            f'#!/bin/sh\n[ "$1 $2" = "--query-gpu=memory.total --format=csv,noheader,nounits" ] || exit 2\n{script}\n'
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_gib() == expected


def test_mlx_lms_arm_keeps_to_its_limit_and_to_mlxs_own(mlx_limit: int) -> None:
    limit_memory(None)
    assert mx.get_memory_limit() == mlx_limit
    limit_memory(10.0**6)
    assert mx.get_memory_limit() == mlx_limit
    limit_memory(0.5)
    assert mx.get_memory_limit() == 2**29
