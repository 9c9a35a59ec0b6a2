"""Sends an mlx-lm model's attention through the paged cache view.

mlx-lm's models call the function `scaled_dot_product_attention` of their own module, with the layer's cache as an
argument. Replacing that name, once per module, lets every model run on paged K/V unchanged: a call whose cache is one
of our views goes to `LayerKVView.attend`; any other call goes to the original.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_engine.errors import ModelLoadError

_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class PagedMask:
    """What `make_mask` hands to the model: causal, over the last `window` tokens, or over all."""

    window: int | None = None


class PagedView:
    """Base of the cache views: marks a cache as ours. No `bits`, no `__len__` (see LayerKVView)."""

    __slots__ = ("offset",)

    offset: Any

    def attend(self, queries: Any, *, scale: float, mask: Any, sinks: Any | None) -> Any:
        """See LayerKVView."""
        raise NotImplementedError

    def rotates(self, num_heads: int) -> bool:
        """Whether `attend` of so many heads takes a `rotation`, for queries and keys that have not been rotated yet."""
        return False


def narrower(a: int | None, b: int | None) -> int | None:
    """The smaller of two windows, where None is unlimited."""
    if a is None or b is None:
        return a if b is None else b
    return min(a, b)


def install_paged_attention(model: nn.Module) -> None:
    """Makes the model's attention modules look at their cache first. Safe to call again.

    Raises ModelLoadError if none of the model's modules uses mlx-lm's attention function.
    """
    found = False
    for module in {type(m).__module__ for m in model.modules()}:
        namespace = vars(sys.modules[module])
        function = namespace.get(_NAME)
        if function is None:
            continue
        found = True
        if not getattr(function, "quire_paged", False):
            namespace[_NAME] = _dispatching(function)
    if not found:
        raise ModelLoadError(
            f"{type(model).__module__} does not use mlx-lm's {_NAME}: this architecture can't run on paged K/V."
        )


def _dispatching(original: Any) -> Any:
    def scaled_dot_product_attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        if isinstance(cache, PagedView):
            return cache.attend(queries, scale=scale, mask=mask, sinks=sinks)
        if sinks is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    scaled_dot_product_attention.quire_paged = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention
