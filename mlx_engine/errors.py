"""Errors that a user can cause. Each message says what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError):
    """A configuration that can't work: unknown key, impossible size, missing path."""


class ModelLoadError(QuireError):
    """A model that can't be loaded, or that can't run on a paged KV cache."""


class KernelError(QuireError):
    """A GPU kernel that this machine's GPU or its compiler can't run, or not rightly."""


class PluginError(QuireError):
    """A plugin that is missing, broken, or written for another interface version."""


class RequestError(QuireError):
    """A request that can't be served as it is.

    Attributes:
        param: the request field at fault, in the OpenAI API's spelling, or None.
        code: a short machine-readable reason, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineDeadError(QuireError):
    """The engine thread or process has ended; requests can't be served until it restarts."""


class IntegrityError(QuireError):
    """An invariant of the KV memory is broken: a bug of ours or of a plugin, never of a user."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, for a message; None if none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
