"""The library is compiled once, and what prevents that is said in a line."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_engine.native import NativeUnavailable, build
from mlx_engine.native.build import build_native
from mlx_engine.native.library import open_library, wanted_threads


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def _compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_processes_that_start_together_compile_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    compiler = _compiler(tmp_path, f'echo "$@" >> {log}; exec g++ "$@"')
    code = "from mlx_engine.native import load_native; print(load_native().panel_width)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "CXX": compiler}
        )
        for _ in range(2)
    ]
    widths = {process.communicate(timeout=300)[0].strip() for process in processes}
    assert len(widths) == 1
    assert int(widths.pop()) > 0
    links = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert len(links) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


def test_another_source_flag_or_compiler_gets_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolchain = build._find_toolchain()
    keys = {build._key(build._CPU, toolchain, ()), build._key(build._CPU, toolchain, ("-O1",))}
    (tmp_path / "gemm.cpp").write_text("int main() {}")
    keys.add(build._key(dataclasses.replace(build._CPU, sources=tmp_path), toolchain, ()))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    keys.add(build._key(build._CPU, toolchain, ()))
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("[ $1 = --version ] && echo g++ 1 && exit; echo 'x.cpp:3: error: no such thing' >&2; exit 1", "no such thing"),
        ("exit 3", "exit status 3"),
        ("[ $1 = --version ] && echo g++ 1 && exit; true", "succeeds but writes nothing"),
        ("printf '\\377'; exit 1", "which CXX names, fails"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", _compiler(tmp_path, script))
    with pytest.raises(NativeUnavailable, match=message):
        build_native()
    assert not list(cache.glob("*/*.so"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("g++ 'x", "CXX is not a command.*No closing quotation"),
        ("/nonexistent/g++", "/nonexistent/g.*which CXX names, can't be run: No such file"),
    ],
)
def test_a_command_that_is_none_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(NativeUnavailable, match=message):
        build_native()


def test_a_damaged_library_is_compiled_again_and_what_was_left_is_cleared_away(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "calls"
    monkeypatch.setenv("CXX", _compiler(tmp_path, f'echo "$@" >> {log}; exec g++ "$@"'))
    told: list[str] = []

    def build_and_count() -> tuple[Path, int]:
        log.write_text("")
        library = build_native(("-O0",), lambda: told.append("compiling"))
        return library, log.read_text().count("-shared")

    library, count = build_and_count()
    assert (count, len(told)) == (1, 1)
    assert build_and_count() == (library, 0)
    left = cache / f"{library.parent.name}abc"
    left.mkdir()
    content = library.read_bytes()
    for damaged in (content[: len(content) // 2], content[:-1] + b"x", b""):
        library.write_bytes(damaged)
        assert build_and_count() == (library, 1)
    assert len(told) == 4
    # Not before: writing to a file that is loaded would end this process.
    assert open_library(library).num_threads >= 1
    assert not left.exists()


def test_what_is_missing_is_named_with_its_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CXX", raising=False)
        with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler.*apt install g\+\+"):
            build_native()
    with monkeypatch.context() as patch:
        patch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        with pytest.raises(NativeUnavailable, match=r"headers are missing.*python3-dev"):
            build_native()
    with monkeypatch.context() as patch:
        patch.setattr(build.sys, "platform", "darwin")
        with pytest.raises(NativeUnavailable, match="for Linux"):
            build_native()


def test_a_cache_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(NativeUnavailable, match="set QUIRE_CACHE_DIR"):
        build_native()


@pytest.mark.parametrize("content", [b"", b"not a library", None])
def test_a_damaged_library_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / f"{build.MODULE_NAME}.so"
    # Not what `build_native` would hand out: a library that isn't a Python module, or not a library at all.
    path.write_bytes(Path(build._find_toolchain().libmlx).read_bytes() if content is None else content)
    with pytest.raises(NativeUnavailable, match="can't be used"):
        open_library(path)


def test_threads_are_counted_as_openblas_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    assert wanted_threads() == 5
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert wanted_threads() == 3
    for value in ("", "0", "many", "²"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert wanted_threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "4294967296")
    assert wanted_threads() == 256
