"""Puts OpenBLAS in front of the reference BLAS that MLX's Linux CPU build links.

MLX calls `cblas_sgemm` through the dynamic linker. A library opened with RTLD_GLOBAL before `mlx.core` comes earlier in
the linker's search order than MLX's own dependencies, so its `cblas_sgemm` is the one that gets bound.
Imports nothing of MLX: it has to run first.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

logger = logging.getLogger(__name__)

_OPENBLAS = "libopenblas.so.0"
_GFORTRAN = "libgfortran.so.5"
_CUDA_DISTRIBUTIONS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_SLOW = "float32 matrix products run on the reference BLAS, about 80 times slower"
# Cycles, as a power of two, that OpenBLAS's idle threads wait for work in a loop before they sleep. Its own 26 keeps a
# core from MLX's other threads through each step: on 2 cores steps take 5 to 10 percent longer.
_THREAD_TIMEOUT = "14"
_TIMEOUT_VARIABLE = "OPENBLAS_THREAD_TIMEOUT"
_INSTALL = "install it with `pip install cmeel-openblas` (x86 with AVX-512) or `apt install libopenblas0-pthread`"


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """What MLX's CPU matrix products run on."""

    active: bool  # whether OpenBLAS answers for cblas_sgemm
    needed: bool  # False where MLX doesn't use a CPU BLAS of ours: not Linux, or a CUDA build
    library: str | None  # path or soname of the OpenBLAS in use
    num_threads: int | None  # OpenBLAS's own count, from OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or the cores
    message: str  # one line for the log


@functools.cache
def preload_openblas() -> BlasStatus:
    """Loads OpenBLAS ahead of MLX, once a process; later calls return the first one's answer.

    Call it before `mlx.core` is imported: afterwards the symbols are bound already, and this warns. Changes neither
    the environment nor the disk. OpenBLAS itself reads OPENBLAS_NUM_THREADS, OMP_NUM_THREADS, OPENBLAS_CORETYPE and
    OPENBLAS_THREAD_TIMEOUT while it loads. Never raises: without OpenBLAS MLX works, slowly, and the log says so.
    """
    status = _preload()
    logger.log(logging.INFO if status.active or not status.needed else logging.WARNING, "%s", status.message)
    return status


def _preload() -> BlasStatus:
    if sys.platform != "linux":
        return BlasStatus(False, False, None, None, "BLAS: MLX brings its own on this platform")
    if any(_distribution_path(name, ".") for name in _CUDA_DISTRIBUTIONS):
        return BlasStatus(False, False, None, None, "BLAS: a CUDA build of MLX is installed, OpenBLAS is not loaded")
    if _global_openblas() is not None:
        return _active("already in the process")
    if "mlx.core" in sys.modules:
        return _inactive("mlx.core was imported before mlx_engine", "import mlx_engine first")
    failures: list[str] = []
    for candidate in _candidates():
        try:
            _check_instructions(candidate)
            with _thread_timeout():
                _open_global(candidate)
        except OSError as error:
            failures.append(str(error))
        else:
            return _active(candidate)
    return _inactive(f"no OpenBLAS could be loaded ({'; '.join(failures)})", _INSTALL)


def _active(library: str) -> BlasStatus:
    threads = None
    openblas = _global_openblas()
    if openblas is not None:
        threads = int(openblas.openblas_get_num_threads())
    return BlasStatus(True, True, library, threads, f"BLAS: OpenBLAS, {threads} threads, {library}")


def _inactive(reason: str, remedy: str) -> BlasStatus:
    return BlasStatus(False, True, None, None, f"BLAS: {reason}, so {_SLOW}: {remedy}")


def _candidates() -> list[str]:
    """OpenBLAS libraries to try, best first: the one of our own dependency, then the system's."""
    bundled = _distribution_path("cmeel-openblas", f"cmeel.prefix/lib/{_OPENBLAS}")
    return [*([str(bundled)] if bundled else []), _OPENBLAS]


def _distribution_path(distribution: str, path: str) -> Path | None:
    try:
        found = Path(str(metadata.distribution(distribution).locate_file(path)))
    except metadata.PackageNotFoundError:
        return None
    return found if found.exists() else None


def _global_openblas() -> ctypes.CDLL | None:
    """The process's global symbols, if OpenBLAS is among them (LD_PRELOAD, or ourselves)."""
    symbols = ctypes.CDLL(None)
    return symbols if hasattr(symbols, "openblas_get_num_threads") else None


def _check_instructions(library: str) -> None:
    """Raises OSError for a library built for AVX-512 alone where the processor lacks it: its first product would crash.

    cmeel-openblas is such a build on x86-64 (OpenBLAS's SKYLAKEX target). One for many processors chooses by itself.
    """
    if os.sep not in library or platform.machine() != "x86_64":
        return
    content = Path(library).read_bytes()
    if b"DYNAMIC_ARCH" not in content and b"SKYLAKEX" in content and not _has_avx512():
        raise OSError(f"{library} needs a processor with AVX-512")


def _has_avx512() -> bool:
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return flags is not None and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags[1].split())


@contextmanager
def _thread_timeout() -> Iterator[None]:
    """Gives a library that is loaded inside our thread timeout, unless the user has set one."""
    if _TIMEOUT_VARIABLE in os.environ:
        yield
        return
    os.environ[_TIMEOUT_VARIABLE] = _THREAD_TIMEOUT
    try:
        yield
    finally:
        del os.environ[_TIMEOUT_VARIABLE]


def _open_global(library: str) -> None:
    """Opens library with RTLD_GLOBAL. Raises OSError, with the linker's words, if it can't be opened."""
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if _GFORTRAN not in str(error) or not _open_bundled_gfortran():
            raise
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _open_bundled_gfortran() -> bool:
    """Opens the Fortran runtime that mlx-cpu or numpy bundles, under its ordinary soname; whether that worked.

    cmeel-openblas needs libgfortran.so.5, which slim systems lack. The wheels beside it bundle one, renamed so that it
    serves only themselves. The linker takes an open library for a needed one when the sonames are equal, so an
    in-memory copy with the ordinary soname written back is enough, and nothing is written to disk.
    """
    for distribution, folder in (("mlx-cpu", "mlx_cpu.libs"), ("numpy", "numpy.libs")):
        libs = _distribution_path(distribution, folder)
        if libs is None:
            continue
        try:
            for runtime in sorted(libs.glob("libgfortran-*.so*")):
                # The bundled name of what the runtime needs is open already once it is opened by path.
                for needed in sorted(libs.glob("libquadmath-*.so*")):
                    ctypes.CDLL(str(needed))
                _open_renamed(runtime, _GFORTRAN)
                return True
        except OSError as error:
            logger.debug("the Fortran runtime in %s can't be used: %s", libs, error)
    return False


def _open_renamed(library: Path, soname: str) -> None:
    """Opens a copy of library whose soname, the same as its file name, is replaced by a shorter one."""
    old = library.name.encode() + b"\0"
    content = library.read_bytes().replace(old, soname.encode().ljust(len(old), b"\0"))
    descriptor = os.memfd_create(soname)
    try:
        with open(descriptor, "wb", closefd=False) as copy:
            copy.write(content)
        ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
