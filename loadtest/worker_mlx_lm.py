"""The arm with mlx-lm as shipped, plus OpenBLAS: nothing else of ours is imported, and `build` checks that."""

from __future__ import annotations

import dataclasses
import inspect
import time
from pathlib import Path
from typing import Any

from mlx_engine.blas import preload_openblas

# After OpenBLAS: the first import of `mlx.core` binds its BLAS. `mlx_engine/__init__.py` and `blas.py` import no MLX.
_BLAS = preload_openblas()

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from loadtest.worker_protocol import claim_stdout, foreign_modules, serve  # noqa: E402

_ALLOWED = frozenset({"mlx_engine", "mlx_engine.blas"})


class MLXLMWorker:
    """Holds one model; a fresh BatchGenerator serves each run."""

    def __init__(self) -> None:
        self._model: Any = None
        self._options: dict[str, Any] = {}

    def build(self, folder: str, options: dict[str, Any]) -> dict[str, Any]:
        """Loads the folder as mlx-lm does. Raises RuntimeError if more of ours than the BLAS loader is in here."""
        foreign = foreign_modules(_ALLOWED)
        if foreign:
            raise RuntimeError(f"this process would not be mlx-lm as shipped: it has imported {foreign}")
        self._model, _ = load_model(Path(folder))
        self._options = options
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(BatchGenerator.__init__).parameters.items()
            if isinstance(parameter.default, int)
        }
        return {"options": defaults | options, "blas": dataclasses.asdict(_BLAS), "device": str(mx.default_device())}

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Serves all prompts at once, greedily, past end-of-sequence (no stop tokens)."""
        options = dict(self._options)
        # Its default is 32: more sequences than that would queue.
        options.setdefault("completion_batch_size", max(32, len(prompts)))
        generator = BatchGenerator(self._model, stop_tokens=None, **options)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        uids = generator.insert(prompts, [max_tokens] * len(prompts))
        place = {uid: index for index, uid in enumerate(uids)}
        while responses := generator.next_generated():
            now = time.perf_counter() - start
            for response in responses:
                tokens[place[response.uid]].append(int(response.token))
                times[place[response.uid]].append(now)
        mx.synchronize(generator.stream)
        generator.close()
        return {"tokens": tokens, "times": times}


def main() -> None:
    """Serves until standard input ends."""
    channel = claim_stdout()
    worker = MLXLMWorker()
    serve({"build": worker.build, "run": worker.run}, channel)


if __name__ == "__main__":
    main()
