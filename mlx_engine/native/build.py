"""Compiles our MLX extensions for this machine, once each."""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import filelock
import mlx.core as mx

from mlx_engine.folders import cache_folder

logger = logging.getLogger(__name__)

MODULE_NAME = "_quire_native"
GRAPHS_NAME = "_quire_graphs"

_HERE = Path(__file__).parent
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG")
# Types of mlx.core can be passed only by modules of the same domain and the same nanobind.
_DOMAIN = "-DNB_DOMAIN=mlx"
_COMMAND_TIMEOUT_S = 120.0
_LOCK_TIMEOUT_S = 600.0


# Told that something has to be compiled, before it is.
Starting = Callable[[], None]


class NativeUnavailable(Exception):
    """The native library can't be had here; the message says why and what to install."""


@dataclass(frozen=True, slots=True)
class _Toolchain:
    compiler: list[str]
    version: str
    includes: tuple[Path, ...]
    nanobind: Path
    libmlx: Path


@dataclass(frozen=True, slots=True)
class _Extension:
    """What one of our modules is made of, beside what all are."""

    name: str
    what: str  # for messages
    sources: Path
    includes: tuple[Path, ...] = ()
    libraries: tuple[str, ...] = ()


_CPU = _Extension(MODULE_NAME, "the native CPU library", _HERE / "src")


def build_native(flags: Sequence[str] = (), starting: Starting | None = None) -> Path:
    """The native library's file, compiled now if it isn't in the cache or is damaged. `flags` come after our own.

    It is kept under a name made of everything that it depends on: sources, flags, compiler, processor, Python, mlx and
    nanobind. Processes that ask at the same time wait for the first. starting() is called if it has to be compiled.
    Raises NativeUnavailable.
    """
    return _build(_CPU, flags, starting)


def build_graphs() -> Path:
    """The same for the extension that records CUDA graphs, which needs CUDA's headers too."""
    sources = _HERE / "cuda_src"
    libraries = _mapped("libcuda.so")
    if not libraries:
        raise NativeUnavailable("MLX has not loaded CUDA's driver")
    includes = (sources, *_cuda_includes())
    return _build(_Extension(GRAPHS_NAME, "the extension for CUDA graphs", sources, includes, libraries), (), None)


def _build(extension: _Extension, flags: Sequence[str], starting: Starting | None) -> Path:
    if sys.platform != "linux":
        raise NativeUnavailable(f"{extension.what} is for Linux, not {sys.platform}")
    toolchain = _find_toolchain()
    folder = cache_folder() / "native" / _key(extension, toolchain, flags)
    library = folder / f"{extension.name}.so"
    try:
        if _is_intact(library):
            return library
        if starting is not None:
            starting()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(folder.name + ".lock"), timeout=_LOCK_TIMEOUT_S):
            if not _is_intact(library):
                # What a process that was killed while it compiled has left, or somebody has damaged.
                for left in folder.parent.glob(f"{folder.name}*/"):
                    shutil.rmtree(left)
                _compile_into(folder, extension, toolchain, flags)
    except filelock.Timeout as error:
        raise NativeUnavailable(f"another process has been compiling in {folder} for {_LOCK_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise NativeUnavailable(f"{folder} can't be written: {error}; set QUIRE_CACHE_DIR to another folder") from error
    return library


def _is_intact(library: Path) -> bool:
    """Whether the file is there and is what was compiled: one cut short would end the process that loads it."""
    checksum = library.with_suffix(".sha256")
    if not library.is_file() or not checksum.is_file():
        return False
    return checksum.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()


def _compiler() -> list[str]:
    """The C++ compiler's command. Raises NativeUnavailable if there is none."""
    command = os.environ.get("CXX", "").strip() or next(filter(shutil.which, _COMPILERS), None)
    if command is None:
        raise NativeUnavailable("there is no C++ compiler: install one, for example with `apt install g++`")
    try:
        return shlex.split(command)
    except ValueError as error:
        raise NativeUnavailable(f"CXX is not a command: {command!r} ({error})") from error


def _find_toolchain() -> _Toolchain:
    compiler = _compiler()
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise NativeUnavailable("Python's headers are missing: install them, as with `apt install python3-dev`")
    try:
        nanobind = Path(str(metadata.distribution("nanobind").locate_file("nanobind")))
    except metadata.PackageNotFoundError as error:
        raise NativeUnavailable("nanobind is not installed: `pip install nanobind==3.1.0`") from error
    mlx = Path(mx.__file__).parent
    libmlx = mlx / "lib" / "libmlx.so"
    if not libmlx.is_file() or not (mlx / "include").is_dir():
        raise NativeUnavailable(f"MLX's headers or its library are not in {mlx}")
    includes = (nanobind / "include", nanobind / "ext/robin_map/include", python, mlx / "include")
    return _Toolchain(compiler, _run([*compiler, "--version"]).partition("\n")[0], includes, nanobind, libmlx)


def _mapped(name: str) -> tuple[str, ...]:
    """The file of a library that is loaded in this process, or nothing."""
    paths = re.findall(rf"\s(/\S*/{re.escape(name)}\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return tuple(paths[:1])


def _cuda_includes() -> list[Path]:
    """Folders with CUDA's headers. Raises NativeUnavailable if there are none."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    folders = [home / "include" for home in homes]
    folders += [Path(path) / "nvidia" / part / "include" for path in sys.path for part in ("cu13", "cuda_runtime")]
    found = next((folder for folder in folders if (folder / "cuda_runtime.h").is_file()), None)
    if found is None:
        raise NativeUnavailable("CUDA's headers are not found: set CUDA_HOME to where CUDA is installed")
    return [found, *([found / "cccl"] if (found / "cccl").is_dir() else [])]


def _key(extension: _Extension, toolchain: _Toolchain, flags: Sequence[str]) -> str:
    parts = [
        extension.name,
        *map(str, extension.includes),
        *_FLAGS,
        *flags,
        *toolchain.compiler,
        toolchain.version,
        _processor(),
        str(sysconfig.get_config_var("SOABI")),
        metadata.version("mlx"),
        metadata.version("nanobind"),
    ]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(extension.sources.rglob("*.*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        information = Path("/proc/cpuinfo").read_text()
    except OSError:
        information = ""
    lines = (re.search(rf"^{name}\s*:.*$", information, re.MULTILINE) for name in ("model name", "flags", "Features"))
    return " ".join([platform.machine(), *(line[0] for line in lines if line)])


def _compile_into(folder: Path, extension: _Extension, toolchain: _Toolchain, flags: Sequence[str]) -> None:
    logger.info("compiling %s (once, some 10 s on two cores)", extension.what)
    start = time.monotonic()
    includes = [part for path in (*extension.includes, *toolchain.includes) for part in ("-isystem", str(path))]
    command = [*toolchain.compiler, *_FLAGS, *flags, _DOMAIN, *includes]
    sources = [toolchain.nanobind / "src" / "nb_combined.cpp", *sorted(extension.sources.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as scratch:
        objects = [Path(scratch, source.stem + ".o") for source in sources]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor:
            jobs = [
                [*command, "-c", str(source), "-o", str(target)]
                for source, target in zip(sources, objects, strict=True)
            ]
            list(executor.map(_run, jobs))
        library = Path(scratch, f"{extension.name}.so")
        libraries = [str(toolchain.libmlx), *extension.libraries, "-lpthread"]
        _run([*command, "-shared", *map(str, objects), *libraries, "-o", str(library)])
        if not library.is_file():
            raise NativeUnavailable(f"the C++ compiler {shlex.join(toolchain.compiler)} succeeds but writes nothing")
        checksum = library.with_suffix(".sha256")
        checksum.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        folder.mkdir(exist_ok=True)
        library.replace(folder / library.name)
        checksum.replace(folder / checksum.name)
    logger.info("compiled %s in %.1f s: %s", extension.what, time.monotonic() - start, folder)


def _run(command: Sequence[str]) -> str:
    """What the command prints. Raises NativeUnavailable with its first error."""
    source = ", which CXX names," if os.environ.get("CXX") else ""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise NativeUnavailable(f"the C++ compiler {command[0]!r}{source} can't be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(
            f"the C++ compiler {command[0]!r}{source} has not ended after {_COMMAND_TIMEOUT_S:g} s"
        ) from error
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailable(f"the C++ compiler {command[0]!r}{source} fails: {first}")
    return result.stdout
