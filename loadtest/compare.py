"""This server against others on the same machine, the same weights and the same load.

Starts each peer in turn, runs the load scenario's concurrency sweep against it, and stops it; then all once more, so
that they alternate. Peers are installed once, into environments of their own in the user's cache. A sweep that is done
is kept: the same command again goes on where this one stopped.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest import environment
from loadtest.figures import write_figures
from loadtest.options import engine_overrides, exit_on_sigterm, int_list, positive_int, result_folder
from loadtest.peers.base import MODEL_NAME, PROBE_PROMPT, Launch, Peer, PeerUnavailableError, Setup, Weights, probe
from loadtest.peers.commands import StepError, without_paths
from loadtest.peers.registry import all_peers, chosen
from loadtest.peers.report import PeerRecord, render, trimmed_level
from loadtest.peers.sweep import KeptRounds, Sweep, SweepCommand, locust_command, machine_load, run_sweep, settings_key
from loadtest.peers.venvs import cache_folder
from loadtest.peers.weights import WORKER, ensure_weights
from loadtest.serve_process import ServeError

_WEIGHTS_TIMEOUT_S = 600.0
_BUSY = 0.25  # share of the cores that others may use before it is worth a warning
# Part of each kept sweep's key: raise it when what an entry holds changes.
_ENTRY_VERSION = 1


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. --quick replaces the sizes that aren't given by tiny ones."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.compare", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="these peers only, separated by commas")
    parser.add_argument("--levels", type=int_list, help="clients at once (default: 1,2,4,8,16,32,64)")
    parser.add_argument("--requests-per-user", type=positive_int, help="at each level (default: 2)")
    parser.add_argument("--input-tokens", type=positive_int, help="length of prompts (default: 100)")
    parser.add_argument("--output-tokens", type=positive_int, help="tokens out of each request (default: 64)")
    parser.add_argument("--rounds", type=positive_int, help="times that each peer is measured (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's prompts; the others count on from it")
    parser.add_argument("--level-timeout", type=positive_int, default=240, help="seconds for a level (default: 240)")
    parser.add_argument("--start-timeout", type=positive_int, default=600, help="seconds for a start (default: 600)")
    parser.add_argument("--install-timeout", type=positive_int, default=3600, help="seconds, each (default: 3600)")
    parser.add_argument("--out", type=result_folder, default="bench-results/compare", help="folder of what is written")
    parser.add_argument("--fresh", action="store_true", help="measure again what is kept in --out")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: to see that it works")
    args = parser.parse_args(argv)
    quick: dict[str, Any] = {
        "levels": [1, 4], "requests_per_user": 1, "input_tokens": 20, "output_tokens": 8, "rounds": 1,
    }  # fmt: skip
    full: dict[str, Any] = {
        "levels": [1, 2, 4, 8, 16, 32, 64], "requests_per_user": 2, "input_tokens": 100, "output_tokens": 64,
        "rounds": 2,
    }  # fmt: skip
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.levels = sorted(set(args.levels))
    args.only = args.only.split(",") if args.only else None
    return args


class Comparison:
    """Takes the peers through installation and rounds; a failure is recorded and the others go on."""

    def __init__(
        self,
        args: argparse.Namespace,
        peers: Sequence[Peer],
        cache: Path,
        sweep_command: SweepCommand = locust_command,
        weights_worker: Sequence[str] = WORKER,
    ) -> None:
        self._args = args
        self._sweep_command = sweep_command
        self._weights_worker = weights_worker
        self._logs = args.out / "logs"
        self._setup = Setup(cache, self._logs, args.install_timeout)
        self._kept = KeptRounds(args.out / "rounds")
        self._weights: Weights | None = None
        self._environment = environment.describe()
        self._bar: tqdm[None] | None = None
        self.records = [self._record(peer) for peer in peers]
        if args.fresh:
            self._kept.clear()

    def run(self) -> None:
        """Everything; the result file is written anew after each sweep. Ends a running server when interrupted."""
        with tqdm(total=len(self.records) * self._args.rounds, unit="sweep", file=sys.stderr) as bar:
            self._bar = bar
            self._install()
            for round_number in range(1, self._args.rounds + 1):
                for record in self.records:
                    if record.is_installed and self._weights is not None:
                        self._round(round_number, record)
                    bar.update()
                    self.write()

    def to_json(self) -> dict[str, Any]:
        """The result as it stands."""
        arguments = {name: without_paths(str(value)) if isinstance(value, Path) else value
                     for name, value in vars(self._args).items()}  # fmt: skip
        sha256 = None if self._weights is None else self._weights.sha256
        return {
            "benchmark": "compare",
            **self._environment,
            "arguments": arguments,
            "model": {"name": MODEL_NAME, "source_sha256": sha256, "probe_prompt": PROBE_PROMPT},
            "servers": [record.to_json() for record in self.records],
        }

    def write(self) -> None:
        """Writes compare.json."""
        environment.write_json(self._args.out / "compare.json", self.to_json())

    def _record(self, peer: Peer) -> PeerRecord:
        limit = peer.spec.level_limit
        levels = tuple(level for level in self._args.levels if limit is None or level <= limit.up_to)
        return PeerRecord(peer, levels, limited=len(levels) < len(self._args.levels))

    def _install(self) -> None:
        for record in self.records:
            self._stage(record.peer.spec.name, "install")
            if not record.levels and record.peer.spec.level_limit is not None:
                record.unavailable = f"no level of those asked for: {record.peer.spec.level_limit.reason}"
                continue
            try:
                record.versions = record.peer.install(self._setup)
                record.is_installed = True
            except PeerUnavailableError as error:
                record.unavailable = str(error)
                self._say(f"{record.peer.spec.name} is unavailable: {error}")
            except (StepError, OSError) as error:
                self._failed(record, f"install: {error}")
        self._stage("all", "weights")
        try:
            self._weights = ensure_weights(self._setup, _WEIGHTS_TIMEOUT_S, self._weights_worker)
        except (StepError, OSError) as error:
            for record in self.records:
                if record.is_installed:
                    self._failed(record, f"weights: {error}")

    def _round(self, round_number: int, record: PeerRecord) -> None:
        """One sweep of one peer, or the kept one."""
        assert self._weights is not None
        args, spec = self._args, record.peer.spec
        sweep = Sweep(
            record.levels, args.requests_per_user, args.input_tokens, args.output_tokens,
            args.seed + round_number - 1, args.level_timeout, spec.ignore_eos,
        )  # fmt: skip
        launch = record.peer.launch(self._weights)
        record.shown = launch.shown()
        key = settings_key({
            "entry": _ENTRY_VERSION, "name": spec.name, "versions": record.versions, **record.shown,
            "weights": self._weights.sha256, **sweep.key_settings(), "cores": self._environment["machine"]["cores"],
        })  # fmt: skip
        entry = self._kept.get(round_number, spec.name, key)
        if entry is not None:
            self._say(f"round {round_number}, {spec.name}: already measured on {entry['date']}, kept")
        else:
            entry = self._measure(round_number, record, launch, sweep)
            if entry is None:
                return
            self._kept.put(round_number, spec.name, key, entry)
        record.rounds.append(entry)

    def _measure(self, round_number: int, record: PeerRecord, launch: Launch, sweep: Sweep) -> dict[str, Any] | None:
        """Starts the server, runs the sweep, stops the server; what was found, or None and a failure recorded."""
        name, title = f"{round_number}-{record.peer.spec.name}", f"round {round_number}, {record.peer.spec.name}"
        before = machine_load()
        if (before["cpu_busy_fraction"] or 0.0) > _BUSY:
            self._say(f"{title}: others keep {before['cpu_busy_fraction']:.0%} of the cores busy")
        entry: dict[str, Any] = {"round": round_number, "seed": sweep.seed, "date": _now(), "before": before}
        result = self._args.out / "rounds" / f"sweep-{name}.json"
        stage = self._stage(title, "start")
        try:
            with record.peer.server(launch, self._fresh_log(f"server-{name}.log"), self._args.start_timeout) as server:
                entry["ready_s"] = server.ready_s
                stage = self._stage(title, "first request")
                entry["probe_text"] = probe(server)
                stage = self._stage(title, "sweep")
                command = self._sweep_command(sweep, server.base_url, server.model, result)
                code, found = run_sweep(command, sweep.timeout_s, result, self._fresh_log(f"sweep-{name}.log"))
                stage = self._stage(title, "stop")
        except (StepError, ServeError, OSError) as error:
            self._failed(record, f"round {round_number}, {stage}: {error}")
            return None
        result.unlink(missing_ok=True)  # its raw samples of gaps are large
        return entry | {
            "exit_code": code,
            "levels": [trimmed_level(level) for level in found["levels"]],
            "generator": found.get("generator"),
            "errors": {without_paths(text): count for text, count in (found.get("errors") or {}).items()},
        }

    def _fresh_log(self, name: str) -> Path:
        path: Path = self._logs / name
        path.unlink(missing_ok=True)
        return path

    def _stage(self, title: str, stage: str) -> str:
        """Shows what is being done; returns the stage."""
        if self._bar is not None:
            self._bar.set_description(f"{title}: {stage}")
        return stage

    def _say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def _failed(self, record: PeerRecord, text: str) -> None:
        failure = without_paths(text)
        record.failures.append(failure)
        self._say(f"FAILED {record.peer.spec.name}: {failure}")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _finish(comparison: Comparison, out: Path) -> None:
    """Writes the last state of everything, and prints the tables."""
    result = comparison.to_json()
    comparison.write()
    text = f"# Servers compared\n\n{environment.headline(result)}\n\n{render(result['servers'])}\n"
    (out / "compare.md").write_text(text)
    figures = write_figures(result["servers"], out)
    print(text)
    print("Written: " + ", ".join(str(path) for path in (out / "compare.md", out / "compare.json", *figures)))
    for record in comparison.records:
        if record.failures:
            print(f"FAILED {record.peer.spec.name} (logs in {out / 'logs'}):\n{record.reason}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, writes JSON, tables and figures. 1 when a peer failed, 2 for arguments that make no sense.

    A peer that this machine can't have is reported and is no failure.
    """
    args = parse_args(argv)
    exit_on_sigterm()
    cache = cache_folder()
    try:
        peers = chosen(all_peers(cache), args.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    overrides = engine_overrides()
    if overrides:
        print(f"unset {', '.join(overrides)}: our server would heed them and the result would not say so",
              file=sys.stderr)  # fmt: skip
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(args, peers, cache)
    try:
        comparison.run()
    except (KeyboardInterrupt, SystemExit):
        print(f"\nstopped; what was measured is kept in {args.out}, and the same command goes on", file=sys.stderr)
        raise
    _finish(comparison, args.out)
    return 1 if any(record.failures for record in comparison.records) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
