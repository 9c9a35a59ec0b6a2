"""Changes to the modules of a loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.nn as nn


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts `module` where `model.named_modules()` has `name`, for example "model.layers.3.self_attn.rope"."""
    *path, last = name.split(".")
    parent: Any = model
    for part in path:
        parent = parent[int(part)] if part.isdigit() else getattr(parent, part)
    if last.isdigit():
        parent[int(last)] = module
    else:
        setattr(parent, last, module)


def inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's modules by name, those inside another one before it.

    For changing a model on the way: a module that is replaced, and all inside it, is let go with the next one.
    """
    # Outer ones come first in it, and whatever is still in it is held.
    modules = model.named_modules()
    while modules:
        yield modules.pop()
