"""What the benchmarks that need a GPU in their process begin with."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from loadtest import environment

# Without what tells one machine from another.
_KEPT = ("device_name", "architecture", "total_memory", "memory_size", "max_recommended_working_set_size")


def new_result(benchmark: str) -> dict[str, Any] | None:
    """The head of a result: environment and kind of GPU. None, and a line of why, where MLX's device is no GPU."""
    if not on_gpu():
        print(f"{benchmark} needs a GPU, and MLX's default device is {mx.default_device()}", file=sys.stderr)
        return None
    return {"benchmark": benchmark, "environment": environment.describe(), "device": device_facts()}


def on_gpu() -> bool:
    """Whether MLX's default device is one."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def device_facts() -> dict[str, Any]:
    """The kind of MLX's default device."""
    info = mx.device_info()
    return {key: str(info[key]) for key in _KEPT if key in info}
