"""The paged-attention kernels on this machine's GPU: right first, then how much of its bandwidth they reach.

Every case of the kernels' tests is compared with float64, in several processes, since most of the time goes to their
compilation. Decode attention is timed over block tables in random order against a copy of device memory, and prefill
chunks in both ways: our kernel on the pool, and MLX's attention on pages that were collected. Of a decoder layer, all
but attention is timed with our products of a few rows, of both kinds, and with MLX's. On CUDA calls are recorded, as
the engine's steps are. Prints tables, writes JSON after each, and ends with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

# Before anything that imports MLX: OpenBLAS must come first.
from mlx_engine.attention.dispatch import PagedView
from mlx_engine.attention.kernels import PagedKernels, reference, texts
from mlx_engine.attention.kernels.paged import ChunkPlan
from mlx_engine.attention.pool import LayerPool, row_bytes
from mlx_engine.decoder_block import FusedDecoderBlock, RotaryTables
from mlx_engine.gpu import blocks_run_here
from mlx_engine.input_batch import PrefillChunk
from mlx_engine.native.graphs import load_graphs
from mlx_engine.types import LayerKVSpec, cdiv

# Third-party, but after ours: the first import of `mlx.core` binds its BLAS.
import mlx.core as mx  # isort: skip
import numpy as np  # isort: skip
from mlx.utils import tree_flatten  # isort: skip
from tqdm import tqdm  # isort: skip

from loadtest import environment
from loadtest.gpu import new_result
from loadtest.options import positive_int, result_file
from loadtest.random_llama import random_llama
from loadtest.shapes import SHAPES as MODELS
from loadtest.shapes import llama_config
from loadtest.tables import markdown_table, number

_COPY_BYTES = 1 << 30
_CHAIN = 32  # calls that follow each other in a timed run, at least, each depending on the one before
_COLD_BYTES = 192 << 20  # of K/V in a timed run at least, or a cache would hold what the next run reads
_CHUNK_CHAIN = 4
_SAID = 2000  # characters that are kept of what a kernel raised


@dataclass(frozen=True, slots=True)
class Shape:
    """Decode attention of equally long sequences."""

    num_rows: int
    seq_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 64
    block_size: int = 16
    quantized: bool = False  # 8-bit integers in the pool, not bfloat16
    target: float | None = None  # share of the copy's bandwidth

    @property
    def num_bytes(self) -> int:
        """That must be read at the least."""
        return self.num_rows * self.seq_len * self.num_kv_heads * 2 * row_bytes(self.head_dim, self.stored)

    @property
    def stored(self) -> mx.Dtype:
        """The type of the pool's numbers."""
        return mx.int8 if self.quantized else mx.bfloat16


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prefill chunks of one length, each after the same number of tokens."""

    num_chunks: int
    num_tokens: int  # of each
    start: int = 0
    head_dim: int = 64

    @property
    def num_flops(self) -> float:
        """Of the two products of a call, for what the rows see."""
        seen = self.num_tokens * (self.start + (self.num_tokens + 1) / 2)
        return 4.0 * self.num_chunks * seen * 32 * self.head_dim


CHUNKS = tuple(
    Chunks(*sizes, head_dim)
    for head_dim in (64, 128)
    for sizes in (
        (1, 64, 0),
        (1, 512, 0),
        (16, 512, 0),
        (1, 2048, 0),
        (1, 8192, 0),
        (1, 64, 4096),
        (1, 512, 3584),
        (1, 512, 15872),
    )
)
SHAPES = (
    Shape(128, 4096, target=0.6),
    Shape(1, 32768, target=0.4),
    Shape(1, 512),
    Shape(8, 512),
    Shape(32, 512),
    Shape(32, 4096),
    Shape(256, 512),
    Shape(32, 16384),
    Shape(128, 4096, head_dim=128),
    Shape(1, 32768, head_dim=128),
    Shape(128, 4096, quantized=True),
    Shape(1, 32768, quantized=True),
    Shape(32, 512, quantized=True),
    Shape(128, 4096, head_dim=128, quantized=True),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer of a model's shape, without attention, for some decode rows."""

    model: str
    num_rows: int


LAYERS = tuple(Layer(model, rows) for model in ("llama-1b", "llama-8b") for rows in (1, 2, 3, 4, 8, 16))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_kernels", description=__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed runs of each, median taken (default: 7)")
    parser.add_argument("--sweep", action="store_true", help="time every number of splits, not only the chosen one")
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=positive_int, default=jobs, help=f"processes that check cases (default: {jobs})")
    parser.add_argument("--out", type=result_file, default="bench-results/kernels.json", help="where the JSON goes")
    return parser.parse_args(argv)


def checks() -> list[tuple[Any, Callable[[], float]]]:
    """Each case of the tests that this GPU can run, with what measures its error."""
    found: list[tuple[Any, Callable[[], float]]] = [
        (case, partial(reference.decode_error, case))
        for dtype in reference.TOLERANCE
        for case in [*reference.cases(dtype), *reference.long_cases(dtype)]
    ]
    if texts.has_matrix_instructions():
        found += [(case, partial(reference.chunks_error, case)) for case in reference.CHUNK_CASES]
    return found


def check(index: int) -> dict[str, Any]:
    """The error of one of `checks`, and what it should have been within; what the kernel raised if it can't run."""
    case, measure = checks()[index]
    tolerance = reference.TOLERANCE[case.dtype]
    entry = {"case": str(case), "tolerance": tolerance}
    try:
        error = measure()
    except RuntimeError as failure:
        return entry | {"error": None, "raised": str(failure)[:_SAID], "right": False}
    return entry | {"error": error, "right": bool(error < tolerance)}


def check_all(jobs: int) -> list[dict[str, Any]]:
    """`check` of each of them, in processes of their own."""
    count = len(checks())
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(tqdm(pool.map(check, range(count)), total=count, unit="case", disable=None))


def seconds(run: Callable[[], mx.array], rounds: int) -> list[float]:
    """Of each run, after one that isn't counted."""
    mx.eval(run())
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval(run())
        taken.append(time.perf_counter() - start)
    return taken


def seconds_of_chain(chain: Callable[[mx.array], mx.array], first: mx.array, rounds: int) -> list[float]:
    """Of each run of a chain of calls: recorded on CUDA, elsewhere compiled, so that no time is the host's."""
    if not mx.cuda.is_available():
        compiled = mx.compile(chain)
        return seconds(lambda: compiled(first), rounds)
    graphs = load_graphs()
    recording = graphs.record(lambda: chain(first))
    done = mx.zeros((8,), mx.uint32)
    mx.eval(done)
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        recording.launch()
        graphs.fetch(done, 1).wait()
        taken.append(time.perf_counter() - start)
    return taken[1:]


def copy_bandwidth(rounds: int) -> float:
    """Bytes per second, read and written, of one large element-wise operation."""
    source = mx.ones((_COPY_BYTES // 2,), mx.bfloat16)
    mx.eval(source)

    def chain() -> mx.array:
        out = source
        for _ in range(_CHAIN):
            out = -out
        return out

    return 2 * _COPY_BYTES * _CHAIN / statistics.median(seconds(chain, rounds))


def kernels_of(shape: Shape) -> PagedKernels:
    """For a layer of this shape."""
    heads, dim = shape.num_heads, shape.head_dim
    return PagedKernels(heads, shape.num_kv_heads, dim, dim, shape.block_size, mx.bfloat16)


def new_pool(shape: Shape, num_blocks: int) -> LayerPool:
    """One of random numbers."""
    spec = LayerKVSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim)
    pool = LayerPool.zeros(spec, num_blocks, shape.block_size, mx.bfloat16, shape.stored)
    numbers = mx.random.normal((num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim))
    rows = mx.arange(numbers.shape[0] * shape.num_kv_heads).reshape(-1, shape.num_kv_heads)
    pool.write(rows, numbers, numbers)
    return pool


def time_shape(shape: Shape, splits: int, rounds: int) -> float:
    """Seconds of one call, the median; each reads sequences that no cache holds."""
    rng = np.random.default_rng(0)
    pages = cdiv(shape.seq_len, shape.block_size)
    num_sets = cdiv(_COLD_BYTES, shape.num_bytes)
    blocks = rng.permutation(num_sets * shape.num_rows * pages).reshape(num_sets, shape.num_rows, pages) + 1
    pool = new_pool(shape, blocks.size + 1)
    queries = mx.random.normal((shape.num_rows, shape.num_heads, shape.head_dim)).astype(mx.bfloat16)
    new = mx.random.normal((shape.num_rows, shape.num_kv_heads, shape.head_dim)).astype(mx.bfloat16)
    sets = [mx.array(tables) for tables in blocks.astype(np.int32)]
    lens = mx.full((shape.num_rows,), shape.seq_len, mx.int32)
    mx.eval(pool.keys, pool.values, pool.key_scales, pool.value_scales, queries, new, sets, lens)
    kernels, calls = kernels_of(shape), max(_CHAIN, num_sets)

    def chain(out: mx.array) -> mx.array:
        for i in range(calls):
            tables = sets[i % num_sets]
            out = kernels.decode(out, new, new, pool, tables, lens, scale=shape.head_dim**-0.5, splits=splits)
        return out

    return statistics.median(seconds_of_chain(chain, queries, rounds)) / calls


def time_chunks(chunks: Chunks, rounds: int) -> dict[str, float]:
    """Seconds of one call, the median, of each way; of MLX's also what the first call of a length takes."""
    seq_len = chunks.start + chunks.num_tokens
    shape = Shape(chunks.num_chunks, seq_len, head_dim=chunks.head_dim)
    kernels, pages = kernels_of(shape), cdiv(seq_len, shape.block_size)
    tables = np.random.default_rng(0).permutation(chunks.num_chunks * pages).reshape(chunks.num_chunks, pages) + 1
    pool = new_pool(shape, tables.size + 1)
    num_rows = chunks.num_chunks * chunks.num_tokens
    queries = mx.random.normal((num_rows, shape.num_heads, shape.head_dim)).astype(mx.bfloat16)
    ticket, scale = mx.zeros((8,), mx.int32), float(shape.head_dim**-0.5)
    described = [
        PrefillChunk(i * chunks.num_tokens, chunks.num_tokens, chunks.start, table.astype(np.int32))
        for i, table in enumerate(tables)
    ]
    on_device = [mx.array(chunk.block_table) for chunk in described]
    length = kernels.length(seq_len)
    mx.eval(pool.keys, pool.values, queries, ticket, on_device, length[1])

    def collected(out: mx.array) -> mx.array:
        for _ in range(_CHUNK_CHAIN):
            parts = []
            for chunk, table in zip(described, on_device, strict=True):
                keys, values = kernels.collect(pool, table, length, ticket)
                q = out[chunk.first_row : chunk.first_row + chunk.num_tokens].transpose(1, 0, 2)
                part = mx.fast.scaled_dot_product_attention(
                    q[None], keys[None], values[None], scale=scale, mask="causal"
                )
                parts.append(part.squeeze(0).transpose(1, 0, 2))
            out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return out

    mx.eval(queries)
    start = time.perf_counter()
    mx.eval(collected(queries))
    times = {"sdpa_first_s": time.perf_counter() - start}
    times["sdpa_s"] = statistics.median(seconds_of_chain(collected, queries, rounds)) / _CHUNK_CHAIN
    if kernels.takes_chunks(pool):
        plan = ChunkPlan.of(described, 0, kernels.tile_shape)
        mx.eval(plan.block_table, plan.chunks, plan.tiles)

        def paged(out: mx.array) -> mx.array:
            for _ in range(_CHUNK_CHAIN):
                out = kernels.prefill(out, pool, plan, ticket, scale=scale)
            return out

        times["paged_s"] = statistics.median(seconds_of_chain(paged, queries, rounds)) / _CHUNK_CHAIN
    return times


class _NoAttention(PagedView):
    """A cache whose attention gives the queries back."""

    def __init__(self, num_rows: int) -> None:
        self.offset = mx.zeros((num_rows,), mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(self, queries: mx.array, **_: Any) -> mx.array:
        return mx.contiguous(queries)  # products take whole rows


def layers_of(model: str) -> tuple[list[FusedDecoderBlock], int]:
    """So many of a model's layers that no cache holds their weights, random ones, and the bytes of one."""
    config = llama_config(MODELS[model]) | {"num_hidden_layers": 4, "vocab_size": 128}
    tables = RotaryTables()
    blocks = [FusedDecoderBlock(block, tables) for block in random_llama(config, mx.bfloat16).layers]
    mx.clear_cache()
    return blocks, sum(int(array.nbytes) for _, array in tree_flatten(blocks[0].parameters()))


def time_layer(blocks: Sequence[FusedDecoderBlock], num_rows: int, rounds: int) -> dict[str, float]:
    """Seconds of one layer, the median, by whose products."""
    x = mx.random.normal((num_rows, 1, blocks[0].output.weight.shape[0])).astype(mx.bfloat16)
    cache = _NoAttention(num_rows)
    mx.eval(x, cache.offset)

    def chain(out: mx.array) -> mx.array:
        for i in range(_CHAIN):
            out = blocks[i % len(blocks)](out, None, cache)
        return out

    times = {}
    for whose, gemv_rows, skinny_rows in (("gemv_s", num_rows, 0), ("skinny_gemm_s", 0, num_rows), ("mlx_s", 0, 0)):
        if skinny_rows > 0 and not all(block.takes_skinny for block in blocks):
            continue
        for block in blocks:
            block.set_rows(gemv_rows, skinny_rows)
        times[whose] = statistics.median(seconds_of_chain(chain, x, rounds)) / _CHAIN
    return times


def chosen_splits(shape: Shape) -> int:
    """As the fused backend chooses them."""
    return kernels_of(shape).num_splits(shape.num_rows, new_pool(shape, 1), shape.seq_len)


def time_layers(rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """`time_layer` of each, with a table."""
    timings, rows = [], []
    blocks: list[FusedDecoderBlock] = []
    num_bytes, of = 0, None
    for layer in tqdm(LAYERS, unit="layer", disable=None):
        if layer.model != of:
            blocks.clear()
            blocks, num_bytes = layers_of(layer.model)
            of = layer.model
        times = time_layer(blocks, layer.num_rows, rounds)
        timings.append(asdict(layer) | times | {"num_bytes": num_bytes})
        columns = [times["gemv_s"], times.get("skinny_gemm_s"), times["mlx_s"], num_bytes / bandwidth]
        rows.append([layer.model, str(layer.num_rows), *("" if s is None else number(1e6 * s) for s in columns)])
    head = [
        "a layer without attention",
        "rows",
        "gemv, us",
        "skinny_gemm, us",
        "MLX's, us",
        "its weights at the copy's bandwidth, us",
    ]
    print(f"\n{markdown_table(head, rows)}")
    return timings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit status."""
    args = parse_args(argv)
    result = new_result("kernels")
    if result is None:
        return 2
    checked = check_all(args.jobs)
    wrong = [entry for entry in checked if not entry["right"]]
    print(f"{len(checked) - len(wrong)} of {len(checked)} cases are right")
    for entry in wrong:
        found = entry.get("raised") or f"error {entry['error']:.2g}, at most {entry['tolerance']:g}"
        print(f"WRONG: {found}: {entry['case']}")
    result["checks"] = checked
    environment.write_json(args.out, result)
    bandwidth = copy_bandwidth(args.rounds)
    timings, rows = [], []
    for shape in tqdm(SHAPES, unit="shape", disable=None):
        chosen = chosen_splits(shape)
        every = [1 << i for i in range(8) if shape.seq_len >> i >= 64]
        for splits in every if args.sweep else [chosen]:
            taken = time_shape(shape, splits, args.rounds)
            share = shape.num_bytes / taken / bandwidth
            timings.append({**asdict(shape), "splits": splits, "chosen": splits == chosen, "s": taken, "share": share})
            rows.append(
                [
                    f"{shape.num_rows} x {shape.seq_len:,}, head {shape.head_dim}{', int8' * shape.quantized}",
                    f"{splits}{' *' if splits == chosen else ''}",
                    number(taken * 1e6),
                    number(shape.num_bytes / taken / 1e9, 0),
                    number(100 * share, 0, " %"),
                    "" if shape.target is None else number(100 * shape.target, 0, " %"),
                ]
            )
    print(f"\n{environment.headline(result['environment'])}\ncopy: {bandwidth / 1e9:,.0f} GB/s\n")
    print(markdown_table(["sequences x tokens", "splits", "us", "GB/s", "of the copy", "target"], rows))
    result |= {"copy_bytes_per_s": bandwidth, "timings": timings}
    environment.write_json(args.out, result)
    chunk_timings, rows = [], []
    for chunks in tqdm(CHUNKS, unit="chunks", disable=None):
        times = time_chunks(chunks, args.rounds)
        chunk_timings.append(asdict(chunks) | times)
        paged = times.get("paged_s")
        rows.append(
            [
                f"{chunks.num_chunks} x {chunks.num_tokens:,} after {chunks.start:,}, head {chunks.head_dim}",
                "" if paged is None else number(paged * 1e6),
                number(times["sdpa_s"] * 1e6),
                "" if paged is None else number(times["sdpa_s"] / paged, 2),
                "" if paged is None else number(chunks.num_flops / paged / 1e12, 0),
                number(times["sdpa_first_s"] * 1e3),
            ]
        )
    head = ["chunks x tokens", "paged, us", "collected + MLX's, us", "ratio", "paged, TFLOP/s", "MLX's first call, ms"]
    print(f"\n{markdown_table(head, rows)}")
    result["chunks"] = chunk_timings
    environment.write_json(args.out, result)
    if blocks_run_here():
        result["layers"] = time_layers(args.rounds, bandwidth)
        environment.write_json(args.out, result)
    print(f"\nWritten: {args.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
