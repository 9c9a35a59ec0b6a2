"""Runs a scheduled step on the device: one forward pass over all its tokens, then the batched sampler."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlx_engine.input_batch import build_input_batch
from mlx_engine.interfaces import AttentionBackend
from mlx_engine.paged_model import PagedModel
from mlx_engine.sampler import build_sampling_batch, sample
from mlx_engine.types import ModelRunnerOutput, SchedulerOutput


class MLXStepHandle:
    """A step as a lazy MLX graph."""

    __slots__ = ("_arrays", "_request_ids", "_sampled", "_step")

    def __init__(self, step: int, request_ids: list[str], sampled: mx.array | None, state: list[mx.array]) -> None:
        self._step = step
        self._request_ids = request_ids
        self._sampled = sampled
        self._arrays = state if sampled is None else [sampled, *state]

    def launch(self) -> None:
        """See StepHandle."""
        mx.async_eval(self._arrays)  # type: ignore[no-untyped-call]

    def wait(self) -> ModelRunnerOutput:
        """See StepHandle."""
        if self._sampled is None:
            mx.eval(self._arrays)
        # A pool that is still referenced here could not be updated in place by the next step.
        self._arrays = []
        tokens: list[int] = [] if self._sampled is None else self._sampled.tolist()  # type: ignore[assignment]
        return ModelRunnerOutput(self._step, dict(zip(self._request_ids, tokens, strict=True)))


class MLXModelRunner:
    """The ModelRunner for mlx-lm models."""

    def __init__(self, model: PagedModel, backend: AttentionBackend, *, block_size: int, vocab_size: int) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._last_sampled: mx.array | None = None
        self._last_request_ids: list[str] = []

    def execute_model(self, output: SchedulerOutput) -> MLXStepHandle:
        """See ModelRunner."""
        batch = build_input_batch(output, self._block_size, self._last_request_ids)
        token_ids = mx.array(batch.token_ids)
        if batch.feedback is not None and self._last_sampled is not None:
            index = mx.array(batch.feedback)
            fed_back = self._last_sampled[mx.maximum(index, 0)].astype(token_ids.dtype)
            token_ids = mx.where(index >= 0, fed_back, token_ids)
        # A step without samples evaluates the pool only: its logits, and the last layer's MLP, are never computed.
        rows = mx.array(batch.sample_rows) if 0 < len(batch.sample_rows) < batch.num_rows else None
        logits = self._model(token_ids, self._backend.begin_step(batch), rows)
        request_ids = [seq.request_id for seq in batch.samples]
        sampled = sample(logits, build_sampling_batch(batch.samples, self._vocab_size)) if request_ids else None
        self._last_sampled, self._last_request_ids = sampled, request_ids
        return MLXStepHandle(output.step, request_ids, sampled, self._backend.state())

    def dispatch_counts(self) -> Mapping[str, int]:
        """See ModelRunner."""
        return self._backend.dispatch_counts()
