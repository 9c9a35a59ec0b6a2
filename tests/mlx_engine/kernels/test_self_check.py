"""Kernels that are wrong on a GPU, or that it can't run, are found at start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_engine.attention import fused
from mlx_engine.attention.kernels import PagedKernels, texts
from mlx_engine.attention.kernels.self_check import check_kernels
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError, KernelError
from mlx_engine.types import LayerKVSpec
from plugins import build
from tests.parity import tiny_models

SPEC = LayerKVSpec(1, 64, 64)


@pytest.mark.parametrize("kv_dtype", [mx.bfloat16, mx.int8], ids=str)
def test_right_kernels_pass(products: str, kv_dtype: mx.Dtype) -> None:
    check_kernels(2, SPEC, 16, mx.bfloat16, kv_dtype)


def larger(original: Callable[..., mx.array], when: Callable[[dict[str, Any]], bool]) -> Callable[..., mx.array]:
    """A kernel whose results are 5 percent too large."""

    def wrong(*args: Any, **options: Any) -> mx.array:
        out = original(*args, **options)
        return out * 1.05 if when(options) else out

    return wrong


@pytest.mark.parametrize(
    ("method", "when", "name"),
    [
        ("decode", lambda options: True, "decode attention is wrong"),
        ("decode", lambda options: options["splits"] > 1, "decode attention in parts is wrong"),
        ("decode", lambda options: options["rotation"] is not None, "decode attention that rotates is wrong"),
        ("prefill", lambda options: True, "attention of prefill chunks is wrong"),
    ],
    ids=["decode", "parts", "rotates", "prefill"],
)
def test_each_kernel_is_checked(
    products: str, monkeypatch: pytest.MonkeyPatch, method: str, when: Callable[[dict[str, Any]], bool], name: str
) -> None:
    monkeypatch.setattr(PagedKernels, method, larger(getattr(PagedKernels, method), when))
    with pytest.raises(KernelError, match=name):
        check_kernels(2, SPEC, 16, mx.bfloat16, mx.bfloat16)


def test_what_goes_wrong_on_four_warps_goes_on_with_one(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "_compute_capability", lambda: 90)
    monkeypatch.setattr(texts, "_FORGONE", set())
    right, used = PagedKernels.prefill, []

    def prefill(self: PagedKernels, *args: Any, **options: Any) -> mx.array:
        used.append(self.prefill_layout.kernel)
        out = right(self, *args, **options)
        return out * 1.05 if used[-1] == "prefill_warpgroup" else out

    monkeypatch.setattr(PagedKernels, "prefill", prefill)
    with caplog.at_level(logging.WARNING):
        check_kernels(2, SPEC, 16, mx.bfloat16, mx.bfloat16)
        check_kernels(2, SPEC, 16, mx.bfloat16, mx.bfloat16)
    assert used == ["prefill_warpgroup", "prefill", "prefill"]
    assert "single warps, slower: attention of prefill chunks is wrong" in caplog.text


def refuses(name: str, shared_memory: int = 0) -> Any:
    raise RuntimeError(f"Failed to compile kernel: {name}.cu(1): error")


def engine(attention_backend: str) -> Engine:
    config = EngineConfig(model="tiny", num_blocks=40, max_model_len=64, attention_backend=attention_backend)
    return build.build_engine_for(config, tiny_models.build(tiny_models.TINY["llama_biases"]))


def test_kernels_that_cant_run_are_not_used_or_say_why(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "check_kernels", check_kernels)
    monkeypatch.setattr(texts, "kernel", refuses)
    monkeypatch.setattr(build, "kernels_run_here", lambda: True)
    with caplog.at_level(logging.WARNING):
        built = engine("auto")
    assert built.info.policies["attention_backend"] == "gather"
    assert "decode attention can't run on this GPU: Failed to compile" in caplog.text
    with pytest.raises(ConfigError, match=r"Failed to compile.*Set it to gather"):
        engine("fused")
