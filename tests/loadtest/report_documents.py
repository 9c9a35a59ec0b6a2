"""Small result documents of every kind, as the benchmarks write them."""

from __future__ import annotations

from typing import Any

from loadtest.stats import summary

Document = dict[str, Any]


def described(**changes: Any) -> Document:
    """What `environment.describe` would say, and the changes."""
    return {
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "date": "2026-11-29T10:00:00+00:00",
        "machine": {
            "system": "Linux", "cpu": "Some CPU", "cores": 2, "memory_bytes": 8 * 2**30, "load_average_1min": 0.5,
        },
        "versions": {"python": "3.11.7", "mlx": "0.32.4", "mlx-metal": None, "mlx-lm": "0.32.2", "ray": "2.60.0"},
        "arguments": {"model": "embedded", "out": "/somewhere/else.json"},
    } | changes  # fmt: skip


def level(number: float, factor: float = 1.0, unit: str = "users", **changes: Any) -> Document:
    """A level whose rates are number x factor and whose times are number / factor."""
    times = [number / factor * share for share in (0.5, 1.0, 1.25, 2.0)]
    return {
        "level": number, "unit": unit, "duration_s": 10.0, "complete": True, "requests": 40, "failures": 0,
        "retries": 0, "unfinished": 1, "output_tokens": 640, "output_tokens_per_second": 10 * number * factor,
        "requests_per_second": number * factor, "prompt_tokens": summary([16.0]), "ttft_s": summary(times),
        "itl_s": summary([t / 10 for t in times]), "e2e_s": summary([t * 3 for t in times]),
        "server_metrics": {"quire:engine_steps_total": 123.0},
    } | changes  # fmt: skip


def load(**changes: Any) -> Document:
    """Three levels of users."""
    return {
        "benchmark": "load", **described(), "scenario": "concurrency_sweep", "host": "local", "model": "smollm2",
        "label": "quire", "levels": [level(1), level(4), level(16)],
        "generator": {"cpu_percent_max": 20, "cpu_percent_median": 10, "lag_ms_p99": 1, "saturated": False},
        "errors": {},
    } | changes  # fmt: skip


def compare(**changes: Any) -> Document:
    """Two servers of three rounds each, and one that could not be had."""
    servers = [
        {
            "name": name, "title": title, "version": "1.0", "dtype": "float32", "command": ["serve", "--now"],
            "environment": {"THREADS": "2"}, "status": "measured", "reason": None, "ready_s": [3.0, 4.0, 5.0],
            "rounds": [{"levels": [level(n, speed * share) for n in (1, 8)]} for share in (0.9, 1.0, 1.1)],
        }
        for name, title, speed in (("quire", "Quire", 2.0), ("other", "Other", 1.0))
    ]  # fmt: skip
    gone = {"name": "gone", "title": "Gone", "status": "unavailable", "reason": "not installed", "rounds": []}
    return {"benchmark": "compare", **described(), "model": "smollm2", "servers": [*servers, gone]} | changes


def engine(speed: float = 2.0, **changes: Any) -> Document:
    """Two cases, of which the first has a target."""
    cases = []
    for name, rate, target in (("1 x 100", 20.0, 1.0), ("16 x 100", 200.0, None)):
        ours, theirs = ([rate * factor * share for share in (0.9, 1.0, 1.1)] for factor in (speed, 1.0))
        decode = {
            "quire": summary(ours), "mlx_lm": summary(theirs), "ratio_of_medians": speed,
            "ratios_by_round": [speed * 0.95, speed, speed * 1.05], "target": target,
        }  # fmt: skip
        cases.append({"name": name, "tokens_per_second": {"decode": decode}, "failure": None})
    metrics = {"decode": "output tokens/s while all sequences decode"}
    return {"benchmark": "engine", **described(), "metrics": metrics, "cases": cases} | changes


def old_summary(samples: list[float]) -> Document:
    """As before p90 and p99."""
    return {key: value for key, value in summary(samples).items() if key not in ("p90", "p99")}


def serve(**changes: Any) -> Document:
    """One case of each kind."""
    cases = [
        {
            "kind": "Throughput", "clients": 8, "http_tokens_per_second": summary([80.0, 81.0, 82.0]),
            "in_process_tokens_per_second": summary([90.0, 91.0, 92.0]), "ratio_of_medians": 0.89,
            "ratios_by_round": [0.88, 0.89, 0.9], "target": 0.85, "ttft_s": old_summary([0.1, 0.2, 0.3]),
            "itl_s": old_summary([0.01, 0.02]),
        },
        {
            "kind": "PrefixTTFT", "prefix_tokens": 1500, "cold_ttft_s": summary([4.0, 5.0]),
            "cached_ttft_s": summary([0.4, 0.5]), "ratio_of_medians": 0.1, "target": 0.15,
        },
        {
            "kind": "Gaps", "streams": 8, "prompt_tokens": 6000, "gap_before_s": summary([0.07, 0.08]),
            "gap_during_s": summary([0.9, 1.0]), "largest_gap_s": 1.0, "chunk_s": 0.8, "largest_gap_in_chunks": 1.25,
            "target": 1.5,
        },
    ]  # fmt: skip
    return {"benchmark": "serve", **described(), "server_ready_s": 12.5, "cases": cases, "failures": []} | changes


def memory(**changes: Any) -> Document:
    """Two looks."""
    samples = [
        {"requests": n, "rss_bytes": {"engine": (100 + n) * 2**20}, "kv_blocks": {"free": 50.0 - n, "private": 0.0}}
        for n in (0, 10)
    ]
    return {
        "benchmark": "memory",
        **described(),
        "samples": samples,
        "blocks_are_back": True,
        "surprises": [],
    } | changes


def decode(**changes: Any) -> Document:
    """Two batches of one arm, two rounds."""
    cases = [
        {
            "arm": "recorded",
            "context": 512,
            "batch": batch,
            "step_ms": 1.5 * batch,
            "rounds": [{"step_ms": k * batch, "prefill_tokens_per_s": 1000.0 * k} for k in (1.0, 2.0)],
        }
        for batch in (1, 8)
    ]
    return {"benchmark": "decode", **described(), "shape": "llama-1b", "cases": cases} | changes


def drafts(**changes: Any) -> Document:
    """Answers that repeat their prompt and free ones, which have no drafts."""
    cases = [
        {
            "kind": kind,
            "sequences": 2,
            "tokens_per_second": {"decode": {"plain": {"samples": [10.0, 12.0]}, "drafts": {"samples": [rate]}}},
            "acceptance": share,
        }
        for kind, rate, share in (("repeats", 40.0, 0.75), ("free", 11.0, None))
    ]
    return {"benchmark": "drafts", **described(), "cases": cases} | changes


def kernels(**changes: Any) -> Document:
    """A shape with its chosen splits and another number, and a check."""
    timings = [
        {"num_rows": 128, "seq_len": 4096, "head_dim": 64, "splits": splits, "chosen": splits == 1, "s": 4e-4 * splits,
         "share": 0.6 / splits, "target": 0.5}
        for splits in (1, 2)
    ]  # fmt: skip
    checks = [{"case": "a case", "right": True}]
    return {"benchmark": "kernels", **described(), "timings": timings, "checks": checks} | changes


def experiment(**changes: Any) -> Document:
    """Two arms, a metric of two cases, one without samples, and a series."""
    metrics = [
        {
            "name": "TTFT", "unit": "ms", "better": "lower", "case": case, "figures": ["median", "p99"],
            "values": {"fcfs": summary([10.0 * k, 20.0 * k]), "priority": summary([5.0 * k, 6.0 * k])},
        }
        for case, k in (("short", 1), ("long", 3))
    ]  # fmt: skip
    plain = {"name": "Steps", "unit": "", "better": "higher",
             "values": {"fcfs": {"median": 7}, "priority": {"samples": [], "median": 9}}}  # fmt: skip
    series = [{"name": arm, "x": [1, 2, 3], "y": [k, 2 * k, None], "x_title": "time (s)", "y_title": "queue"}
              for arm, k in (("fcfs", 1), ("priority", 4))]  # fmt: skip
    return {
        "benchmark": "experiment", **described(), "name": "policies", "title": "Which policy?",
        "question": "Does it pay?",
        "arms": [{"name": "fcfs", "config": "a"}, {"name": "priority", "config": {"scheduler": "priority"}}],
        "metrics": [*metrics, plain], "series": series, "notes": ["A note."],
        "checks": [{"name": "same outputs", "passed": True, "detail": "all"}],
    } | changes  # fmt: skip


def gpu(**changes: Any) -> Document:
    """A case of each kind; our arm ran two rounds of the first."""
    latencies = {"ttft_s": summary([0.01, 0.02]), "itl_s": {**summary([0.002]), "samples": None}}
    replies: dict[str, tuple[str, list[Document]]] = {
        "decode 8 x 512": ("decode", [{"step_ms": 1.5}, {"step_ms": 1.7}]),
        "prefill 8 x 512": ("prefill", [{"tokens_per_s": 1000.0}]),
        "mixed 8/s, temperature 0": ("mixed", [{"output_tokens_per_s": 100.0, **latencies}]),
    }
    cases = []
    for name, (kind, rounds) in replies.items():
        arms: Document = {"quire": {"rounds": rounds, "failure": None}}
        arms["vllm"] = {"rounds": rounds[:1], "failure": None}
        cases.append({"name": name, "kind": kind, "cut_short": False, "arms": arms})
    arms = {"quire": {"options": {"block_size": 16}}, "vllm": {"options": {"dtype": "bfloat16"}}}
    return {"benchmark": "gpu", **described(), "shape": "llama-1b", "arms": arms, "cases": cases,
            "skipped": []} | changes  # fmt: skip


def every_kind() -> dict[str, Document]:
    """One of each, by file name."""
    return {"engine.json": engine(), "serve.json": serve(), "memory.json": memory(), "load.json": load(),
            "compare.json": compare(), "experiment.json": experiment(), "decode.json": decode(),
            "drafts.json": drafts(), "kernels.json": kernels(), "gpu.json": gpu()}  # fmt: skip
