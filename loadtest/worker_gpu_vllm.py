"""vLLM's engine as an arm of the GPU comparison, in this process. Made for vLLM 0.26; runs where vLLM can be imported.

vLLM is imported by `build`, after the environment variables that it reads: then a missing vLLM is an answer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.stepping import StepLoop
from loadtest.worker_protocol import Handler, claim_stdout, serve

_ENVIRONMENT = {
    # The engine in this process, moved by LLMEngine.step as ours is by Engine.step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLMStepper:
    """LLMEngine.step; each output holds the tokens since the one before."""

    def __init__(self, engine: Any) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._engine = engine
        self._sampling = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._tokens_input = tokens_input

    def add(self, request_id: str, prompt: list[int], max_tokens: int, temperature: float) -> None:
        sampling = self._sampling(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(request_id, self._tokens_input(prompt), sampling)

    def step(self) -> list[tuple[str, int]]:
        return [(output.request_id, len(output.outputs[0].token_ids)) for output in self._engine.step()]

    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def settle(self) -> None:
        """Its memory is taken once, at start."""

    def counters(self) -> dict[str, int]:
        return {}


def _chosen(engine: Any) -> dict[str, Any]:
    """What it made of the options, as far as it says so."""
    config = engine.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    found = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
        "enable_chunked_prefill": getattr(scheduler, "enable_chunked_prefill", None),
        "max_num_batched_tokens": getattr(scheduler, "max_num_batched_tokens", None),
        "max_num_seqs": getattr(scheduler, "max_num_seqs", None),
        "block_size": getattr(cache, "block_size", None),
        "num_gpu_blocks": getattr(cache, "num_gpu_blocks", None),
        "cudagraph_mode": getattr(config.compilation_config, "cudagraph_mode", None),
    }
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in found.items()}


def main() -> None:
    """Serves until standard input ends."""
    channel = claim_stdout()
    os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
    handlers: dict[str, Handler] = {}
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:

        def build(model: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
            import torch
            import vllm

            (Path(folder) / "config.json").write_text(json.dumps(model))
            llm = vllm.LLM(folder, load_format="dummy", skip_tokenizer_init=True, **engine)
            handlers.update(StepLoop(VLLMStepper(llm.llm_engine), model["vocab_size"]).handlers())
            on_gpu = torch.cuda.is_available()
            return {
                "options": engine,
                "chosen": _chosen(llm.llm_engine),
                "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
                "environment": {name: os.environ[name] for name in _ENVIRONMENT},
                "device": {"device_name": torch.cuda.get_device_name() if on_gpu else "cpu"},
                "on_gpu": on_gpu,
            }

        handlers["build"] = build
        serve(handlers, channel)


if __name__ == "__main__":
    main()
