"""A worker that needs no engine, for the tests of `loadtest.workers`."""

from __future__ import annotations

import os
import time
from typing import Any

from loadtest.worker_protocol import claim_stdout, foreign_modules, serve


def _fail() -> None:
    raise ValueError("no such thing")


def _noise() -> str:
    print("a library prints")
    os.write(1, b"and so does C code\n")
    return "clean"


def _echo(**params: Any) -> dict[str, Any]:
    return params


if __name__ == "__main__":
    serve(
        {
            "echo": _echo,
            "fail": _fail,
            "noise": _noise,
            "sleep": lambda seconds: time.sleep(seconds),
            "exit": os._exit,
            "foreign": lambda: foreign_modules(frozenset()),
        },
        claim_stdout(),
    )
