"""Runs a scheduled step on the device: one forward pass over all its tokens, then the batched sampler."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx

from mlx_engine.attention.fused import kernels_run_here
from mlx_engine.attention.kernels.sampling import sample_rows
from mlx_engine.compiled_decode import CompiledDecode
from mlx_engine.input_batch import InputBatch, build_input_batch
from mlx_engine.interfaces import AttentionBackend, StepHandle
from mlx_engine.native.graphs import Fetch
from mlx_engine.paged_model import PagedModel
from mlx_engine.recorded_chunks import RecordedChunks
from mlx_engine.recorded_decode import RecordedDecode
from mlx_engine.sampler import build_sampling_batch, sample, sampling_options
from mlx_engine.types import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


def _output(step: int, request_ids: Sequence[str], draft_samples: range, tokens: Sequence[int]) -> ModelRunnerOutput:
    """The samples by request; those of drafts apart."""
    if not draft_samples:
        return ModelRunnerOutput(step, dict(zip(request_ids, tokens, strict=True)))
    sampled: dict[str, int] = {}
    after_drafts: dict[str, list[int]] = {}
    for i, (request_id, token) in enumerate(zip(request_ids, tokens, strict=True)):
        if i in draft_samples:
            after_drafts.setdefault(request_id, []).append(token)
        else:
            sampled[request_id] = token
    return ModelRunnerOutput(step, sampled, after_drafts)


class MLXStepHandle:
    """A step as a lazy MLX graph."""

    __slots__ = ("_arrays", "_draft_samples", "_launched", "_request_ids", "_sampled", "_step")

    def __init__(
        self,
        step: int,
        request_ids: list[str],
        sampled: mx.array | None,
        state: list[mx.array],
        draft_samples: range = range(0),
    ) -> None:
        self._step = step
        self._launched = False
        self._request_ids = request_ids
        self._draft_samples = draft_samples
        self._sampled = sampled
        self._arrays = state if sampled is None else [sampled, *state]

    def launch(self) -> None:
        """See StepHandle. A second call does nothing."""
        if self._launched:
            return
        self._launched = True
        mx.async_eval(self._arrays)  # type: ignore[no-untyped-call]

    def wait(self) -> ModelRunnerOutput:
        """See StepHandle."""
        if self._sampled is None:
            mx.eval(self._arrays)
        # A pool that is still referenced here could not be updated in place by the next step.
        self._arrays = []
        tokens: list[int] = [] if self._sampled is None else self._sampled.tolist()  # type: ignore[assignment]
        # A compiled step has samples of padding rows too, after the others.
        return _output(self._step, self._request_ids, self._draft_samples, tokens[: len(self._request_ids)])


class FetchedStepHandle:
    """A step that is on its way already, and whose samples come by themselves."""

    __slots__ = ("_fetch", "_request_ids", "_step")

    def __init__(self, step: int, request_ids: list[str], fetch: Fetch) -> None:
        self._step = step
        self._request_ids = request_ids
        self._fetch = fetch

    def launch(self) -> None:
        """See StepHandle."""

    def wait(self) -> ModelRunnerOutput:
        """See StepHandle."""
        tokens = self._fetch.wait()[: len(self._request_ids)]
        return ModelRunnerOutput(self._step, dict(zip(self._request_ids, tokens, strict=True)))


class MLXModelRunner:
    """The ModelRunner for mlx-lm models.

    With `compiled`, steps of decode rows only run as compiled functions, and every step is handed to the device as soon
    as it is built: the backend's pools are written in place, in an order that data flow keeps. With `recorded` they are
    launched from recordings, with `recorded_chunks` also small steps with chunks, and all samples go through one array.
    """

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        *,
        block_size: int,
        vocab_size: int,
        compiled: CompiledDecode | None = None,
        recorded: RecordedDecode | None = None,
        recorded_chunks: RecordedChunks | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._compiled = compiled
        self._recorded = recorded
        self._recorded_chunks = recorded_chunks
        self._last_sampled: mx.array | None = None
        self._last_request_ids: list[str] = []
        self._counts: Counter[str] = Counter()
        self._counts_at_start: Mapping[str, int] = {}  # what the warm-up made the backend count

    def warm_up(self) -> Iterator[float]:
        """Compiles what can be compiled; yields the share that is done."""
        if self._recorded is not None:
            yield from self._record(self._recorded)
        if self._recorded is None and self._compiled is not None:
            # What a refused recording has left.
            self._compiled.forget()
            yield from self._compiled.warm_up()
        self._counts_at_start = self._backend.dispatch_counts()

    def _record(self, recorded: RecordedDecode) -> Iterator[float]:
        """Records steps, and compiles those that aren't recorded; what CUDA refuses is given up."""
        parts = 2 if self._recorded_chunks is None else 3
        try:
            for done in recorded.warm_up():
                yield done / parts
            if self._compiled is not None:
                for done in self._compiled.warm_up(recorded.missing_rows):
                    yield (1 + done) / parts
            yield 2 / parts
        except RuntimeError as error:
            logger.warning("decode steps are compiled but not recorded, slower for small batches: %s", error)
            self._recorded = self._recorded_chunks = None
        if self._recorded_chunks is not None:
            try:
                for done in self._recorded_chunks.warm_up():
                    yield (parts - 1 + done) / parts
            except RuntimeError as error:
                logger.warning("steps with prefill chunks are not recorded, slower for short prompts: %s", error)
                self._recorded_chunks = None

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """See ModelRunner."""
        try:
            return self._execute(output)
        except Exception:
            self._forget()
            raise

    def _forget(self) -> None:
        """Lets go of a step that failed: the one after would follow it, and so run again what is left of it."""
        self._last_sampled, self._last_request_ids = None, []
        if self._compiled is None:
            return
        # What has begun must not run beside the step after, which writes to the same pools.
        with contextlib.suppress(RuntimeError):
            mx.synchronize()
        self._compiled.forget()

    def _execute(self, output: SchedulerOutput) -> StepHandle:
        batch = build_input_batch(output, self._block_size, self._last_request_ids)
        request_ids = [seq.request_id for seq in batch.samples]
        recorded, compiled = self._recorded, self._compiled
        fetch = self._launch_recorded(batch)
        if recorded is not None and fetch is not None:
            self._last_sampled, self._last_request_ids = recorded.samples, request_ids
            return FetchedStepHandle(output.step, request_ids, fetch)
        if compiled is not None and compiled.takes(batch):
            self._counts["compiled"] += 1
            sampled: mx.array | None = compiled(batch, self._last_sampled)
        else:
            sampled = self._run(batch)
        if batch.num_drafts:
            # Nothing is scheduled before its result is known, so no later step takes samples of it on the device.
            self._last_sampled, self._last_request_ids = None, []
            handle = MLXStepHandle(output.step, request_ids, sampled, self._backend.state(), batch.draft_samples)
            if self._compiled is not None:
                handle.launch()
            return handle
        if recorded is not None and sampled is not None:
            self._last_sampled, self._last_request_ids = recorded.samples, request_ids
            return FetchedStepHandle(
                output.step, request_ids, recorded.publish(sampled.astype(mx.uint32), *self._backend.state())
            )
        if compiled is not None and sampled is not None:
            sampled = compiled.padded(sampled)
        self._last_sampled, self._last_request_ids = sampled, request_ids
        handle = MLXStepHandle(output.step, request_ids, sampled, self._backend.state())
        if compiled is not None:
            handle.launch()
        return handle

    def _launch_recorded(self, batch: InputBatch) -> Fetch | None:
        """Hands the step to the device if a recording holds it."""
        if self._recorded is None or self._compiled is None or batch.num_drafts:
            return None
        fetch, path = None, "recorded"
        if self._compiled.takes(batch):
            fetch = self._recorded.launch(batch)
        elif self._recorded_chunks is not None and batch.prefill_chunks:
            fetch, path = self._recorded_chunks.launch(batch), "recorded_chunks"
        if fetch is not None:
            self._counts[path] += 1
        return fetch

    def dispatch_counts(self) -> Mapping[str, int]:
        """See ModelRunner."""
        start, now = self._counts_at_start, self._backend.dispatch_counts()
        served = {path: count - start.get(path, 0) for path, count in now.items() if count > start.get(path, 0)}
        return {**served, **self._counts}

    def _run(self, batch: InputBatch) -> mx.array | None:
        token_ids = mx.array(batch.token_ids)
        if batch.feedback is not None and self._last_sampled is not None:
            index = mx.array(batch.feedback)
            fed_back = self._last_sampled[mx.maximum(index, 0)].astype(token_ids.dtype)
            token_ids = mx.where(index >= 0, fed_back, token_ids)
        # A step without samples evaluates the pool only: its logits, and the last layer's MLP, are never computed.
        rows = mx.array(batch.sample_rows) if 0 < len(batch.sample_rows) < batch.num_rows else None
        logits = self._model(token_ids, self._backend.begin_step(batch), rows)
        if not batch.samples:
            return None
        if kernels_run_here():
            return sample_rows(logits, mx.array(sampling_options(batch.samples)))
        return sample(logits, build_sampling_batch(batch.samples, self._vocab_size))
