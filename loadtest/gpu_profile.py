"""Which kernels a GPU's time goes to, as PyTorch's profiler sees them: any in the process, MLX's and ours."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

_SHOWN = 100  # characters of a kernel's name


def can_profile() -> bool:
    """Whether PyTorch is there."""
    return importlib.util.find_spec("torch") is not None


def profile_steps(run: Callable[[], object], steps: int) -> dict[str, Any]:
    """What one of the `steps` steps of run() keeps the GPU busy with. Raises ImportError where there is no PyTorch."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return summed([(event.name, event.time_range.elapsed_us()) for event in events], steps)


def summed(events: Iterable[tuple[str, float]], steps: int) -> dict[str, Any]:
    """Of kernels (name, microseconds): the time of a step, and each kernel's share of it, the largest first."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, microseconds in events:
        short = _short(name)
        times[short] += microseconds  # type: ignore[assignment]
        calls[short] += 1
    return {
        "busy_ms": sum(times.values()) / steps / 1e3,
        "kernels": [
            {"name": name, "calls": calls[name] / steps, "us": total / steps} for name, total in times.most_common()
        ],
    }


def _short(name: str) -> str:
    """Without what a kernel's name has in common with all others'."""
    return re.sub(r"^void |mlx::core::(cu::)?|_[0-9a-f]{12,}", "", name)[:_SHOWN]
