"""The wire models: requests as clients send them, and the pieces of responses.

Types are strict: `"7"`, `1.5` and `true` are not a number of tokens. Unknown fields are ignored; fields of features
that are not offered are in `openai_params.NOT_OFFERED`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Beyond these nothing sensible is meant, and the engine's arrays hold 32-bit integers.
_MAX_INT32 = 2**31 - 1
_Int = Annotated[int, Field(strict=True)]
_Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Bool = Annotated[bool, Field(strict=True)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True, protected_namespaces=())


class StreamOptions(_Wire):
    """What a stream carries besides text."""

    include_usage: _Bool | None = None


class GenerationRequest(_Wire):
    """What chat and text completions share."""

    model: str
    max_tokens: Annotated[_Int, Field(ge=0)] | None = None
    temperature: Annotated[_Float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[_Float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[_Int, Field(ge=-1)] | None = None  # -1 and 0 are off
    min_p: Annotated[_Float, Field(ge=0, le=1)] | None = None
    seed: Annotated[_Int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Int] | None = None
    ignore_eos: _Bool | None = None
    stream: _Bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[_Int, Field(ge=1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[_Int, Field(ge=-_MAX_INT32, le=_MAX_INT32)] | None = None

    @field_validator("stop")
    @classmethod
    def _stops_say_something(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("a stop string must not be empty")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, whichever way it was written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(_Wire):
    """A part of a message's content. Only text is offered."""

    type: Literal["text"]
    text: str


class FunctionCall(_Wire):
    """What a tool call called."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Wire):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Wire):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[_Int, Field(ge=0)] | None = None  # wins over max_tokens
    add_generation_prompt: _Bool | None = None
    continue_final_message: _Bool | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any  # str, list[str], list[int] or list[list[int]], as `prompts` has it

    @field_validator("prompt")
    @classmethod
    def _prompt_is_text_or_ids(cls, value: Any) -> list[str] | list[list[int]]:
        # By hand: pydantic's union would try each branch on each of thousands of ids.
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(type(item) is int for item in value):
                return [value]
            if all(isinstance(item, str) for item in value):
                return value
            if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
                return value
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """`prompt` as a list, whichever way it was written."""
        prompts: list[str] | list[list[int]] = self.prompt
        return prompts


class ModelCard(BaseModel):
    """An entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlx-quire"
    root: str  # the id that an alias stands for
    max_model_len: int | None  # tokens, prompt and output together; null until the engine is ready


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
