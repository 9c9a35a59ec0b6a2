"""From a request's body to what the engine is asked for; everything that can be refused is refused here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel

from deployments.engine_api import ServedModel
from deployments.errors import APIError, bad_request
from deployments.openai_types import ChatCompletionRequest, CompletionRequest, GenerationRequest, Message, ToolCall
from mlx_engine.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions
_MAX_DEPTH = 100
_T = TypeVar("_T", bound=BaseModel)


def _absent(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is(*neutral: Any) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        # bool is an int: True == 1 would let `n: true` pass for one.
        return value is None or any(type(value) in (type(n), int, float) and value == n for n in neutral)

    return check


def _plain_text(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


# Features that are not offered, by field, with what the field may say without asking for the feature.
# Ignoring one of these would give an answer other than the one that was asked for.
NOT_OFFERED: Mapping[str, Callable[[Any], bool]] = {
    "n": _is(1),
    "best_of": _is(1),
    "echo": _absent,
    "suffix": _absent,
    "logprobs": lambda value: value is None or value is False,
    "top_logprobs": lambda value: value is None,
    "prompt_logprobs": lambda value: value is None,
    "logit_bias": _absent,
    "presence_penalty": _is(0.0),
    "frequency_penalty": _is(0.0),
    "repetition_penalty": _is(1.0),
    "length_penalty": _is(1.0),
    "min_tokens": _is(0),
    "bad_words": _absent,
    "use_beam_search": _absent,
    "response_format": _plain_text,
    "structured_outputs": _absent,
    "guided_json": _absent,
    "guided_regex": _absent,
    "guided_choice": _absent,
    "guided_grammar": _absent,
    "tools": _absent,
    "tool_choice": _is("none"),
    "functions": _absent,
    "function_call": _is("none"),
    "modalities": lambda value: value is None or value == ["text"],
    "audio": _absent,
    "web_search_options": lambda value: value is None,
}


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's object. Raises APIError (400) for anything that is not one, NaN and Infinity included."""
    try:
        # A JSON text's encoding is UTF-8; `json.loads` alone would guess UTF-16 from the first bytes.
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    if _depth_exceeds(value, _MAX_DEPTH):
        raise bad_request("The body is nested too deeply.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Level by level, without recursion: what is parsed here is validated recursively later."""
    level = [value]
    for _ in range(limit):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += [child for child in item.values() if isinstance(child, dict | list)]
            else:
                children += [child for child in item if isinstance(child, dict | list)]
        if not children:
            return False
        level = children
    return True


def parse_request(model: type[_T], value: dict[str, Any]) -> _T:
    """The wire model of a body. Raises APIError (400) or pydantic's ValidationError, which become the same envelope."""
    for field, is_neutral in NOT_OFFERED.items():
        if field in value and not is_neutral(value[field]):
            raise bad_request(f"{field}: this feature is not offered, or not with this value.", param=field)
    request = model.model_validate(value)
    if isinstance(request, GenerationRequest):
        _check_together(request)
    return request


def _check_together(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: only allowed when stream is true.", param="stream_options")
    for string in request.stop_strings:
        encodable(string, "stop")
    if request.cache_salt is not None:
        encodable(request.cache_salt, "cache_salt")


def encodable(text: str, param: str) -> str:
    """The text itself. Raises APIError (400) for lone surrogates, which JSON can spell and no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"{param}: the text holds half a surrogate pair, which is no character.", param) from None
    return text


def check_model(requested: str, served: tuple[str, ...]) -> None:
    """Raises APIError (404) for a model that isn't served; looks nothing up anywhere."""
    if requested not in served:
        names = ", ".join(served)
        raise APIError(
            404, f"The model {requested[:100]!r} does not exist here. Served: {names}.", param="model",
            code="model_not_found",
        )  # fmt: skip


def sampling_params(request: GenerationRequest, model: ServedModel, num_prompt_tokens: int) -> SamplingParams:
    """What the engine samples by; max_tokens is clamped to what fits, and at least 1.

    Raises APIError (400) if the prompt leaves no room for a token, RequestError for values out of range.
    """
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    room = _room(model, num_prompt_tokens, param)
    vocab_size = model.info.vocab_size
    stop_token_ids = tuple(request.stop_token_ids or ())
    if any(not 0 <= token < vocab_size for token in stop_token_ids):
        raise bad_request(f"stop_token_ids: each must lie between 0 and {vocab_size - 1}.", param="stop_token_ids")
    asked = _asked_tokens(request)
    return SamplingParams(
        max_tokens=room if asked is None else max(1, min(asked, room)),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=min(request.top_k or 0, vocab_size),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        # One and the same seed for every way to write it in 64 bits.
        seed=None if request.seed is None else request.seed % 2**63,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def _asked_tokens(request: GenerationRequest) -> int | None:
    """None is as many as fit."""
    if isinstance(request, ChatCompletionRequest):
        wanted = request.max_completion_tokens
        field = "max_tokens" if wanted is None else "max_completion_tokens"
        asked = request.max_tokens if wanted is None else wanted
        if asked == 0:
            raise bad_request(f"{field}: must be at least 1 for a chat.", param=field)
        return asked
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def _room(model: ServedModel, num_prompt_tokens: int, param: str) -> int:
    """Tokens that may follow the prompt, at least 1."""
    context, pool = model.info.max_model_len, model.info.max_tokens_per_request
    room = min(context, pool) - num_prompt_tokens
    if room < 1:
        where = f"the model's context length is {context} tokens"
        if num_prompt_tokens < context:
            where = f"the KV pool holds {pool} tokens of one request (the model's context length is {context})"
        raise bad_request(
            f"The prompt has {num_prompt_tokens} tokens, but {where}, prompt and output together. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
    return room


def template_messages(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """The messages as a chat template reads them: contents are strings. Raises APIError (400) for missing content."""
    return [_template_message(message, f"messages.{index}") for index, message in enumerate(request.messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    content = message.content
    if content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise bad_request(f"{where}.content: must be a string or a list of text parts.", param="messages")
        content = ""
    elif isinstance(content, list):
        content = "".join(part.text for part in content)
    # Templates know `system`; most would print `developer` as it stands.
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": encodable(content, "messages"),
    }
    if message.name is not None:
        result["name"] = encodable(message.name, "messages")
    if message.tool_call_id is not None:
        result["tool_call_id"] = encodable(message.tool_call_id, "messages")
    if message.tool_calls:
        result["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return result


def _template_call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, which is how templates print them; the wire has them as JSON text."""
    result = call.model_dump(exclude_none=True)
    arguments = call.function.arguments
    if isinstance(arguments, str):
        encodable(arguments, "messages")
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return result  # what a model wrote need not be JSON
        if isinstance(parsed, dict):
            result["function"]["arguments"] = parsed
    return result


def generation_prompt(request: ChatCompletionRequest) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message). Raises APIError (400) where they contradict the messages."""
    go_on = bool(request.continue_final_message)
    add = request.add_generation_prompt
    if go_on and add:
        raise bad_request(
            "continue_final_message: not together with add_generation_prompt.", param="continue_final_message"
        )
    if go_on and request.messages[-1].role != "assistant":
        raise bad_request(
            "continue_final_message: the last message must be the assistant's.", param="continue_final_message"
        )
    return (not go_on if add is None else add), go_on


def prompt_token_ids(request: CompletionRequest, index: int, model: ServedModel) -> list[int]:
    """One of the request's prompts as ids. Raises APIError (400) for an empty one or ids outside the vocabulary."""
    prompt = request.prompts[index]
    if isinstance(prompt, str):
        prompt = model.text.encode(encodable(prompt, "prompt"))
    if not prompt:
        raise bad_request("prompt: must hold at least one token.", param="prompt")
    if not 0 <= min(prompt) <= max(prompt) < model.info.vocab_size:
        raise bad_request(f"prompt: token ids must lie between 0 and {model.info.vocab_size - 1}.", param="prompt")
    return prompt
