"""Peers that need nothing but Python: their server is a script, and what goes wrong with them is the test's to say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from loadtest.peers.base import PORT, Launch, LevelLimit, PeerServer, PeerUnavailableError, Setup, Spec, Weights
from loadtest.peers.sweep import Sweep
from loadtest.stats import summary

# python -c SERVER PORT [dies|loads|refuses]
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
mode = sys.argv[2] if len(sys.argv) > 2 else ''
if mode == 'dies':
    print('no memory in /usr/share/x.py')
    sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)
    def do_GET(self):
        self.reply(503 if mode == 'loads' else 200, b'{}')
    def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        if mode == 'refuses':
            self.reply(500, b'out of memory')
        else:
            self.reply(200, json.dumps({'choices': [{'text': ' Paris'}]}).encode())
HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""

WEIGHTS_WORKER = (
    sys.executable,
    "-c",
    "import json; print(json.dumps({n: n for n in ('hf_float32', 'hf_bfloat16', 'gguf_shipped', 'gguf_bf16', "
    "'gguf_f32', 'sha256')}))",
)


class FakePeer:
    """A peer by name; `mode` goes to its server, `unavailable` is why it can't be installed."""

    def __init__(
        self, name: str, mode: str = "", unavailable: str | None = None, level_limit: LevelLimit | None = None
    ) -> None:
        self.spec = Spec(name, name.title(), "float32", level_limit=level_limit)
        self._mode = mode
        self._unavailable = unavailable
        self.version = "1.0"
        self.num_starts = 0

    def install(self, setup: Setup) -> dict[str, str]:
        """Nothing, or the reason why not."""
        del setup
        if self._unavailable is not None:
            raise PeerUnavailableError(self._unavailable)
        return {self.spec.name: self.version}

    def launch(self, weights: Weights) -> Launch:
        """The script."""
        del weights
        return Launch((sys.executable, "-c", SERVER, PORT, self._mode), "m")

    def server(self, launch: Launch, log: Path, timeout_s: float) -> PeerServer:
        """Counted."""
        self.num_starts += 1
        return PeerServer(launch, log, timeout_s)


def level(clients: int, tokens_per_second: float | None, **other: Any) -> dict[str, Any]:
    """A level as the load scenario writes it: latencies of 0.1 s, of 0.01 s between tokens."""
    return {
        "level": clients, "unit": "users", "duration_s": 1.0, "complete": True, "requests": 2 * clients, "failures": 0,
        "retries": 0, "unfinished": 0, "output_tokens": 100, "output_tokens_per_second": tokens_per_second,
        "requests_per_second": 1.0, "prompt_tokens": summary([100, 101]), "ttft_s": summary([0.10000123, 0.2]),
        "itl_s": summary([0.01, 0.02]), "e2e_s": summary([1.0, 3.0]), "server_metrics": None,
    } | other  # fmt: skip


def sweep_command(sweep: Sweep, base_url: str, model: str, result: Path) -> list[str]:
    """Writes a result with a level for each that is asked for, 10 tokens/s for each client."""
    del base_url, model
    generator = {"cpu_percent_max": 1.0, "cpu_percent_median": 1.0, "lag_ms_p99": 1.0, "saturated": False}
    content = {"levels": [level(n, 10.0 * n) for n in sweep.levels], "generator": generator, "errors": {}}
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    return [sys.executable, "-c", write, str(result.resolve()), json.dumps(content)]
