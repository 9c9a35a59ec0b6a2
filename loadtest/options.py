"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any


def positive_int(text: str) -> int:
    """An argparse type. Raises ArgumentTypeError for anything but an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return value


def int_list(text: str) -> list[int]:
    """An argparse type: comma-separated integers of at least 1."""
    return [positive_int(part) for part in text.split(",")]


def key_value(text: str) -> tuple[str, Any]:
    """An argparse type: KEY=VALUE, where VALUE is JSON, or else a string as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def merged(pairs: Sequence[tuple[str, Any]] | None) -> dict[str, Any]:
    """Repeated KEY=VALUE options as one dict; the last of a key wins."""
    return dict(pairs or [])


def result_file(text: str) -> Path:
    """An argparse type: a file for what is measured, refused before the work if it can't be written. Makes nothing.

    Defaults must be strings: argparse hands no others to a type.
    """
    path = Path(text)
    result_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no regular file: name another")
    return path


def result_folder(text: str) -> Path:
    """The same of a folder, which need not be there yet."""
    path = Path(text)
    there = path.absolute()
    try:
        there = next(folder for folder in (there, *there.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"nothing can be written into {there}: {error.strerror}") from error
    return path


def engine_overrides() -> list[str]:
    """The environment's variables that every server of ours would heed, so that arms or results would be off."""
    return sorted(name for name in os.environ if name.startswith("QUIRE_ENGINE"))


def blas_summary(status: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's BlasStatus for the result: the library from its site-packages folder on, without the machine's own."""
    library = status["library"]
    return {
        "active": status["active"],
        "library": None if library is None else library.rsplit("site-packages/", 1)[-1],
        "num_threads": status["num_threads"],
    }


def exit_on_sigterm() -> None:
    """Makes SIGTERM end the program as Ctrl-C does: through its `finally`s, which stop what it has started."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
