from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.workers import Worker, WorkerError, WorkerTimeout

ECHO = "tests.loadtest.echo_worker"


def test_calls_are_answered_in_order_and_errors_leave_the_worker_alive(tmp_path: Path) -> None:
    with Worker(ECHO, tmp_path / "log") as worker:
        assert worker.call("echo", 60, a=[1, 2], b="ü") == {"a": [1, 2], "b": "ü"}
        with pytest.raises(WorkerError, match="ValueError: no such thing"):
            worker.call("fail", 60)
        assert worker.call("noise", 60) == "clean"
        assert worker.call("foreign", 60) == []
    assert "and so does C code" in (tmp_path / "log").read_text()


def test_a_worker_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    with Worker(ECHO, tmp_path / "log") as worker:
        worker.call("echo", 60)
        with pytest.raises(WorkerTimeout, match="within 0 s"):
            worker.call("sleep", 0.1, seconds=600)
        with pytest.raises(WorkerError, match="has been stopped"):
            worker.call("echo", 60)


def test_a_worker_that_dies_says_its_last_words(tmp_path: Path) -> None:
    with Worker(ECHO, tmp_path / "log") as worker:
        worker.call("echo", 60)
        assert worker.alive
        with pytest.raises(WorkerError, match="ended"):
            worker.call("exit", 60, status=3)
        assert not worker.alive
        with pytest.raises(WorkerError, match="has been stopped"):
            worker.call("echo", 60)


@pytest.mark.parametrize(
    "module", ["bench_decode", "bench_kernels", "bench_kv_quality", "worker_gpu_quire", "worker_quire"]
)
def test_programs_with_our_engine_import_it_before_mlx(module: str) -> None:
    """Else MLX's products run on its own slow BLAS on a CPU."""
    code = f"import loadtest.{module}, mlx_engine.blas; print(mlx_engine.blas.preload_openblas().message)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.startswith("BLAS: ")
    assert "mlx.core was imported before" not in run.stdout + run.stderr


def test_the_peers_process_holds_nothing_of_ours_but_the_blas_loader() -> None:
    code = (
        "import loadtest.worker_mlx_lm as w; from loadtest.worker_protocol import foreign_modules as f;"
        "print(f(w._ALLOWED))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.strip() == "[]"
