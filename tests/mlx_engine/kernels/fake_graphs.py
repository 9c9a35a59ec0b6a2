"""Recorded graphs without a GPU: a launch calls the recorded step again, on what its inputs hold by then."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from tests.mlx_engine.kernels.executors import on_host


class FakeRecording:
    """One step."""

    def __init__(self, build: Callable[[], mx.array]) -> None:
        self._build = build

    def launch(self) -> None:
        """Runs it, at once."""
        mx.eval(self._build())


class FakeFetch:
    """Numbers as they were when they were asked for."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def wait(self) -> list[int]:
        """See Fetch."""
        return self._numbers


class FakeGraphs:
    """Stands in for `native.graphs.Graphs`. After `refuse_after` recordings it refuses, as CUDA may."""

    def __init__(self, refuse_after: int | None = None) -> None:
        self._refuse_after = refuse_after
        self.overlap = True
        self.num_recorded = 0
        self.written: list[tuple[int, ...]] = []  # shapes of what write_rows wrote to

    def record(self, build: Callable[[], mx.array], overlap: bool | None = None) -> FakeRecording:
        """See Graphs. Nothing overlaps here."""
        del overlap
        if self.num_recorded == self._refuse_after:
            raise RuntimeError("instantiating the graph: out of memory")
        self.num_recorded += 1
        mx.eval(build())
        mx.eval(build())
        return FakeRecording(build)

    def write_rows(self, target: mx.array, rows: bytes, num_rows: int, num_columns: int) -> None:
        """See Graphs: into the array's own memory."""
        self.written.append(target.shape)
        values = np.frombuffer(rows, np.int32).reshape(num_rows, num_columns)
        on_host(target)[:num_rows, :num_columns] = values

    def fetch(self, source: mx.array, count: int) -> FakeFetch:
        """See Graphs."""
        return FakeFetch(on_host(source)[:count].tolist())
