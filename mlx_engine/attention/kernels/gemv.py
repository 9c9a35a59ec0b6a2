"""Calls the kernels for products of a few rows with a weight matrix, and what goes around them in a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from mlx_engine.attention.kernels import texts
from mlx_engine.types import cdiv

# Rows up to which these products are worth their while: beyond, MLX's own are faster. Where skinny_gemm runs, gemv is
# for a single row.
MAX_GEMV_ROWS = 2
MAX_SKINNY_ROWS = 8
_WARPS = 8
_UNROLL = 4
# Warps that keep a GPU busy: columns are split among several where there are fewer.
_WANTED_WARPS = 8192
_THREADS = 128
# Threadgroups of skinny_gemm, so that two run on each multiprocessor of an H200, and the shared memory of each: what
# GPUs give one that have little. MLX asks for no more than the usual unless more than that is named at launch.
_SKINNY_GROUPS = 264
_SHARED_BYTES = 96 << 10
_UNUSUAL_BYTES = (48 << 10) + 16
# Registers of a lane that x may take.
_MOST_HELD = 64
_MAX_STAGES = 8


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm."""

    weight: mx.array  # [K]
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of the first num_heads heads, each half with the other."""

    cosines: mx.array  # [rows, head_dim / 2] float32, of each row's angles
    sines: mx.array
    num_heads: int


def gemv(
    x: mx.array,
    weight: mx.array,
    *,
    norm: Norm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
    rotation: Rotation | None = None,
) -> mx.array:
    """norm(x) [rows, K] times the transpose of weight [N, K], plus bias [N]. For a few rows: up to 32 work.

    Then one of: residual [rows, N] is added; `gated` gives silu(first half) * second half [rows, N / 2]; `rotation`
    turns the heads that [rows, N] starts with. All of one type and row-contiguous, K a multiple of 16 bytes, N even.
    """
    rows, depth = x.shape
    num_columns = weight.shape[0]
    finish = 1 if residual is not None else 2 if gated else 3 if rotation is not None else 0
    pair = 1
    if gated:
        pair = num_columns // 2
    elif rotation is not None:
        pair = rotation.cosines.shape[1]
    splits = _num_splits(num_columns // 2, depth * x.dtype.size // 16)
    none = texts.constants()
    out: mx.array = texts.kernel("gemv")(
        inputs=[
            x,
            weight,
            weight if norm is None else norm.weight,
            weight if bias is None else bias,
            weight if residual is None else residual,
            none if rotation is None else rotation.cosines,
            none if rotation is None else rotation.sines,
            none if norm is None else texts.constants(norm.eps),
        ],
        template=[
            ("T", x.dtype),
            ("ROWS", rows),
            ("N", num_columns),
            ("K", depth),
            ("PAIR", pair),
            ("WARPS", _WARPS),
            ("SPLITS", splits),
            ("UNROLL", _UNROLL),
            ("NORM", norm is not None),
            ("BIAS", bias is not None),
            ("FINISH", finish),
            ("HEADS", 0 if rotation is None else rotation.num_heads),
        ],
        grid=(cdiv(num_columns // 2, _WARPS // splits) * _WARPS * 32, 1, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, num_columns // 2 if gated else num_columns)],
        output_dtypes=[x.dtype],
    )[0]
    return out


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """How `skinny_gemm` shares out its work: see the constants of its text."""

    row_tiles: int
    col_tiles: int
    warps: int
    chunk: int
    stages: int
    held: bool

    @property
    def ring_bytes(self) -> int:
        """Of all warps."""
        return self.warps * self.stages * 16 * self.col_tiles * (2 * self.chunk + 64)

    @staticmethod
    def of(rows: int, depth: int, **given: int) -> SkinnyPlan:
        """The one for x [rows, depth]; `given` parts of it are as they are."""
        row_tiles, col_tiles = cdiv(rows, 8), given.get("col_tiles", 1)
        warps = given.get("warps", 8)
        chunk = given.get("chunk", 128 if depth % 128 == 0 else 64)
        held = cdiv(depth // chunk, warps) * chunk // 8 * row_tiles <= _MOST_HELD
        plan = SkinnyPlan(row_tiles, col_tiles, warps, chunk, 1, bool(given.get("held", held)))
        sums = 2 * warps * 16 * col_tiles * 8 * row_tiles * 4 + warps * 8 * (row_tiles * 4 + _MAX_STAGES)
        stages = min(_MAX_STAGES, (_SHARED_BYTES - sums) // plan.ring_bytes)
        return replace(plan, stages=given.get("stages", max(1, stages)))


def skinny_gemm(
    x: mx.array,
    weight: mx.array,
    *,
    norm: Norm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
    plan: SkinnyPlan | None = None,
) -> mx.array:
    """`gemv` for up to 16 rows, without rotation, for weights that `skinny_gemm_takes`."""
    rows, depth = x.shape
    num_columns = weight.shape[0]
    plan = plan or SkinnyPlan.of(rows, depth)
    if norm is not None and x.dtype == mx.float16:
        # The kernel multiplies with the norm's weight before it knows the row's scale: float16 might not reach so far.
        x, norm = mx.fast.rms_norm(x, norm.weight, norm.eps), None
    none = texts.constants()
    out: mx.array = texts.kernel("skinny_gemm", max(plan.ring_bytes, _UNUSUAL_BYTES))(
        inputs=[
            x,
            weight,
            weight if norm is None else norm.weight,
            weight if bias is None else bias,
            weight if residual is None else residual,
            none if norm is None else texts.constants(norm.eps),
        ],
        template=[
            ("T", x.dtype),
            ("ROW_TILES", plan.row_tiles),
            ("N", num_columns),
            ("K", depth),
            ("PAIR", num_columns // 2 if gated else 8),
            ("COL_TILES", plan.col_tiles),
            ("WARPS", plan.warps),
            ("CHUNK", plan.chunk),
            ("STAGES", plan.stages),
            ("HELD", plan.held),
            ("NORM", norm is not None),
            ("BIAS", bias is not None),
            ("FINISH", 1 if residual is not None else 2 if gated else 0),
        ],
        grid=(min(num_columns // (16 * plan.col_tiles), _SKINNY_GROUPS) * plan.warps * 32, 1, 1),
        threadgroup=(plan.warps * 32, 1, 1),
        output_shapes=[(rows, num_columns // 2 if gated else num_columns)],
        output_dtypes=[x.dtype],
    )[0]
    return out


def skinny_gemm_takes(weight: mx.array) -> bool:
    """Whether this device can multiply a few rows with weight [N, K] so."""
    num_columns, depth = weight.shape
    return (
        texts.has_bulk_copies()
        and weight.dtype in (mx.float16, mx.bfloat16)
        and depth % 64 == 0
        and num_columns % 16 == 0
    )


def gate(x: mx.array) -> mx.array:
    """silu(first half) * second half of each row of x [rows, 2 n]: [rows, n]."""
    rows, columns = x.shape[0], x.shape[1] // 2
    if not texts.has_matrix_instructions() or x.dtype == mx.float32 or columns % 8 != 0:
        gated: mx.array = swiglu(x[:, :columns], x[:, columns:])
        return gated
    out: mx.array = texts.kernel("gate")(
        inputs=[x],
        template=[("T", x.dtype), ("COLUMNS", columns)],
        grid=(cdiv(columns // 8, _THREADS) * _THREADS, 1, rows),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
    )[0]
    return out


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """The first num_heads heads of each row of x [rows, columns], turned by the row's position."""
    rows = x.shape[0]
    half = rotation.cosines.shape[1]
    out: mx.array = texts.kernel("rotate")(
        inputs=[x, rotation.cosines, rotation.sines],
        template=[("T", x.dtype), ("HALF", half), ("HEADS", rotation.num_heads)],
        grid=(cdiv(rotation.num_heads * half, _THREADS) * _THREADS, 1, rows),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, rotation.num_heads * 2 * half)],
        output_dtypes=[x.dtype],
    )[0]
    return out


def embed(table: mx.array, ids: mx.array) -> mx.array:
    """Rows [*ids.shape, columns] of a table [n, columns], whose rows are a multiple of 16 bytes; ids of integers."""
    columns = table.shape[1]
    flat = ids.reshape(-1).astype(mx.int32)
    rows = flat.shape[0]
    out: mx.array = texts.kernel("embed")(
        inputs=[table, texts.padded(flat)],
        template=[("T", table.dtype), ("COLUMNS", columns)],
        grid=(cdiv(columns * table.dtype.size // 16, _THREADS) * _THREADS, 1, rows),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[table.dtype],
    )[0]
    return out.reshape(*ids.shape, columns)


def _num_splits(num_pairs: int, num_pieces: int) -> int:
    """Into how many parts to split the sums of a pair of columns: enough warps, each with some pieces to read."""
    splits = 1
    while num_pairs * splits < _WANTED_WARPS and splits < _WARPS and num_pieces >= 2 * splits * 32 * _UNROLL:
        splits *= 2
    return splits
