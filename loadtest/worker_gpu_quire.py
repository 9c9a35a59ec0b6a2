"""Our engine as an arm of the GPU comparison: built as the server builds it, around random weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

# Before anything that imports MLX: OpenBLAS must come first.
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.models.load import LoadedModel
from mlx_engine.types import Request, SamplingParams
from plugins.build import build_engine_for

# Third-party, but after ours: the first import of `mlx.core` binds its BLAS.
import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten  # isort: skip

from loadtest.gpu import device_facts, on_gpu
from loadtest.random_llama import device_dtype, random_llama
from loadtest.stepping import StepLoop
from loadtest.worker_protocol import Handler, claim_stdout, serve


class QuireStepper:
    """Engine.step, with its outputs counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, request_id: str, prompt: list[int], max_tokens: int, temperature: float) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        self._engine.add_request(Request(request_id, tuple(prompt), sampling))

    def step(self) -> list[tuple[str, int]]:
        found = []
        for output in self._engine.step():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            found.append((output.request_id, len(output.new_token_ids)))
        return found

    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.abort_request(request_id)

    def settle(self) -> None:
        mx.clear_cache()

    def counters(self) -> dict[str, int]:
        stats = self._engine.stats()
        return {**stats.dispatch, "preemptions": stats.num_preemptions}


def random_model(model: dict[str, Any], dtype: mx.Dtype) -> LoadedModel:
    """A Llama of a config.json with random weights, as the loader would hand it over."""
    built = random_llama(model, dtype)
    return LoadedModel(
        model=built,
        config=model,
        dtype=dtype,
        eos_token_ids=frozenset(),
        max_model_len=model["max_position_embeddings"],
        vocab_size=model["vocab_size"],
        weight_bytes=sum(int(array.nbytes) for _, array in tree_flatten(built.parameters())),
    )


def main() -> None:
    """Serves until standard input ends."""
    channel = claim_stdout()
    logging.basicConfig(level=logging.INFO)
    handlers: dict[str, Handler] = {}

    def build(model: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
        config = EngineConfig(model="random", **engine)
        built = build_engine_for(config, random_model(model, device_dtype()))
        handlers.update(StepLoop(QuireStepper(built), model["vocab_size"]).handlers())
        info = built.info
        return {
            "options": config.model_dump(exclude={"model"}),
            "chosen": {"dtype": info.dtype, "num_blocks": info.num_blocks, **info.policies},
            "device": device_facts(),
            "on_gpu": on_gpu(),
        }

    handlers["build"] = build
    serve(handlers, channel)


if __name__ == "__main__":
    main()
