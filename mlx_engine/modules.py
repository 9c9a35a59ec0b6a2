"""Changes to the modules of a loaded model."""

from __future__ import annotations

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
