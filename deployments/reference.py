"""Writes the README's tables from the code: configuration keys, and request fields.

python -m deployments.reference README.md            # rewrites the parts between the markers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from deployments.openai_params import NOT_OFFERED
from deployments.openai_types import ChatCompletionRequest, CompletionRequest
from deployments.settings import QuireSettings

# What a supported request field means; every field of the wire models has a line here.
FIELD_NOTES: Mapping[str, str] = {
    "model": "the served id or an alias; any other is 404",
    "messages": "roles `system`, `developer` (as `system`), `user`, `assistant`, `tool`; text parts are joined",
    "prompt": "a string, a list of strings, token ids, or a list of lists of token ids",
    "max_tokens": "clamped to the room left; default 16 for completions, all the room for chat; 0 is 400 for chat",
    "max_completion_tokens": "wins over `max_tokens`",
    "temperature": "0 is greedy; default 1",
    "top_p": "default 1",
    "top_k": "0 or -1 is off",
    "min_p": "default 0",
    "seed": "same seed, same tokens, whatever else runs: up to rounding, which tells with 16-bit types and int8 K/V",
    "stop": "a string or a list; the text ends before the first match; an empty string is 400",
    "stop_token_ids": "beside the model's own end tokens",
    "ignore_eos": "go on past the model's end tokens",
    "stream": "server-sent events, ended by `[DONE]`",
    "stream_options": "`include_usage`; 400 without `stream`",
    "n": "1 only",
    "cache_salt": "requests share cached K/V only with the same salt",
    "priority": "lower runs sooner, under the `priority` scheduler",
    "add_generation_prompt": "default true, false when continuing",
    "continue_final_message": "go on with the last message, which must be the assistant's",
}


def config_table() -> str:
    """Every key of `args`, dotted, with default and meaning, as a Markdown table."""
    rows = [f"| `{key}` | `{default}` | {text} |" for key, default, text in _config_rows(QuireSettings, "")]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def field_table() -> str:
    """Every request field that is taken, and every one that is refused, as two Markdown tables."""
    chat, completion = ChatCompletionRequest.model_fields, CompletionRequest.model_fields
    rows = [
        f"| `{name}` | {_mark(name in chat)} | {_mark(name in completion)} | {FIELD_NOTES[name]} |"
        for name in dict.fromkeys((*chat, *completion))
    ]
    refused = ", ".join(f"`{name}`" for name in NOT_OFFERED if name != "n")
    return "\n".join(
        [
            "| field | chat | completions | |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Refused with 400 unless they ask for nothing: {refused}.",
            "",
            "Any other field is ignored.",
        ]
    )


def render(text: str) -> str:
    """The text with the parts between `<!-- NAME:begin -->` and `<!-- NAME:end -->` written anew.

    Raises ValueError when a marker is missing.
    """
    for name, table in (("config", config_table()), ("fields", field_table())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found, rest = text.partition(begin)
        _, also_found, after = rest.partition(end)
        if not (found and also_found):
            raise ValueError(f"the text has no {begin} … {end}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def _mark(present: bool) -> str:
    return "yes" if present else ""


def _config_rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _config_rows(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, _default(field.get_default(call_default_factory=True)), field.description or ""


def _default(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def main(argv: Sequence[str]) -> int:
    """Rewrites the tables of the given files."""
    for name in argv:
        path = Path(name)
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
