"""The cheaper forms for the CPU give what mlx-lm's own give, and a wrong one is noticed at start."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_engine.cpu import PlainRMSNorm, RotaryTable, StepRoPE, adapt_for_cpu, use_huge_pages
from mlx_engine.cpu_linear import FusedProjections
from mlx_engine.errors import ModelLoadError
from mlx_engine.paged_model import PagedModel
from tests.parity.tiny_models import TINY, build


def _close(got: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_fused_projections_give_each_layers_own_output(bias: bool) -> None:
    layers = [nn.Linear(24, size, bias=bias) for size in (32, 8, 8)]
    fused = FusedProjections(layers)
    for rows in (1, 5):
        x = mx.random.normal((rows, 1, 24))
        for index, layer in enumerate(layers):
            _close(fused.part(index, x), layer(x))


def test_fused_projections_called_in_any_order_with_any_arrays() -> None:
    """Layers that share another layer's keys call one projection only; encoders call them with different arrays."""
    layers = [nn.Linear(24, size) for size in (32, 8, 8)]
    fused = FusedProjections(layers)
    arrays = [mx.random.normal((3, 24)) for _ in range(3)]
    rng = np.random.default_rng(0)
    for _ in range(200):
        index, x = int(rng.integers(3)), arrays[rng.integers(3)]
        _close(fused.part(index, x), layers[index](x))


def test_fused_projections_hold_no_array_once_all_have_been_taken() -> None:
    fused = FusedProjections([nn.Linear(24, 8) for _ in range(3)])
    x = mx.random.normal((3, 24))
    for index in range(3):
        fused.part(index, x)
    assert (fused._input, fused._output) == (None, None)


@pytest.mark.parametrize("dims", [64, 32])
@pytest.mark.parametrize("rows", [1, 7])
def test_step_rope_is_ropes_rotation_at_each_rows_position(dims: int, rows: int) -> None:
    original = nn.RoPE(dims, base=5000.0, scale=0.5)
    rope = StepRoPE(original, RotaryTable(dims, 5000.0, 0.5))
    x = mx.random.normal((rows, 3, 1, 64))
    positions = mx.array([911, 0, 3, 1, 88, 2047, 5][:rows])
    _close(rope(x, positions), mx.concatenate([original(x[i : i + 1], offset=positions[i]) for i in range(rows)]))
    whole = mx.random.normal((1, 3, 9, 64))
    assert mx.array_equal(rope(whole, 4), original(whole, offset=4))


def test_plain_rms_norm_is_mlxs() -> None:
    original = nn.RMSNorm(48, eps=1e-3)
    original.weight = mx.random.normal((48,))
    for x in (mx.random.normal((5, 1, 48)) * 30, mx.zeros((2, 48)), mx.random.normal((2, 3, 4, 48)) * 1e-3):
        _close(PlainRMSNorm(original)(x), original(x))
    half = mx.random.normal((5, 48)).astype(mx.float16)
    assert mx.array_equal(PlainRMSNorm(original)(half), original(half))


def test_adapted_model_is_probed_against_the_unchanged_one() -> None:
    def double_a_norm(model: nn.Module) -> None:
        adapt_for_cpu(model)
        model.model.norm.weight = model.model.norm.weight * 2

    PagedModel(build(TINY["llama_biases"]), adapt_for_cpu)
    with pytest.raises(ModelLoadError, match="logits differ"):
        PagedModel(build(TINY["llama_biases"]), double_a_norm)


def _huge_kilobytes() -> int:
    match = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(match[1]) if match else 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")
def test_huge_pages_hold_the_same_numbers() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("transparent huge pages aren't given on request here")
    arrays = [mx.random.normal((6 << 20,)) for _ in range(2)]
    copies = [np.array(array) for array in arrays]
    before = _huge_kilobytes()
    assert use_huge_pages(arrays) >= 24 << 20
    assert _huge_kilobytes() - before >= 20 << 10
    assert all(np.array_equal(np.array(array), copy) for array, copy in zip(arrays, copies, strict=True))


def test_small_arrays_keep_their_pages() -> None:
    assert use_huge_pages([mx.zeros((100,)), mx.zeros((2 << 20,), mx.float16)]) == 0
