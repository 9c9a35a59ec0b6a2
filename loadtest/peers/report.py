"""What is recorded of each peer, and the JSON and the tables made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.load.recorder import without_samples
from loadtest.peers.base import PROBE_PROMPT, Peer
from loadtest.stats import median, ratio
from loadtest.tables import MISSING, markdown_table, number

REFERENCE = "quire-haproxy"
_LATENCIES = (("ttft_s", "Time to first token"), ("itl_s", "Time between tokens"), ("e2e_s", "Whole request"))
_SAMPLED = frozenset({"ttft_s", "e2e_s"})  # whose samples stay in the result; there are too many gaps between tokens
_SAMPLE_DIGITS = 4
_REASON_CHARACTERS = 160


@dataclass(slots=True)
class PeerRecord:
    """One peer of a comparison, filled as it goes."""

    peer: Peer
    levels: tuple[int, ...]  # that it is asked for
    limited: bool = False  # whether it is asked for fewer than others
    is_installed: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)  # Launch.shown
    unavailable: str | None = None
    failures: list[str] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def incomplete_levels(self) -> list[int]:
        """Levels that some round lacks, or has only a part of."""
        complete = [{level["level"] for level in entry["levels"] if level["complete"]} for entry in self.rounds]
        return [level for level in self.levels if not all(level in found for found in complete)]

    @property
    def status(self) -> str:
        """unavailable, failed (nothing measured), partial, or measured."""
        if self.unavailable is not None:
            return "unavailable"
        if not any(entry["levels"] for entry in self.rounds):
            return "failed"
        return "partial" if self.failures or self.incomplete_levels() else "measured"

    @property
    def reason(self) -> str | None:
        """Why it is not simply measured."""
        if self.unavailable is not None:
            return self.unavailable
        found = list(self.failures)
        if self.rounds and self.incomplete_levels():
            found.append(f"not complete in time at {', '.join(map(str, self.incomplete_levels()))} clients")
        return "\n".join(found) or None

    def to_json(self) -> dict[str, Any]:
        """For the result file."""
        spec = self.peer.spec
        limit = spec.level_limit
        return {
            "name": spec.name,
            "title": spec.title,
            "version": next(iter(self.versions.values()), None),
            "versions": self.versions,
            "dtype": spec.dtype,
            "command": self.shown.get("command"),
            "environment": self.shown.get("environment"),
            "notes": self.shown.get("notes", []),
            "ignore_eos": spec.ignore_eos,
            "levels_limited": {"up_to": limit.up_to, "reason": limit.reason} if limit and self.limited else None,
            "status": self.status,
            "reason": self.reason,
            "ready_s": [entry["ready_s"] for entry in self.rounds],
            "rounds": self.rounds,
        }


def trimmed_level(level: Mapping[str, Any]) -> dict[str, Any]:
    """A level without the samples that would make the file large; the others to 0.1 ms."""
    found = without_samples(level)
    for name in _SAMPLED & level.keys():
        found[name]["samples"] = [round(sample, _SAMPLE_DIGITS) for sample in level[name].get("samples", ())]
    return found


def level_entries(server: Mapping[str, Any], level: int) -> list[dict[str, Any]]:
    """What the rounds have of one level, in their order."""
    return [found for entry in server["rounds"] for found in entry["levels"] if found["level"] == level]


def throughputs(server: Mapping[str, Any], level: int) -> list[float]:
    """Output tokens per second of each round that has the level."""
    values = [found["output_tokens_per_second"] for found in level_entries(server, level)]
    return [value for value in values if value is not None]


def latency_ms(server: Mapping[str, Any], level: int, name: str, figure: str) -> float | None:
    """The median over rounds of a latency's figure (`median`, `p99`), in milliseconds; None if there is none."""
    values = [(found.get(name) or {}).get(figure) for found in level_entries(server, level)]
    measured = [1000 * value for value in values if value is not None]
    return median(measured) if measured else None


def all_levels(servers: Sequence[Mapping[str, Any]]) -> list[int]:
    """The levels that any server has, ascending."""
    return sorted({level["level"] for server in servers for entry in server["rounds"] for level in entry["levels"]})


def render(servers: Sequence[Mapping[str, Any]]) -> str:
    """All tables, of the `servers` of a result."""
    parts = ["## Servers", _servers_table(servers), _commands(servers)]
    levels = all_levels(servers)
    measured = [server for server in servers if any(entry["levels"] for entry in server["rounds"])]
    if levels:
        header = ["clients", *map(str, levels)]
        parts += ["## Output tokens per second", markdown_table(header, [_throughput_row(s, levels) for s in measured])]
        parts.append(_legend(measured))
        reference = next((server for server in measured if server["name"] == REFERENCE), None)
        if reference is not None and len(measured) > 1:
            rows = [_ratio_row(server, reference, levels) for server in measured]
            parts += [f"## Throughput as a multiple of {reference['title']}", markdown_table(header, rows)]
        for name, title in _LATENCIES:
            rows = [_latency_row(server, levels, name) for server in measured]
            parts += [f"## {title}, p50 / p99 in ms", markdown_table(header, rows)]
        failures = [row for server in measured for row in _failure_rows(server, levels)]
        if failures:
            header = ["server", "clients", "requests", "failed", "retried", "unfinished"]
            parts += ["## Requests that failed or were retried", markdown_table(header, failures)]
        else:
            parts.append("No request failed or was retried.")
        parts += ["## Greedy text", _texts_table(measured)]
    return "\n\n".join(part for part in parts if part)


def _servers_table(servers: Sequence[Mapping[str, Any]]) -> str:
    header = ["server", "version", "weights", "status", "ready s", "remarks"]
    rows = []
    for server in servers:
        ready = [value for value in server["ready_s"] if value is not None]
        rows.append(
            [
                server["title"],
                server["version"] or MISSING,
                server["dtype"],
                server["status"],
                number(median(ready) if ready else None, 0),
                _remarks(server),
            ]
        )
    return markdown_table(header, rows)


def _commands(servers: Sequence[Mapping[str, Any]]) -> str:
    """How each server was started, with the variables that were set for it."""
    lines = []
    for server in servers:
        if server["command"]:
            added = [f"{name}={value}" for name, value in server["environment"].items()]
            lines.append(f"- {server['title']}: `{' '.join([*added, *server['command']])}`")
    return "\n".join(lines)


def _texts_table(servers: Sequence[Mapping[str, Any]]) -> str:
    """Whether the servers have the same weights: types of fewer bits may part ways after some tokens."""
    rows = []
    for server in servers:
        texts = dict.fromkeys(str(entry["probe_text"]).strip() for entry in server["rounds"])
        rows.append([server["title"], " / ".join(" ".join(text.split()) for text in texts)])
    return markdown_table(["server", f"after “{PROBE_PROMPT}”"], rows)


def _remarks(server: Mapping[str, Any]) -> str:
    found = []
    if server["reason"]:
        # The first line says what failed, the last one is usually the error.
        lines = [line.strip() for line in server["reason"].splitlines() if line.strip()]
        found.append(" … ".join(line[:_REASON_CHARACTERS] for line in dict.fromkeys((lines[0], lines[-1]))))
    if server["levels_limited"]:
        limited = server["levels_limited"]
        found.append(f"up to {limited['up_to']} clients: {limited['reason']}")
    found += server["notes"]
    if not server["ignore_eos"]:
        found.append("stops at end-of-sequence")
    if any((entry.get("generator") or {}).get("saturated") for entry in server["rounds"]):
        found.append("the load generator was saturated")
    return "; ".join(found) or MISSING


def _throughput_row(server: Mapping[str, Any], levels: Sequence[int]) -> list[str]:
    row = [server["title"]]
    for level in levels:
        values = throughputs(server, level)
        cell = number(median(values) if values else None)
        if len(values) > 1:
            cell += f" ({number(min(values))} to {number(max(values))})"
        entries = level_entries(server, level)
        failed = sum(entry["failures"] for entry in entries)
        if failed:
            cell += f", {failed} failed"
        row.append(cell + ("*" if values and not all(entry["complete"] for entry in entries) else ""))
    return row


def _legend(servers: Sequence[Mapping[str, Any]]) -> str:
    entries = [level for server in servers for entry in server["rounds"] for level in entry["levels"]]
    found = []
    if any(len(server["rounds"]) > 1 for server in servers):
        found.append("Median over rounds, and the range.")
    if not all(level["complete"] for level in entries):
        found.append("* not complete in time.")
    return " ".join(found)


def _ratio_row(server: Mapping[str, Any], reference: Mapping[str, Any], levels: Sequence[int]) -> list[str]:
    cells = []
    for level in levels:
        ours, theirs = throughputs(server, level), throughputs(reference, level)
        cells.append(number(ratio(median(ours), median(theirs)) if ours and theirs else None, 2))
    return [server["title"], *cells]


def _latency_row(server: Mapping[str, Any], levels: Sequence[int], name: str) -> list[str]:
    cells = []
    for level in levels:
        low, high = (latency_ms(server, level, name, figure) for figure in ("median", "p99"))
        digits = 1 if name == "itl_s" else 0
        cells.append(MISSING if low is None else f"{number(low, digits)} / {number(high, digits)}")
    return [server["title"], *cells]


def _failure_rows(server: Mapping[str, Any], levels: Sequence[int]) -> list[list[str]]:
    rows = []
    for level in levels:
        entries = level_entries(server, level)
        counts = [sum(entry[name] or 0 for entry in entries) for name in ("failures", "retries", "unfinished")]
        if any(counts[:2]):  # a level ends with some requests unfinished whenever it ends
            requests = sum(entry["requests"] for entry in entries)
            rows.append([server["title"], str(level), str(requests), *map(str, counts)])
    return rows
