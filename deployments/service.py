"""What the OpenAI endpoints do, between a request's body and the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from deployments import openai_params as params
from deployments.engine_api import EngineClient, HealthStatus, ServedModel
from deployments.errors import APIError, bad_request, too_many, unavailable
from deployments.generation import AnySequence, Delta, EmptySequence, TextSequence, merged
from deployments.metrics import Metrics
from deployments.openai_format import Kind, ResponseFormat
from deployments.openai_types import ChatCompletionRequest, CompletionRequest, GenerationRequest
from deployments.settings import QuireSettings
from deployments.streaming import DONE, EventStream
from mlx_engine.types import Request

_T = TypeVar("_T")
_Wire = TypeVar("_Wire", bound=BaseModel)
# Texts and bodies beyond this would hold up every stream of the replica while they are parsed or tokenized.
_BIG_CHARS = 8192
_BIG_BYTES = 256 * 1024
# No tokenizer's average token is this long; beyond it a prompt isn't worth tokenizing to know that it is too long.
_MAX_CHARS_PER_TOKEN = 256


class OpenAIService:
    """Serves one model. Belongs to one event loop's thread."""

    def __init__(self, settings: QuireSettings, engine: EngineClient, metrics: Metrics) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self._num_open = 0  # sequences between admission and end

    async def chat(self, body: bytes) -> Response:
        """POST /v1/chat/completions. Raises what `to_api_error` understands."""
        arrival = time.monotonic()
        request = await _parse(ChatCompletionRequest, body)
        params.check_model(request.model, self.settings.served_ids)
        add_prompt, go_on = params.generation_prompt(request)
        messages = params.template_messages(request)
        model = self._ready_model()
        size = sum(len(message["content"]) for message in messages)
        self._check_size(size, model, "messages")
        token_ids = await _off_loop_if(
            size > _BIG_CHARS,
            lambda: model.text.encode_chat(messages, add_generation_prompt=add_prompt, continue_final_message=go_on),
        )
        return await self._generate(request, model, [token_ids], arrival, "chat")

    async def completion(self, body: bytes) -> Response:
        """POST /v1/completions. Raises what `to_api_error` understands."""
        arrival = time.monotonic()
        request = await _parse(CompletionRequest, body)
        params.check_model(request.model, self.settings.served_ids)
        limit = self.settings.server.max_prompts_per_request
        if len(request.prompts) > limit:
            raise bad_request(f"prompt: at most {limit} prompts in one request.", param="prompt")
        model = self._ready_model()
        size = sum(len(prompt) for prompt in request.prompts)
        self._check_size(max(map(len, request.prompts)), model, "prompt")
        prompts = await _off_loop_if(
            size > _BIG_CHARS,
            lambda: [params.prompt_token_ids(request, index, model) for index in range(len(request.prompts))],
        )
        return await self._generate(request, model, prompts, arrival, "text")

    def _ready_model(self) -> ServedModel:
        health = self.engine.health()
        model = self.engine.model
        if health.status is HealthStatus.OK and model is not None:
            return model
        if health.status is HealthStatus.LOADING:
            stage = f" ({health.stage}, {health.progress:.0%})" if health.stage else ""
            raise unavailable(f"The engine is loading{stage}. Try again shortly.", code="engine_loading")
        reason = f": {health.error}" if health.error else "."
        may_recover = health.status not in (HealthStatus.FAILED, HealthStatus.STOPPED)
        raise unavailable(f"The engine is {health.status.value}{reason}", retry=may_recover)

    def _check_size(self, num_chars: int, model: ServedModel, param: str) -> None:
        context = model.info.max_model_len
        if num_chars > context * _MAX_CHARS_PER_TOKEN:
            raise bad_request(
                f"The prompt has {num_chars} characters; the model's context length is {context} tokens.",
                param=param,
                code="context_length_exceeded",
            )

    async def _generate(
        self, request: GenerationRequest, model: ServedModel, prompts: Sequence[list[int]], arrival: float, kind: Kind
    ) -> Response:
        # All prompts are checked before the first one starts, and before a stream begins.
        sampling = [params.sampling_params(request, model, len(prompt)) for prompt in prompts]
        writer = ResponseFormat(kind, self.settings.primary_id)
        admission = self._admit(len(prompts))
        handed_on = False
        try:
            for index, (prompt, sampled) in enumerate(zip(prompts, sampling, strict=True)):
                if request.max_tokens == 0 and kind == "text":
                    admission.sequences.append(EmptySequence(index, len(prompt)))
                    continue
                engine_request = Request(
                    request_id=f"{writer.id}-{index}",
                    prompt_token_ids=tuple(prompt),
                    sampling=sampled,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt,
                    arrival_time=arrival,
                )
                clock = self.metrics.sequence(arrival)
                admission.sequences.append(
                    TextSequence(index, engine_request, self.engine, model, request.stop_strings, clock)
                )
            if not request.stream:
                return await _whole(writer, admission.sequences)
            deltas = merged(admission.sequences)
            # Only with the first token is it certain that the answer is a stream and not an error.
            first = await anext(deltas)
            handed_on = True
            include_usage = bool(request.stream_options and request.stream_options.include_usage)
            return EventStream(
                _events(writer, admission.sequences, first, deltas, include_usage), on_close=admission.close
            )
        finally:
            if not handed_on:
                admission.close()

    def _admit(self, num_sequences: int) -> _Admission:
        limit = self.settings.server.max_open_sequences
        if num_sequences > limit:
            message = f"This request has {num_sequences} prompts, and the server holds at most {limit} sequences."
            raise APIError(400, message, param="prompt")
        if self._num_open + num_sequences > limit:
            raise too_many(f"The server holds {self._num_open} of at most {limit} sequences. Try again shortly.")
        self._num_open += num_sequences
        return _Admission(self, num_sequences)

    def _leave(self, num_sequences: int) -> None:
        self._num_open -= num_sequences


class _Admission:
    """The sequences of one response, and their places under max_open_sequences."""

    def __init__(self, service: OpenAIService, num_sequences: int) -> None:
        self._service = service
        self._num_sequences = num_sequences
        self.sequences: list[AnySequence] = []

    def close(self) -> None:
        """Ends what is still going on and gives the places back. May be called again."""
        self._service._leave(self._num_sequences)
        self._num_sequences = 0
        for sequence in self.sequences:
            sequence.close()


async def _parse(model: type[_Wire], body: bytes) -> _Wire:
    return await _off_loop_if(len(body) > _BIG_BYTES, lambda: params.parse_request(model, params.parse_json(body)))


async def _off_loop_if(big: bool, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if big else work()


async def _whole(writer: ResponseFormat, sequences: Sequence[AnySequence]) -> Response:
    texts: list[list[str]] = [[] for _ in sequences]
    reasons = [""] * len(sequences)
    async with aclosing(merged(sequences)) as deltas:
        async for delta in deltas:
            texts[delta.index].append(delta.text)
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    body = writer.whole(sequences, ["".join(parts) for parts in texts], reasons)
    return Response(body, media_type="application/json")


async def _events(
    writer: ResponseFormat,
    sequences: Sequence[AnySequence],
    first: Delta,
    deltas: AsyncGenerator[Delta, None],
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    async with aclosing(deltas):
        yield writer.events(first)
        async for delta in deltas:
            if event := writer.events(delta):
                yield event
    if include_usage:
        yield writer.usage_event(sequences)
    yield DONE
