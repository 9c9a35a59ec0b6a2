"""The child's side of `loadtest.workers`: one JSON object a line in, one out. Imports nothing of any engine."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Handler = Callable[..., Any]


def claim_stdout() -> TextIO:
    """The real standard output; whatever libraries print from here on, from C too, goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(handlers: Mapping[str, Handler], channel: TextIO) -> None:
    """Answers {"method", "params"} with {"result"} or {"error"} until standard input ends.

    A handler that raises is an answer, with its traceback; the worker lives on.
    """
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = {"result": handlers[call["method"]](**call["params"])}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        channel.write(json.dumps(reply) + "\n")
        channel.flush()


def foreign_modules(allowed: frozenset[str]) -> list[str]:
    """Our own modules that this process has imported, beyond the allowed ones."""
    ours = ("mlx_engine", "plugins", "deployments")
    return sorted(name for name in sys.modules if name.split(".")[0] in ours and name not in allowed)
