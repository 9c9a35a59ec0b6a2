"""This server, through Serve's HAProxy or through Serve's own proxy."""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path
from types import TracebackType

from loadtest import environment
from loadtest.peers import commands
from loadtest.peers.base import MODEL_NAME, Launch, Setup, Spec, Weights
from loadtest.peers.commands import StepError
from loadtest.serve_process import ServeError, ServeProcess, read_config

_CONFIG = Path(__file__).parent.parent.parent / "configs/local.yaml"
_PACKAGES = ("mlx-quire", "mlx", "mlx-lm", "ray", "cmeel-openblas")


class QuirePeer:
    """`quire serve configs/local.yaml` on a port of its own, with or without --no-haproxy."""

    def __init__(self, *, haproxy: bool) -> None:
        self._flags = () if haproxy else ("--no-haproxy",)
        proxy = "haproxy" if haproxy else "proxy"
        self._spec = Spec(f"quire-{proxy}", f"Quire ({'HAProxy' if haproxy else 'Serve proxy'})", "float32")

    @property
    def spec(self) -> Spec:
        """Its matrix products are float32 on a CPU: `dtype: auto`."""
        return self._spec

    def install(self, setup: Setup) -> dict[str, str]:
        """Nothing to install: it is what runs this."""
        del setup
        found = {}
        for package in _PACKAGES:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        # Its code changes while its version doesn't: a sweep of another commit must not be taken for one of this.
        described = environment.describe()
        found["commit"] = (described["commit"] or "unknown")[:12] + ("+" if described["uncommitted_changes"] else "")
        return found

    def launch(self, weights: Weights) -> Launch:
        """The config's own model is the file that all weights are made from."""
        del weights
        return Launch(("quire", "serve", f"configs/{_CONFIG.name}", *self._flags), MODEL_NAME)

    def server(self, launch: Launch, log: Path, timeout_s: float) -> QuireServer:
        """A ServeProcess whose log ends up in `log`."""
        return QuireServer(self._flags, launch.model, log, timeout_s)


class QuireServer:
    """`ServeProcess` as the comparison wants it: its log kept, its failures StepErrors."""

    def __init__(self, flags: tuple[str, ...], model: str, log: Path, timeout_s: float) -> None:
        self._flags = flags
        self._log = log
        self._timeout_s = timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: ServeProcess | None = None
        self.base_url = ""  # known once it is started
        self.model = model
        self.ready_s: float | None = None

    def __enter__(self) -> QuireServer:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-compare-")
        try:
            self._process = ServeProcess(
                read_config(_CONFIG, {}), Path(self._folder.name), self._timeout_s, self._flags
            )
            self._process.__enter__()
        except ServeError as error:
            self._clean_up()
            raise StepError(commands.without_paths(str(error))) from error
        except BaseException:
            self._clean_up()
            raise
        self.base_url, self.ready_s = self._process.base_url, self._process.ready_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._process is not None:
                self._process.stop()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        assert self._folder is not None
        written = Path(self._folder.name) / "serve.log"
        if written.exists():
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(written.read_bytes())
        self._folder.cleanup()
