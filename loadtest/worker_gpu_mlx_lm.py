"""mlx-lm's BatchGenerator as an arm of the GPU comparison: as shipped, nothing of ours in its process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from loadtest.gpu import device_facts, on_gpu
from loadtest.random_llama import device_dtype, random_llama
from loadtest.stepping import StepLoop
from loadtest.worker_protocol import Handler, claim_stdout, foreign_modules, serve


class MLXLMStepper:
    """BatchGenerator.next. A fresh one for each case, as its caches are what a case leaves behind."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        self._generator: Any = None
        self._ids: dict[int, str] = {}  # its ids to ours, of unfinished requests
        # The same object for all: it samples a batch in one call only where all rows share one.
        self._samplers: dict[float, Any] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int, temperature: float) -> None:
        if self._generator is None:
            self._generator = BatchGenerator(self._model, stop_tokens=None, **self._options)
        sampler = self._samplers.setdefault(temperature, make_sampler(temp=temperature))
        (uid,) = self._generator.insert([prompt], [max_tokens], samplers=[sampler])
        self._ids[uid] = request_id

    def step(self) -> list[tuple[str, int]]:
        _, responses = self._generator.next()
        found = []
        for response in responses:
            found.append((self._ids[response.uid], 1))
            if response.finish_reason is not None:
                del self._ids[response.uid]
        return found

    def busy(self) -> bool:
        return bool(self._ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        ended = set(request_ids)
        uids = [uid for uid, request_id in self._ids.items() if request_id in ended]
        self._generator.remove(uids)
        for uid in uids:
            del self._ids[uid]

    def settle(self) -> None:
        if self._generator is not None:
            self._generator.close()
            self._generator = None
        self._ids.clear()
        mx.clear_cache()

    def counters(self) -> dict[str, int]:
        return {}


def limit_memory(limit_gib: float | None) -> None:
    """Has MLX keep to this, freed memory that it holds on to included; to its own limit where that is less."""
    if limit_gib is not None:
        mx.set_memory_limit(min(int(limit_gib * 2**30), mx.get_memory_limit()))


def main() -> None:
    """Serves until standard input ends."""
    channel = claim_stdout()
    handlers: dict[str, Handler] = {}

    def build(model: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
        foreign = foreign_modules(frozenset())
        if foreign:
            raise RuntimeError(f"this process would not be mlx-lm as shipped: it has imported {foreign}")
        limit_memory(engine.get("memory_limit_gib"))
        dtype = device_dtype()
        options = {name: value for name, value in engine.items() if name != "memory_limit_gib"}
        stepper = MLXLMStepper(random_llama(model, dtype), options)
        handlers.update(StepLoop(stepper, model["vocab_size"]).handlers())
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(BatchGenerator.__init__).parameters.items()
            if isinstance(parameter.default, int)
        }
        return {
            "options": defaults | engine,
            "chosen": {"dtype": str(dtype).removeprefix("mlx.core.")},
            "device": device_facts(),
            "on_gpu": on_gpu(),
        }

    handlers["build"] = build
    serve(handlers, channel)


if __name__ == "__main__":
    main()
