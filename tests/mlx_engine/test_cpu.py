"""The cheaper forms for the CPU give what mlx-lm's own give, and a wrong one is noticed at start."""

from __future__ import annotations

import ctypes
import re
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_engine.cpu import PlainRMSNorm, RotaryTable, StepRoPE, adapt_for_cpu, use_huge_pages
from mlx_engine.errors import ModelLoadError
from mlx_engine.linear import DenseLinear, FusedProjections, PackedLinear
from mlx_engine.native import NativeLibrary, NativeUnavailable, load_native
from mlx_engine.paged_model import PagedModel
from tests.parity.tiny_models import TINY, build

# Linux's advice numbers, from <sys/mman.h>.
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15


def _close(got: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-5, atol=2e-6)


@pytest.fixture(params=["blas", "native"])
def native(request: pytest.FixtureRequest) -> NativeLibrary | None:
    """The native library, or None: linear layers then run on MLX's own products."""
    if request.param == "blas":
        return None
    try:
        return load_native()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("bias", [True, False])
def test_fused_projections_give_each_layers_own_output(native: NativeLibrary | None, bias: bool) -> None:
    layers = [nn.Linear(24, size, bias=bias) for size in (32, 8, 8)]
    fused = FusedProjections(layers, native)
    for rows in (1, 5):
        x = mx.random.normal((rows, 1, 24))
        for index, layer in enumerate(layers):
            _close(fused.part(index, x), layer(x))


def test_fused_projections_called_in_any_order_with_any_arrays(native: NativeLibrary | None) -> None:
    """Layers that share another layer's keys call one projection only; encoders call them with different arrays."""
    layers = [nn.Linear(24, size) for size in (32, 8, 8)]
    fused = FusedProjections(layers, native)
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


def _parameters(model: nn.Module) -> dict[int, mx.array]:
    return {id(array): array for _, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gemma3", "mistral"])
def test_a_packed_model_keeps_no_weight_twice_but_a_tied_head(name: str) -> None:
    native = load_native()
    loaded = build(TINY[name])
    before = sum(array.nbytes for array in _parameters(loaded.model).values())
    tied = 0 if "lm_head" in loaded.model else loaded.model.model.embed_tokens.weight.nbytes
    PagedModel(loaded, partial(adapt_for_cpu, native=native))
    modules = {id(module): module for _, module in loaded.model.named_modules()}.values()
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    assert packed
    assert not [module for module in modules if type(module) in (nn.Linear, DenseLinear)]
    after = sum(array.nbytes for array in _parameters(loaded.model).values())
    assert after == before + tied + sum(_padding(module, native.panel_width) for module in packed)


def _padding(module: PackedLinear, width: int) -> int:
    """Bytes by which a packed weight is larger than the weight: its last panel's, and those that align it."""
    rows = -(-module.size // width) * width
    return 64 + 4 * (rows - module.size) * (module.packed.size - 16) // rows


def test_half_precision_layers_are_left_to_mlx() -> None:
    native = load_native()
    loaded = build(TINY["llama_biases"])
    loaded.model.set_dtype(mx.bfloat16)
    adapt_for_cpu(loaded.model, native)
    assert not [module for _, module in loaded.model.named_modules() if isinstance(module, PackedLinear)]


def test_adapted_model_is_probed_against_the_unchanged_one(native: NativeLibrary | None) -> None:
    def double_a_norm(model: nn.Module) -> None:
        adapt_for_cpu(model, native)
        model.model.norm.weight = model.model.norm.weight * 2

    PagedModel(build(TINY["llama_biases"]), partial(adapt_for_cpu, native=native))
    with pytest.raises(ModelLoadError, match="logits differ"):
        PagedModel(build(TINY["llama_biases"]), double_a_norm)


def _inside(array: mx.array) -> tuple[int, int]:
    """From where to where this array has whole pages of 2 MB."""
    start = np.array(array, copy=False).ctypes.data
    return -(-start // (2 << 20)) * (2 << 20), (start + array.nbytes) // (2 << 20) * (2 << 20)


def _marks(array: mx.array) -> set[bool]:
    """Whether huge pages were asked for, over all mappings that this array lies in."""
    first, last = _inside(array)
    marks, overlaps = set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            overlaps = int(span[1], 16) < last and int(span[2], 16) > first
        elif overlaps and line.startswith("VmFlags:"):
            marks.add("hg" in line.split())
    return marks


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")
def test_huge_pages_hold_the_same_numbers() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("transparent huge pages aren't given on request here")
    arrays = [mx.random.normal((6 << 20,)) for _ in range(2)]
    copies = [np.array(array) for array in arrays]
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for array in arrays:
        # Memory that had owners before: the first half of the array is one mapping, the second another.
        first, last = _inside(array)
        assert libc.madvise(first, last - first, _MADV_NOHUGEPAGE) == 0
        assert libc.madvise(first + (10 << 20), last - first - (10 << 20), _MADV_HUGEPAGE) == 0
        assert _marks(array) == {False, True}
    assert use_huge_pages(arrays) >= 40 << 20
    # How many the kernel has to give depends on how fragmented the machine's memory is; that it was asked does not.
    assert [_marks(array) for array in arrays] == [{True}, {True}]
    assert all(np.array_equal(np.array(array), copy) for array, copy in zip(arrays, copies, strict=True))


def test_small_arrays_keep_their_pages() -> None:
    assert use_huge_pages([mx.zeros((100,)), mx.zeros((2 << 20,), mx.float16)]) == 0
