from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import pytest
from pydantic import ValidationError

from mlx_engine import memory
from mlx_engine.attention.pool import LayerPool
from mlx_engine.config import EngineConfig
from mlx_engine.errors import ConfigError
from mlx_engine.memory import (
    KVPlan,
    available_memory_bytes,
    check_weights_fit,
    limit_memory,
    plan_kv_blocks,
    usable_memory_bytes,
)
from mlx_engine.types import LayerKVSpec

LAYERS = [LayerKVSpec(3, 64, 64)] * 30
BLOCK = 16 * 30 * 3 * 128 * 4  # bytes
KV_DTYPES = {"auto": mx.float32, "int8": mx.int8}


def _plan(available: int, max_model_len: int = 1024, weights: int = 0, activation: int = 0, **config: object) -> KVPlan:
    return plan_kv_blocks(
        EngineConfig.model_validate(config),
        LAYERS,
        kv_dtype=KV_DTYPES[str(config.get("kv_cache_dtype", "auto"))],
        block_size=16,
        weights_bytes=weights,
        activation_bytes=activation,
        max_model_len=max_model_len,
        available_bytes=available,
    )


def test_bytes_of_a_block_count_keys_values_layers_and_the_scratch_block() -> None:
    plan = _plan(0, num_blocks=100)
    assert plan == KVPlan(100, 16, BLOCK, "config")
    assert (plan.num_tokens, plan.num_bytes) == (1600, 101 * BLOCK)
    uneven = [LayerKVSpec(2, 192, 128), LayerKVSpec(1, 64, 64)]
    assert memory.bytes_per_block(uneven, 8, mx.bfloat16) == 8 * 2 * (2 * 320 + 128)
    # And of 8-bit integers a scale of 4 bytes for each token and head, of keys and of values.
    assert memory.bytes_per_block(uneven, 8, mx.int8) == 8 * (2 * (320 + 8) + 128 + 8)


def test_pool_takes_the_share_of_what_weights_and_activations_leave() -> None:
    plan = _plan(1000 * BLOCK, weights=300 * BLOCK, activation=100 * BLOCK, kv_memory_fraction=0.5)
    assert plan.num_blocks == 299  # and the scratch block: half of 600
    assert plan.limited_by == "memory"
    assert _plan(1000 * BLOCK, kv_memory_fraction=1.0).num_bytes == 1000 * BLOCK


def test_int8_holds_about_twice_the_blocks_of_16_bits() -> None:
    sizes = [memory.bytes_per_block(LAYERS, 16, dtype) for dtype in (mx.float32, mx.float16, mx.int8)]
    assert 3.7 < sizes[0] / sizes[2] < 4
    assert 1.85 < sizes[1] / sizes[2] < 2
    wide = _plan(1000 * BLOCK, kv_memory_fraction=1.0)
    narrow = _plan(1000 * BLOCK, kv_memory_fraction=1.0, kv_cache_dtype="int8")
    assert 3.7 < narrow.num_blocks / wide.num_blocks < 4
    assert narrow.num_bytes <= 1000 * BLOCK


@pytest.mark.parametrize("stored", [mx.float32, mx.bfloat16, mx.int8], ids=str)
def test_a_pool_takes_the_bytes_that_the_plan_counts(stored: mx.Dtype) -> None:
    dtype = mx.float32 if stored == mx.int8 else stored
    uneven = [LayerKVSpec(2, 192, 128), LayerKVSpec(1, 64, 64)]
    pools = [LayerPool.zeros(spec, 5, 8, dtype, stored) for spec in uneven]
    taken = sum(array.nbytes for pool in pools for array in pool.arrays())
    assert taken == 5 * memory.bytes_per_block(uneven, 8, stored)


def test_int8_is_the_advice_unless_it_is_taken_already() -> None:
    with pytest.raises(ConfigError, match="set kv_cache_dtype to int8, or use a smaller model"):
        _plan(10 * BLOCK)
    with pytest.raises(ConfigError, match="raise kv_memory_fraction, or use a smaller model"):
        _plan(10 * BLOCK, kv_cache_dtype="int8")


def test_pool_never_exceeds_what_the_sequences_can_fill() -> None:
    plan = _plan(10**12, max_model_len=100, max_num_seqs=4, kv_memory_fraction=0.9)
    assert (plan.num_blocks, plan.limited_by) == (4 * 7, "max_num_seqs")


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the CPU's own limit")
def test_cpu_pool_stays_modest_unless_asked() -> None:
    plan = _plan(10**12, max_model_len=4096)
    assert plan.limited_by == "cpu"
    assert plan.num_bytes <= memory.CPU_DEFAULT_POOL_BYTES
    assert _plan(10**12, max_model_len=4096, kv_memory_fraction=0.5).num_blocks == 64 * 256
    # Even then one sequence fits.
    assert _plan(10**12, max_model_len=200_000).num_blocks == 12_500


def test_sequence_that_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(10**9, max_model_len=8192, weights=5 * 10**8)
    for words in ("8192", "512 KV blocks", "1.00 GB", "0.50 GB", "max_model_len", "kv_memory_fraction", "0.5"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="0 fit"):
        _plan(10**8, weights=5 * 10**8)


def test_advice_of_the_refusal_works() -> None:
    with pytest.raises(ConfigError, match=r"to (\d+) or less") as caught:
        _plan(300 * BLOCK, max_model_len=8192)
    advised = int(str(caught.value).split("(to ")[1].split()[0])
    assert _plan(300 * BLOCK, max_model_len=advised).num_tokens >= advised


def _explicit(num_blocks: int, max_model_len: int | None, weights: int = 0, limit: float | None = None) -> KVPlan:
    return plan_kv_blocks(
        EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len, memory_limit_gib=limit),
        LAYERS,
        kv_dtype=mx.float32,
        block_size=16,
        weights_bytes=weights,
        activation_bytes=0,
        max_model_len=max_model_len or 8192,
    )


def test_explicit_blocks_that_contradict_an_explicit_length_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_blocks is 32.*512 blocks"):
        _explicit(32, 8192)
    assert _explicit(512, 8192).num_blocks == 512


def test_explicit_blocks_below_the_models_own_length_are_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _explicit(32, None).num_blocks == 32
    assert "512 tokens" in caplog.text


def _gib(num_bytes: int) -> float:
    return num_bytes / 2**30


def test_a_limit_below_what_is_available_is_what_the_pool_is_planned_by() -> None:
    options = {"kv_memory_fraction": 0.5, "weights": 300 * BLOCK, "activation": 100 * BLOCK}
    assert _plan(10**12, memory_limit_gib=_gib(1000 * BLOCK), **options) == _plan(1000 * BLOCK, **options)
    assert _plan(1000 * BLOCK, memory_limit_gib=1000.0, **options) == _plan(1000 * BLOCK, **options)


def test_a_sequence_that_does_not_fit_the_limit_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"memory \(memory_limit_gib 0\.5\), less.*raise memory_limit_gib or kv_mem"):
        _plan(10**12, max_model_len=8192, memory_limit_gib=0.5)
    with pytest.raises(ConfigError) as caught:
        _plan(10**8, max_model_len=8192, memory_limit_gib=0.5)
    assert "memory_limit_gib" not in str(caught.value), "less is available: raising it would not help"


def test_explicit_blocks_beyond_the_limit_are_refused() -> None:
    limit = _gib(150 * BLOCK)
    assert _explicit(99, None, weights=50 * BLOCK, limit=limit).num_blocks == 99  # and the scratch block
    with pytest.raises(ConfigError, match=r"num_blocks is 100,.*memory_limit_gib.*Lower num_blocks"):
        _explicit(100, None, weights=50 * BLOCK, limit=limit)


def test_weights_that_leave_nothing_of_the_limit_are_refused() -> None:
    check_weights_fit(EngineConfig(memory_limit_gib=1), 2**30 - 1)
    check_weights_fit(EngineConfig(), 10**15)
    with pytest.raises(ConfigError, match=r"memory_limit_gib is 1 \(1\.07 GB\).*weights alone take 2\.00 GB: raise it"):
        check_weights_fit(EngineConfig(memory_limit_gib=1), 2 * 10**9)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_is_a_number_above_zero(value: float) -> None:
    with pytest.raises(ValidationError, match="memory_limit_gib"):
        EngineConfig(memory_limit_gib=value)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the CPU's own default")
def test_on_a_cpu_mlx_is_limited_only_where_that_is_asked_for(mlx_limit: int) -> None:
    limit_memory(EngineConfig())
    assert mx.get_memory_limit() == mlx_limit
    limit_memory(EngineConfig(memory_limit_gib=0.125))
    assert mx.get_memory_limit() == 2**27
    # The last call holds, also where it allows more.
    limit_memory(EngineConfig(memory_limit_gib=0.25))
    assert mx.get_memory_limit() == 2**28
    limit_memory(EngineConfig(memory_limit_gib=10.0**6))
    assert mx.get_memory_limit() < 10**6 * 2**30, "no more than there is"


def _on_gpu(monkeypatch: pytest.MonkeyPatch, info: dict[str, int]) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 20 * 2**30)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)


def test_on_cuda_mlx_keeps_to_what_other_processes_leave(monkeypatch: pytest.MonkeyPatch, mlx_limit: int) -> None:
    _on_gpu(monkeypatch, {"total_memory": 140 * 2**30, "free_memory": 60 * 2**30})
    limit_memory(EngineConfig())
    assert mx.get_memory_limit() == 76 * 2**30, "95% of the 20 GiB that it holds and the 60 that are free"
    assert usable_memory_bytes(EngineConfig()) == 80 * 2**30
    limit_memory(EngineConfig(memory_limit_gib=30))
    assert mx.get_memory_limit() == usable_memory_bytes(EngineConfig(memory_limit_gib=30)) == 30 * 2**30
    limit_memory(EngineConfig(memory_limit_gib=100))
    assert mx.get_memory_limit() == 76 * 2**30
    # Of a GPU that nobody else uses it is MLX's own limit.
    _on_gpu(monkeypatch, {"total_memory": 140 * 2**30, "free_memory": 120 * 2**30})
    limit_memory(EngineConfig())
    assert mx.get_memory_limit() == 133 * 2**30


def test_on_metal_mlx_keeps_to_what_is_recommended(monkeypatch: pytest.MonkeyPatch, mlx_limit: int) -> None:
    _on_gpu(monkeypatch, {"memory_size": 64 * 2**30, "max_recommended_working_set_size": 48 * 2**30})
    limit_memory(EngineConfig())
    assert mx.get_memory_limit() == 48 * 2**30
    limit_memory(EngineConfig(memory_limit_gib=30.5))
    assert mx.get_memory_limit() == 61 * 2**29


def test_available_memory_is_measured_and_counts_what_mlx_holds() -> None:
    before = available_memory_bytes()
    assert 10**8 < before < 10**14
    held = mx.zeros((64 << 20,), mx.uint8)
    mx.eval(held)
    # What moved from free to held is still MLX's to use.
    assert available_memory_bytes() > before - (48 << 20) or before > 10**11


def _host(root: Path, cgroup: str, files: dict[str, str]) -> int:
    for name, content in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    return memory._host_memory_bytes(root)


def _v2(group: str, limit: str, used: int) -> dict[str, str]:
    base = f"sys/fs/cgroup{group}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": "anon 5\ninactive_file 1000\n",
    }


@pytest.mark.skipif(memory.sys.platform != "linux", reason="control groups are Linux's")
def test_control_groups_limit_the_memory(tmp_path: Path) -> None:
    free = 8_000_000 * 1024
    assert _host(tmp_path / "none", "", {}) == free
    assert _host(tmp_path / "max", "0::/a\n", _v2("/a", "max", 10**6)) == free
    assert _host(tmp_path / "v2", "0::/a\n", _v2("/a", str(10**9), 10**8)) == 10**9 - 10**8 + 1000
    # A limit further up holds as well.
    nested = _v2("/a/b", "max", 10**6) | _v2("/a", str(10**9), 10**8)
    assert _host(tmp_path / "up", "0::/a/b\n", nested) == 10**9 - 10**8 + 1000
    # In a container the path is often the host's, and the limit at the mount.
    assert _host(tmp_path / "docker", "0::/host/path\n", _v2("", str(10**9), 10**8)) == 10**9 - 10**8 + 1000
    v1 = {
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2 * 10**9}",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{10**9}",
        "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 7\n",
    }
    assert _host(tmp_path / "v1", "5:cpu:/a\n4:memory:/a\n", v1) == 10**9 + 7
