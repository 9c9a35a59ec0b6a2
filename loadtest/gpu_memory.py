"""How much of one GPU's memory each arm of the comparison may take, and whether that is there."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from typing import Any

from loadtest.shapes import num_parameters

# Beside weights and K/V: of an engine on MLX recordings of steps, activations of those under way, and freed memory that
# it keeps; mlx-lm's K/V are copied as they grow.
_MLX_BESIDE_BYTES = 16 << 30
# What vLLM takes so, for activations and CUDA graphs; nothing bounds it.
_VLLM_BESIDE_BYTES = 6 << 30


def mlx_limit_gib(shape: Mapping[str, Any], kv_bytes: int) -> float:
    """What an arm on MLX may hold, in GiB: 16-bit weights of the shape, its K/V, and room beside."""
    return (_weights_bytes(shape) + kv_bytes + _MLX_BESIDE_BYTES) / 2**30


def arms_gib(options: Mapping[str, Mapping[str, Any]], shape: Mapping[str, Any]) -> dict[str, float]:
    """What each arm may take, in GiB, by the options that it is built with; infinite where they don't bound it."""
    beside = (_weights_bytes(shape) + _VLLM_BESIDE_BYTES) / 2**30
    return {
        name: beside + _number(chosen, "kv_cache_memory_bytes") / 2**30
        if name == "vllm"
        else _number(chosen, "memory_limit_gib")
        for name, chosen in options.items()
    }


def warning(arms: Mapping[str, float], total_gib: float) -> str | None:
    """What to say of arms that may take more than the GPU has, both in GiB; None where they can't."""
    wanted = sum(arms.values())
    if wanted <= total_gib:
        return None
    each = ", ".join(f"{name} {gib:.1f}" for name, gib in arms.items())
    return (
        f"WARNING: together the arms may take {wanted:.1f} GiB ({each}), and the GPU has {total_gib:.1f} GiB: one may "
        "run out of memory. Drop an arm (--arms), or lower --kv-gib"
    )


def gpu_gib() -> float | None:
    """Memory of this machine's smallest GPU in GiB, as nvidia-smi has it; None where that can't say."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(float(line) for line in reply.splitlines()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _number(options: Mapping[str, Any], name: str) -> float:
    value = options.get(name)
    return float(value) if isinstance(value, int | float) else math.inf


def _weights_bytes(shape: Mapping[str, Any]) -> int:
    return 2 * num_parameters(shape)
