"""The kernels' texts, and the kernels that MLX makes of them for this machine's GPU."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

Dialect = Literal["metal", "cuda", "host"]

_FOLDER = Path(__file__).parent
# mx.fast.metal_kernel hands smaller arrays over in another address space, which the text doesn't expect.
MIN_SIZE = 8
# What this process does without, though the GPU has it.
_FORGONE: set[str] = set()
# The compute capability from which CUDA has matrix instructions, from which bulk copies, and the one that has matrix
# instructions of four warps.
_FIRST_WITH_MATRIX = 80
_FIRST_WITH_BULK_COPIES = 90
_WITH_WARPGROUPS = 90

_INPUTS = (
    "queries",
    "new_keys",
    "new_values",
    "key_pool",
    "value_pool",
    "key_scales",
    "value_scales",
    "block_tables",
    "seq_lens",
    "params",
    "cosines",
    "sines",
    "sinks",
)
_PREFILL_INPUTS = ("queries", "key_pool", "value_pool", "block_table", "chunks", "tiles", "params", "sinks", "after")
_PARTIAL = ("partial_sums", "partial_stats")
# Name: files of the text, inputs, outputs.
KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "decode": (("decode_place.inc", "decode.inc", "decode_whole.inc"), _INPUTS, ("out",)),
    "decode_split": (
        ("decode_place.inc", "decode_empty.inc", "decode.inc", "decode_split.inc"),
        _INPUTS[:-1],
        _PARTIAL,
    ),
    "decode_matrix": (("decode_place.inc", "decode_matrix.inc", "decode_whole.inc"), _INPUTS, ("out",)),
    "decode_matrix_split": (
        ("decode_place.inc", "decode_empty.inc", "decode_matrix.inc", "decode_split.inc"),
        _INPUTS[:-1],
        _PARTIAL,
    ),
    "decode_matrix_int8": (("decode_place.inc", "decode_matrix_int8.inc", "decode_whole.inc"), _INPUTS, ("out",)),
    "decode_matrix_int8_split": (
        ("decode_place.inc", "decode_empty.inc", "decode_matrix_int8.inc", "decode_split.inc"),
        _INPUTS[:-1],
        _PARTIAL,
    ),
    "combine": (("combine.inc",), ("partial_sums", "partial_stats", "sinks"), ("out",)),
    "sample": (("sample.inc",), ("logits", "options"), ("out",)),
    "publish": (("publish.inc",), ("sampled", "samples"), ("ticket",)),
    "append": (
        ("append.inc",),
        ("new_keys", "new_values", "key_pool", "value_pool", "key_scales", "value_scales", "slots"),
        ("ticket",),
    ),
    "collect": (
        ("collect.inc",),
        ("key_pool", "value_pool", "key_scales", "value_scales", "block_table", "length", "after"),
        ("keys", "values"),
    ),
    "prefill": (("prefill.inc",), _PREFILL_INPUTS, ("out",)),
    "prefill_warpgroup": (("prefill.inc",), _PREFILL_INPUTS, ("out",)),
    "gemv": (
        ("gemv.inc",),
        ("x", "weight", "norm_weight", "bias", "residual", "cosines", "sines", "params"),
        ("out",),
    ),
    "skinny_gemm": (
        ("skinny_gemm.inc",),
        ("x", "weight", "norm_weight", "bias", "residual", "params"),
        ("out",),
    ),
    "gate": (("gate.inc",), ("x",), ("out",)),
    "embed": (("embed.inc",), ("table", "ids"), ("out",)),
    "rotate": (("rotate.inc",), ("x", "cosines", "sines"), ("out",)),
}


@functools.cache
def kernel_text(name: str, dialect: Dialect) -> str:
    """The body of a kernel: the same for every dialect, but for what Metal needs before it."""
    files = [*(["metal_prelude.inc"] if dialect == "metal" else []), *KERNELS[name][0]]
    return _compact("".join((_FOLDER / file).read_text() for file in files))


# What goes before kernels that use matrix instructions, or how those pack numbers, which not every dialect has; "{}" is
# the dialect.
_MATRIX_HEADERS: dict[str, tuple[str, ...]] = {
    "decode_matrix": ("{}_matrix.h", "rotated_piece.inc"),
    "decode_matrix_split": ("{}_matrix.h", "rotated_piece.inc"),
    "decode_matrix_int8": ("{}_matrix.h", "rotated_piece.inc"),
    "decode_matrix_int8_split": ("{}_matrix.h", "rotated_piece.inc"),
    "gate": ("{}_matrix.h",),
    "skinny_gemm": ("{}_matrix.h", "{}_bulk.h"),
    "prefill": ("{}_matrix.h", "panels.inc", "weights.inc", "products.inc"),
    "prefill_warpgroup": ("{}_matrix.h", "panels.inc", "weights.inc", "{}_warpgroup.h", "warpgroup.inc"),
}


@functools.cache
def kernel_header(name: str, dialect: Dialect) -> str:
    """What goes before a kernel of this name."""
    files = ("{}.h", "store.inc", *_MATRIX_HEADERS.get(name, ()))
    return _compact("".join((_FOLDER / file.format(dialect)).read_text() for file in files))


def has_matrix_instructions() -> bool:
    """Whether the default device has those of the kernels that need them."""
    return _compute_capability() >= _FIRST_WITH_MATRIX


def has_bulk_copies() -> bool:
    """Whether the default device copies lines into shared memory by itself: Hopper and what came after."""
    return _compute_capability() >= _FIRST_WITH_BULK_COPIES and "bulk copies" not in _FORGONE


def has_warpgroup_instructions() -> bool:
    """Whether the default device has matrix instructions of four warps: Hopper, and nothing before or after."""
    return _compute_capability() == _WITH_WARPGROUPS and "warpgroups" not in _FORGONE


def forgo_warpgroup_instructions() -> None:
    """From now on kernels of this process run without them."""
    _FORGONE.add("warpgroups")


def forgo_bulk_copies() -> None:
    """From now on kernels of this process run without them."""
    _FORGONE.add("bulk copies")


@functools.cache
def _compute_capability() -> int:
    """CUDA's, times ten, of the default device; 0 where that is something else."""
    if mx.default_device().type != mx.DeviceType.gpu or not mx.cuda.is_available():
        return 0
    digits = re.sub(r"\D", "", str(mx.device_info().get("architecture", "")))
    return int(digits or 0)


def _compact(text: str) -> str:
    """The text without comments and indentation: MLX hashes a kernel's source each time that it runs."""
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


@functools.cache
def kernel(name: str, shared_memory: int = 0) -> Any:
    """What runs the kernel of this name: called with inputs, template, grid, threadgroup and the outputs' shapes.

    `shared_memory` bytes are for kernels that say so.
    """
    _, inputs, outputs = KERNELS[name]
    dialect: Dialect = "metal" if mx.metal.is_available() else "cuda"
    options = {"shared_memory": shared_memory} if shared_memory else {}
    make: Any = mx.fast.metal_kernel if dialect == "metal" else mx.fast.cuda_kernel
    return make(
        name=f"quire_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=kernel_text(name, dialect),
        header=kernel_header(name, dialect),
        # A copy of a slice of fused projections would cost a kernel more; of the rest the text says what it takes. Of
        # logits a model may give a slice, which is rare.
        ensure_row_contiguous=name == "sample",
        **options,
    )


@functools.cache
def constants(*values: float) -> mx.array:
    """Numbers for a kernel, float32, as many as it must be given at the least. Data, of no thread's stream."""
    return mx.array([*values, *[0.0] * (MIN_SIZE - len(values))])


def padded(array: mx.array) -> mx.array:
    """The array with at least MIN_SIZE elements; its rows stay where they are."""
    if array.size >= MIN_SIZE:
        return array
    width = [(0, 0)] * (array.ndim - 1) + [(0, MIN_SIZE - (array.size if array.ndim == 1 else 0))]
    return mx.pad(array, width)
