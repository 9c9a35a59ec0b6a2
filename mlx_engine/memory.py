"""How much memory MLX may hold, and how many KV blocks fit in it."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from mlx_engine.attention.pool import row_bytes
from mlx_engine.config import EngineConfig
from mlx_engine.errors import ConfigError
from mlx_engine.types import LayerKVSpec

logger = logging.getLogger(__name__)

# Beside the device's own memory, which nothing else uses, a CPU's memory belongs to the user's other programs too:
# there the pool stays below this unless the configuration asks for a share of memory, or a sequence needs more.
CPU_DEFAULT_POOL_BYTES = 4 << 30
# On CUDA the rest of what is free is for what MLX doesn't count, such as the code of kernels and CUDA's graphs. MLX's
# own limit is this share of all memory, free or not.
_CUDA_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The size of the KV pool."""

    num_blocks: int  # that can be allocated; the pool has one more, for scratch
    block_size: int  # tokens
    bytes_per_block: int  # all layers, keys and values
    limited_by: Literal["config", "memory", "cpu", "max_num_seqs"]  # why there aren't more blocks

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, all sequences together."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """What the pool takes, its scratch block included."""
        return (self.num_blocks + 1) * self.bytes_per_block


def available_memory_bytes() -> int:
    """The bytes that MLX may hold on its default device in all, counting those that it holds now.

    Metal: the recommended working set. CUDA: free device memory. CPU: the least of the machine's available memory and
    what the process's control group (v1 or v2) leaves it.
    """
    held = int(mx.get_active_memory()) + int(mx.get_cache_memory())
    info = mx.device_info()
    if mx.default_device().type == mx.DeviceType.cpu:
        return held + _host_memory_bytes()
    if "max_recommended_working_set_size" in info:
        return int(info["max_recommended_working_set_size"])
    return held + int(info["free_memory"])


def usable_memory_bytes(config: EngineConfig, available_bytes: int | None = None) -> int:
    """The bytes to plan an engine by: available_bytes (measured if None), or memory_limit_gib where that is less."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    limit = _limit_bytes(config)
    return available if limit is None else min(limit, available)


def limit_memory(config: EngineConfig) -> None:
    """Sets MLX's limit, of the whole process, to usable_memory_bytes, on CUDA less a margin of what is free.

    On a CPU only where memory_limit_gib is given. By default MLX on CUDA keeps freed memory until it holds nearly all
    that the device has; where other processes have part of it, allocations fail before. At the limit it lets go of
    freed memory, and waits for what still runs. It takes more where that does not do. The last call holds.
    """
    if mx.default_device().type == mx.DeviceType.cpu and config.memory_limit_gib is None:
        return
    limit = usable_memory_bytes(config)
    if "free_memory" in mx.device_info():
        limit = min(limit, int(_CUDA_SHARE * available_memory_bytes()))
    mx.set_memory_limit(limit)


def check_weights_fit(config: EngineConfig, weights_bytes: int) -> None:
    """Raises ConfigError if memory_limit_gib is given and leaves nothing beside the weights."""
    limit = _limit_bytes(config)
    if limit is not None and weights_bytes >= limit:
        raise ConfigError(
            f"engine.memory_limit_gib is {config.memory_limit_gib:g} ({_gb(limit)}), and the model's weights alone "
            f"take {_gb(weights_bytes)}: raise it, set it to null, or use a smaller model"
        )


def bytes_per_block(layers: Sequence[LayerKVSpec], block_size: int, kv_dtype: mx.Dtype) -> int:
    """Bytes of one block's keys and values in all layers, with their scales where kv_dtype is int8."""
    return block_size * sum(
        layer.num_kv_heads * (row_bytes(layer.key_head_dim, kv_dtype) + row_bytes(layer.value_head_dim, kv_dtype))
        for layer in layers
    )


def plan_kv_blocks(
    config: EngineConfig,
    layers: Sequence[LayerKVSpec],
    *,
    kv_dtype: mx.Dtype,
    block_size: int,
    weights_bytes: int,
    activation_bytes: int,
    max_model_len: int,
    available_bytes: int | None = None,
) -> KVPlan:
    """How many blocks to allocate: those that the config asks for, or kv_memory_fraction of what memory leaves.

    What memory leaves is available_bytes (measured if None), memory_limit_gib at most, less weights and activations.
    There are never more blocks than max_num_seqs sequences of max_model_len tokens could fill. An explicit num_blocks
    too small for one such sequence is kept, with a warning, when max_model_len is the model's own: requests are then
    limited by the pool. Raises ConfigError with the numbers when one sequence of max_model_len tokens can't fit, or an
    explicit num_blocks not in memory_limit_gib.
    """
    block_bytes = bytes_per_block(layers, block_size, kv_dtype)
    needed = -(-max_model_len // block_size)
    if config.num_blocks is not None:
        _check_explicit(config, needed, max_model_len)
        explicit = KVPlan(config.num_blocks, block_size, block_bytes, "config")
        _check_in_limit(config, explicit, weights_bytes)
        return explicit
    usable = usable_memory_bytes(config, available_bytes)
    left = usable - weights_bytes - activation_bytes
    # The scratch block comes out of the same memory.
    fitting = int(max(left, 0) * config.kv_memory_fraction) // block_bytes - 1
    if fitting < needed:
        by_limit = usable == _limit_bytes(config)
        raise ConfigError(
            f"one sequence of {max_model_len} tokens needs {needed} KV blocks of {block_size} tokens, "
            f"{_gb(needed * block_bytes)}, and {max(fitting, 0)} fit: {_gb(usable)} of memory"
            f"{f' (memory_limit_gib {config.memory_limit_gib:g})' if by_limit else ''}, less "
            f"{_gb(weights_bytes)} of weights and {_gb(activation_bytes)} of activations, times kv_memory_fraction "
            f"{config.kv_memory_fraction:g}. Lower max_model_len (to {max(fitting, 0) * block_size} or less), raise "
            f"{'memory_limit_gib or ' if by_limit else ''}kv_memory_fraction, "
            f"{'' if kv_dtype == mx.int8 else 'set kv_cache_dtype to int8, '}or use a smaller model"
        )
    plan = _capped(config, fitting, needed, block_size, block_bytes)
    logger.info(
        "KV pool: %d blocks of %d tokens, %s, limited by %s",
        plan.num_blocks,
        block_size,
        _gb(plan.num_bytes),
        plan.limited_by,
    )
    return plan


def _check_explicit(config: EngineConfig, needed: int, max_model_len: int) -> None:
    num_blocks = config.num_blocks
    if num_blocks is None or num_blocks >= needed:
        return
    held = num_blocks * config.block_size
    if config.max_model_len is not None:
        raise ConfigError(
            f"num_blocks is {num_blocks}, which hold {held} tokens, and one sequence of max_model_len {max_model_len} "
            f"tokens needs {needed} blocks. Raise num_blocks to {needed} or lower max_model_len to {held}"
        )
    logger.warning(
        "num_blocks %d hold %d tokens, fewer than the model's %d: that is the most one request can have",
        num_blocks,
        held,
        max_model_len,
    )


def _check_in_limit(config: EngineConfig, plan: KVPlan, weights_bytes: int) -> None:
    limit = _limit_bytes(config)
    if limit is None or weights_bytes + plan.num_bytes <= limit:
        return
    raise ConfigError(
        f"num_blocks is {plan.num_blocks}, which take {_gb(plan.num_bytes)}, and memory_limit_gib "
        f"{config.memory_limit_gib:g} leaves {_gb(max(0, limit - weights_bytes))} beside {_gb(weights_bytes)} of "
        "weights. Lower num_blocks, or raise memory_limit_gib: activations come on top"
    )


def _limit_bytes(config: EngineConfig) -> int | None:
    return None if config.memory_limit_gib is None else math.ceil(config.memory_limit_gib * 2**30)


def _capped(config: EngineConfig, fitting: int, needed: int, block_size: int, block_bytes: int) -> KVPlan:
    caps: list[tuple[int, Literal["memory", "cpu", "max_num_seqs"]]] = [
        (fitting, "memory"),
        (config.max_num_seqs * needed, "max_num_seqs"),
    ]
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and "kv_memory_fraction" not in config.model_fields_set:
        caps.append((max(needed, CPU_DEFAULT_POOL_BYTES // block_bytes - 1), "cpu"))
    num_blocks, reason = min(caps, key=lambda cap: cap[0])
    return KVPlan(num_blocks, block_size, block_bytes, reason)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _host_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take on the host."""
    if sys.platform != "linux":
        return int(mx.device_info()["memory_size"]) - int(mx.get_active_memory())
    meminfo = (root / "proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_cgroup_memory_bytes(root)])


def _cgroup_memory_bytes(root: Path) -> list[int]:
    """What each limited control group above this process leaves, versions 1 and 2; nothing where none is limited."""
    left = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        folder = base / group.lstrip("/")
        # A limit holds for the groups below it. In a container the path may be the host's, and only `base` exist.
        for level in (folder, *(parent for parent in folder.parents if parent.is_relative_to(base))):
            value = _group_left(level, limit, usage, cache)
            if value is not None:
                left.append(value)
    return left


def _group_left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """The limit less what is used and can't be dropped; None if there is no limit."""
    try:
        maximum = (folder / limit).read_text().strip()
        if maximum == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(maximum) - used + int(stat.get(cache, 0)))
