"""OpenBLAS really answers MLX's matrix products. Subprocesses: what is loaded first can't be undone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_engine import blas

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not blas.preload_openblas().needed, reason="MLX's Linux CPU build only"
)

PRODUCT = """
import mlx.core as mx, numpy as np
a, b = np.random.default_rng(0).standard_normal((2, 96, 96)).astype(np.float32)
assert np.allclose(np.array(mx.array(a) @ mx.array(b)), a @ b, atol=1e-4)
"""


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)


def _sgemm_binding(code: str) -> str:
    """The dynamic linker's own record of what libmlx's cblas_sgemm was bound to."""
    trace = _run(code, LD_DEBUG="bindings").stderr
    return next(line for line in trace.splitlines() if "libmlx.so" in line and "symbol `cblas_sgemm'" in line)


def test_importing_any_part_first_puts_openblas_in_charge() -> None:
    code = "from mlx_engine.types import Request\n" + PRODUCT
    assert "libopenblas" in _sgemm_binding(code).split(" to ")[1]
    assert "libopenblas" not in _sgemm_binding(PRODUCT).split(" to ")[1]  # what it saves from


def test_products_are_right_and_the_library_is_mapped() -> None:
    result = _run("import mlx_engine\n" + PRODUCT + "print('libopenblas' in open('/proc/self/maps').read())")
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr


def test_import_stays_light() -> None:
    code = "import sys, mlx_engine; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'numpy', 'pydantic')])"
    assert _run(code).stdout.strip() == "[]"


def test_threads_follow_the_environment_which_is_left_alone() -> None:
    code = (
        "import os; before = dict(os.environ); from mlx_engine.blas import preload_openblas;"
        "print(preload_openblas().num_threads, dict(os.environ) == before)"
    )
    assert _run(code, OPENBLAS_NUM_THREADS="1").stdout.split() == ["1", "True"]


def test_mlx_imported_first_is_warned_about() -> None:
    result = _run("import mlx.core, mlx_engine\nprint(mlx_engine.blas.preload_openblas().active)")
    assert result.stdout.strip() == "False"
    assert "import mlx_engine first" in result.stderr


def test_openblas_that_is_there_already_needs_nothing() -> None:
    code = "import mlx.core, mlx_engine\nprint(mlx_engine.blas.preload_openblas().active)"
    library = blas.preload_openblas().library
    assert library is not None
    preloaded = "import ctypes, mlx_engine.blas as b; b._open_global(" + repr(library) + "); import mlx.core;"
    again = "b.preload_openblas.cache_clear(); print(b.preload_openblas().library)"
    assert _run(preloaded + again).stdout.strip() == "already in the process"
    assert _run(code).stdout.strip() == "False"


def test_missing_openblas_warns_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blas, "_global_openblas", lambda: None)
    monkeypatch.setattr(blas, "_candidates", lambda: ["libnothere.so.0"])
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with caplog.at_level(logging.INFO):
        status = blas.preload_openblas.__wrapped__()
    assert (status.active, status.needed) == (False, True)
    assert "libnothere.so.0" in status.message
    assert "pip install cmeel-openblas" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_library_for_newer_processors_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "libopenblas.so.0"
    library.write_bytes(b"\x7fELF ... SKYLAKEX ...")
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(blas, "_has_avx512", lambda: False)
    with pytest.raises(OSError, match="AVX-512"):
        blas._check_instructions(str(library))
    library.write_bytes(b"\x7fELF ... DYNAMIC_ARCH ... SKYLAKEX ...")
    blas._check_instructions(str(library))
    monkeypatch.setattr(blas, "_has_avx512", lambda: True)
    library.write_bytes(b"\x7fELF ... SKYLAKEX ...")
    blas._check_instructions(str(library))


def test_idle_threads_sleep_early_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    with blas._thread_timeout():
        assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "14"
    assert "OPENBLAS_THREAD_TIMEOUT" not in os.environ
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "26")
    with blas._thread_timeout():
        assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "26"
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "26"


def test_fortran_runtime_of_the_wheels_serves_where_the_system_has_none() -> None:
    code = (
        "import ctypes; from mlx_engine import blas\n"
        "assert blas._open_bundled_gfortran()\n"
        "names = [line.split()[-1] for line in open('/proc/self/maps') if 'libgfortran.so.5' in line]\n"
        "ctypes.CDLL('libgfortran.so.5'); print(bool(names))"
    )
    result = _run(code)
    assert result.stdout.strip() == "True", result.stderr


def test_cuda_build_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_distribution_path", lambda name, path: path if name.startswith("mlx-cuda") else None)
    status = blas.preload_openblas.__wrapped__()
    assert (status.active, status.needed) == (False, False)
