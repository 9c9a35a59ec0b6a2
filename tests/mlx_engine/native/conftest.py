"""The native library as this machine compiles it, and in the forms that it takes on other processors."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest

from mlx_engine.native import NativeLibrary
from mlx_engine.native.build import build_native
from mlx_engine.native.library import open_library

# Flags beside our own, and the floats in a register that they leave.
_FORMS = {"native": ((), None), "avx2": (("-march=x86-64-v3",), 8), "sse": (("-march=x86-64-v2",), 4)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform == "linux" and shutil.which("g++"):
        return
    for item in items:
        if "native" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs Linux and a C++ compiler"))


@pytest.fixture(scope="session", params=_FORMS)
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    """Compiled into the user's cache, as by an engine that starts; each form takes some seconds the first time."""
    flags, width = _FORMS[request.param]
    if flags and platform.machine() != "x86_64":
        pytest.skip("a form of x86-64")
    library = open_library(build_native(flags))
    assert width is None or library.vector_width == width
    return library
