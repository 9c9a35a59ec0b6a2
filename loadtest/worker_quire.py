"""The arm with our engine: builds it as the server does, and runs batches and closed loops in process."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

# Before anything that imports MLX: OpenBLAS must come first.
from mlx_engine.blas import preload_openblas
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.models.load import load_model
from mlx_engine.models.resolve import resolve_model
from mlx_engine.models.tokenizer import Tokenizer
from mlx_engine.types import Request, SamplingParams
from plugins.build import build_engine

# Third-party, but after ours: the first import of `mlx.core` binds its BLAS.
import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten  # isort: skip

from loadtest.worker_protocol import Handler, claim_stdout, serve

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class QuireWorker:
    """Holds one engine. All methods run on the main thread, which owns MLX."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._count = 0

    @property
    def engine(self) -> Engine:
        """Raises RuntimeError before `build`."""
        if self._engine is None:
            raise RuntimeError("no engine has been built")
        return self._engine

    def export(self, model: str, dtype: str, folder: str) -> str:
        """Writes the model as this engine runs it (dense float32 on a CPU) to `folder`, for both arms to load."""
        source, target = resolve_model(model), Path(folder)
        loaded = load_model(source, dtype)
        weights = dict(tree_flatten(loaded.model.parameters()))
        config = {key: value for key, value in loaded.config.items() if not key.startswith("_")}
        if not any(name.endswith(".scales") for name in weights):
            config = {key: value for key, value in config.items() if not key.startswith("quantization")}
        target.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
        (target / "config.json").write_text(json.dumps(config, indent=1))
        for name in _TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copy(source / name, target / name)
        return str(loaded.dtype)

    def build(self, config: dict[str, Any]) -> dict[str, Any]:
        """Builds the engine from EngineConfig's keys; says what it became."""
        settings = EngineConfig(**config)
        self._engine = build_engine(settings)
        info = dataclasses.asdict(self._engine.info)
        info["eos_token_ids"] = sorted(info["eos_token_ids"])
        return {
            "config": settings.model_dump(),
            "info": info,
            "blas": dataclasses.asdict(preload_openblas()),
            "device": str(mx.default_device()),
            "folder": str(resolve_model(settings.model)),
        }

    def encode(self, model: str, questions: list[str]) -> list[list[int]]:
        """Each question as the prompt of a chat, in token ids."""
        tokenizer = Tokenizer(resolve_model(model))
        return [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in questions]

    def closed_loop(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> dict[str, Any]:
        """Serves the prompts greedily past end-of-sequence, `concurrency` at once, each next one when one ends."""
        engine = self.engine
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        pending = deque(enumerate(prompts))
        index: dict[str, int] = {}
        cached = preemptions = 0
        before = engine.stats()
        start = time.perf_counter()
        for _ in range(min(concurrency, len(pending))):
            self._add(pending, index, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                place = index[output.request_id]
                tokens[place] += output.new_token_ids
                times[place] += [now] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    cached += output.num_cached_tokens
                    preemptions += output.num_preemptions
                    if pending:
                        self._add(pending, index, sampling)
        mx.synchronize()
        after = engine.stats()
        return {
            "tokens": tokens,
            "times": times,
            "cached_tokens": cached,
            "preemptions": preemptions,
            "dispatch": {path: count - before.dispatch.get(path, 0) for path, count in after.dispatch.items()},
            "steps": after.steps - before.steps,
            "draft_tokens": after.draft_tokens - before.draft_tokens,
            "accepted_draft_tokens": after.accepted_draft_tokens - before.accepted_draft_tokens,
        }

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Serves all prompts at once."""
        return self.closed_loop(prompts, max_tokens, len(prompts))

    def _add(self, pending: deque[tuple[int, list[int]]], index: dict[str, int], sampling: SamplingParams) -> None:
        place, prompt = pending.popleft()
        self._count += 1
        request_id = f"bench-{self._count}"
        index[request_id] = place
        self.engine.add_request(Request(request_id, tuple(prompt), sampling))


def main() -> None:
    """Serves until standard input ends."""
    channel = claim_stdout()
    logging.basicConfig(level=logging.INFO)
    worker = QuireWorker()
    handlers: dict[str, Handler] = {
        "export": worker.export,
        "build": worker.build,
        "encode": worker.encode,
        "run": worker.run,
        "closed_loop": worker.closed_loop,
    }
    serve(handlers, channel)


if __name__ == "__main__":
    main()
