"""Where kernels run in these tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_engine import gpu, model_runner
from mlx_engine.attention import fused
from mlx_engine.attention.kernels import sampling, texts
from tests.mlx_engine.kernels.executors import HostKernel, MetalTextKernel

# Of the sampling kernel: a GPU's 1,024 threads take the host's fibers long to begin with.
_WARPS = 4


@pytest.fixture(params=["host", "metal", "gpu"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run."""
    if request.param == "gpu":
        if mx.default_device().type != mx.DeviceType.gpu:
            pytest.skip("needs a GPU")
        return "gpu"
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(texts, "kernel", {"host": HostKernel, "metal": MetalTextKernel}[request.param])
    monkeypatch.setattr(sampling, "SAMPLE_WARPS", _WARPS)
    return str(request.param)


@pytest.fixture(params=["host", "gpu"])
def matrix_dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run that use a warp's matrix instructions, which Metal's dialect doesn't have."""
    if request.param == "gpu":
        if not texts.has_matrix_instructions():
            pytest.skip("needs a GPU with matrix instructions")
        return "gpu"
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(texts, "kernel", HostKernel)
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    return "host"


@pytest.fixture
def bulk_dialect(matrix_dialect: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run that use bulk copies, too."""
    if matrix_dialect == "gpu" and not texts.has_bulk_copies():
        pytest.skip("needs a GPU with bulk copies")
    monkeypatch.setattr(texts, "has_bulk_copies", lambda: True)
    return matrix_dialect


@pytest.fixture(params=["warp", "warpgroup"])
def products(request: pytest.FixtureRequest, matrix_dialect: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose matrix instructions multiply in the prefill kernel."""
    if request.param == "warpgroup" and matrix_dialect == "gpu" and not texts.has_warpgroup_instructions():
        pytest.skip("needs a GPU with matrix instructions of four warps")
    monkeypatch.setattr(texts, "has_warpgroup_instructions", lambda: request.param == "warpgroup")
    return str(request.param)


@pytest.fixture
def kernels_on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the fused backend run here. Kernels on the host run at once, so nothing around them may be compiled."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(texts, "kernel", HostKernel)
    monkeypatch.setattr(sampling, "SAMPLE_WARPS", _WARPS)
    monkeypatch.setattr(fused, "kernels_run_here", lambda: True)
    # What the tests of the kernels have shown.
    monkeypatch.setattr(fused, "check_kernels", lambda *_: None)
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def gpu_path_on_host(kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets models be changed and samples be drawn as on a GPU, by the kernels, too."""
    monkeypatch.setattr(gpu, "blocks_run_here", lambda: True)
    monkeypatch.setattr(model_runner, "kernels_run_here", lambda: True)
