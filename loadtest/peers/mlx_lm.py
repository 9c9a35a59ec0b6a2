"""mlx-lm's own server, in an environment of its own, on MLX's reference BLAS or with OpenBLAS preloaded."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from loadtest.peers.base import (
    MAX_SEQUENCES,
    PORT,
    Launch,
    LevelLimit,
    PeerServer,
    PeerUnavailableError,
    Setup,
    Spec,
    Weights,
)
from loadtest.peers.venvs import PeerVenv, site_packages, versions

_PACKAGES = ("mlx-lm", "mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-13")  # those of ours that are installed, as ours are
_OPENBLAS = "cmeel-openblas"
_LIBRARY = "cmeel.prefix/lib/libopenblas.so.0"
_FORTRAN, _FORTRAN_FOLDER = "libgfortran.so.5", "fortran"
_PROMPT_CONCURRENCY = 8
_SLOW = LevelLimit(4, "MLX's reference BLAS gives about 8 tokens/s, so more clients would only wait longer")


class MLXLMPeer:
    """`python -m mlx_lm.server` with float32 weights. It has no `ignore_eos`, and caches prompts."""

    def __init__(self, cache: Path, *, openblas: bool) -> None:
        self._folder = cache / "mlx-lm"
        self._openblas = openblas

    @property
    def spec(self) -> Spec:
        """As it comes on Linux it is slow: its level is limited."""
        if self._openblas:
            return Spec("mlx-lm-openblas", "mlx-lm + OpenBLAS", "float32", ignore_eos=False)
        limit = _SLOW if sys.platform == "linux" else None
        return Spec("mlx-lm", "mlx-lm", "float32", ignore_eos=False, level_limit=limit)

    def install(self, setup: Setup) -> dict[str, str]:
        """One environment for both ways to run it: a library that isn't preloaded changes nothing."""
        if self._openblas and (sys.platform != "linux" or platform.machine() != "x86_64"):
            raise PeerUnavailableError("MLX uses a BLAS that can be replaced on Linux only, and the OpenBLAS that "
                                       "comes with Quire is for x86-64")  # fmt: skip
        wanted = [name for name in (*_PACKAGES, _OPENBLAS) if _our_version(name) is not None]
        requirements = tuple(f"{name}=={_our_version(name)}" for name in wanted)
        check = ("python", "-c", "import mlx.core, mlx_lm.server")
        folder = PeerVenv("mlx-lm", (requirements,), check, finish=_link_fortran).ensure(setup)
        return versions(folder, [*(name for name in wanted if self._openblas or name != _OPENBLAS), "transformers"])

    def launch(self, weights: Weights) -> Launch:
        """The model is the one that the server was started with: any other name would be looked up on the hub."""
        environment = {"HF_HUB_OFFLINE": "1"}
        if self._openblas:
            environment["LD_PRELOAD"] = str(site_packages(self._folder) / _LIBRARY)
            if (self._folder / _FORTRAN_FOLDER).is_dir():
                environment["LD_LIBRARY_PATH"] = str(self._folder / _FORTRAN_FOLDER)
        command = (
            str(self._folder / "bin/python"), "-m", "mlx_lm.server", "--model", str(weights.hf_float32),
            "--host", "127.0.0.1", "--port", PORT,
            "--decode-concurrency", str(MAX_SEQUENCES), "--prompt-concurrency", str(_PROMPT_CONCURRENCY),
        )  # fmt: skip
        return Launch(command, "default_model", environment)

    def server(self, launch: Launch, log: Path, timeout_s: float) -> PeerServer:
        """Ready within seconds."""
        return PeerServer(launch, log, timeout_s)


def _our_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _link_fortran(folder: Path) -> None:
    """Puts the Fortran runtime that mlx-cpu bundles where OpenBLAS finds it by its ordinary name.

    Slim systems lack libgfortran.so.5. The bundled file is the same one that MLX loads, so it is loaded once.
    """
    bundled = site_packages(folder) / "mlx_cpu.libs"
    runtime = next(bundled.glob("libgfortran-*.so*"), None)
    if runtime is None:
        return
    links = folder / _FORTRAN_FOLDER
    links.mkdir(exist_ok=True)
    for name, target in [(_FORTRAN, runtime), *((path.name, path) for path in bundled.glob("libquadmath-*.so*"))]:
        (links / name).unlink(missing_ok=True)
        (links / name).symlink_to(target)
