"""The ways to run the same prompts: each must give the reference's tokens. One named set of options is one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.models.load import LoadedModel
from mlx_engine.types import EngineStats, Request, RequestOutput, SamplingParams
from plugins.build import build_engine_for


@dataclass(frozen=True, slots=True)
class Way:
    """Engine options, and how requests arrive."""

    options: Mapping[str, Any]
    alone: bool = False  # each request has the engine for itself
    per_step: int = 3  # arrivals before each step, if not alone
    times: int = 1  # how often each prompt is sent, all of them each time


# Prefill chunk, scheduler, KV manager, prefix cache, overlap and decode path each take every value, in combinations.
_CONTIGUOUS = {"kv_manager": "contiguous", "prefix_cache": "none"}
WAYS: dict[str, Way] = {
    "alone, chunk 512": Way({"max_prefill_chunk": 512, "prefix_cache": "none"}, alone=True),
    "staggered, chunk 16, prefix cached (radix)": Way({"max_prefill_chunk": 16, "block_size": 8}, times=2),
    "staggered, chunk 64, wave, not overlapped, prefix cached (hash_chain), gather_sdpa": Way(
        {
            "max_prefill_chunk": 64,
            "block_size": 8,
            "scheduler": "wave",
            "overlap": False,
            "prefix_cache": "hash_chain",
            "attention_backend_options": {"decode": "gather_sdpa"},
        },
        times=2,
    ),
    "staggered, chunk 24, drafts": Way(
        {"max_prefill_chunk": 24, "block_size": 8, "drafter": "ngram", "drafter_options": {"min_ngram": 1}}, times=2
    ),
    "at once, chunk 512, priority, contiguous": Way(
        {"max_prefill_chunk": 512, "scheduler": "priority", **_CONTIGUOUS}, per_step=99
    ),
}


@dataclass(slots=True)
class Answers:
    """What came of one sending of all prompts."""

    tokens: list[list[int]]
    last: list[RequestOutput]  # of each prompt


@dataclass(slots=True)
class Run:
    """What came of a way."""

    sendings: list[Answers]
    stats: EngineStats


def run(loaded: LoadedModel, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> Run:
    """Builds an engine, sends the prompts as the way says, and checks that all memory comes back."""
    config = EngineConfig(**{"max_num_seqs": 32, "num_blocks": 2048, **way.options, **options})
    engine = build_engine_for(config, loaded)
    sendings = [_send(engine, way, prompts, max_tokens) for _ in range(way.times)]
    engine.check_idle()
    stats = engine.stats()
    assert stats.kv.private == 0
    assert stats.kv.evictable == stats.kv.cached
    return Run(sendings, stats)


def _send(engine: Engine, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answers:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    todo = [Request(str(index), tuple(prompt), sampling) for index, prompt in enumerate(prompts)]
    tokens: list[list[int]] = [[] for _ in prompts]
    last: dict[int, RequestOutput] = {}
    while todo or engine.has_unfinished_requests():
        count = way.per_step if not way.alone else int(not engine.has_unfinished_requests())
        for request in todo[:count]:
            engine.add_request(request)
        del todo[:count]
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids
            last[int(output.request_id)] = output
    return Answers(tokens, [last[index] for index in range(len(prompts))])
