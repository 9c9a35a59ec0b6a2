"""An mlx-lm model made to run ragged batches on paged K/V: one token a row, one cache view a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_engine.attention.dispatch import PagedMask, PagedView, install_paged_attention, narrower
from mlx_engine.errors import ModelLoadError
from mlx_engine.interfaces import LayerKVView
from mlx_engine.models.load import LoadedModel
from mlx_engine.modules import replace_module
from mlx_engine.types import LayerKVSpec

_PROBE_TOKENS = 12
_FEWER = (1, 2)  # which may run through other code than more rows
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# How many times longer a multiplication takes in attention than in a linear layer: on a CPU the exponentials cost more
# than the products (SmolLM2-135M on two cores: 5.3 times the time for a chunk of 512 after 5,500 tokens).
_ATTENTION_FACTOR = {mx.DeviceType.cpu: 3.0, mx.DeviceType.gpu: 1.0}
# Relative L2 error of the logits between the model's own path and ours: rounding stays far below, a wrong position,
# mask or layer far above.
_TOLERANCE = {mx.float32: 2e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}


class PagedModel:
    """Runs `[T]` token ids through the model, each row at its own position of its own sequence.

    `adapt` may change the model for this device; the probe that follows covers its changes. Raises ModelLoadError,
    naming the architecture, when the model keeps state that isn't K/V or when a probe of a few tokens gives other
    logits than the unchanged model with its own dense cache.
    """

    def __init__(self, loaded: LoadedModel, adapt: Callable[[nn.Module], None] | None = None) -> None:
        self._model = loaded.model
        self._name = str(loaded.config.get("model_type", type(loaded.model).__module__))
        self._windows = self._check_caches()
        try:
            install_paged_attention(self._model)
        except ModelLoadError as error:
            raise ModelLoadError(f"the architecture {self._name!r} can't be served: {error}") from error
        linear_work = _linear_work(loaded)
        # Taken before anything is changed, through the model's own code only.
        tokens = mx.array([(7 * i + 3) % loaded.vocab_size for i in range(_PROBE_TOKENS)])
        expected = self._model(tokens[None], cache=self._dense_caches())[0]
        mx.eval(expected)
        if adapt is not None:
            adapt(self._model)
        self._head = _RowSelector(self._model)
        self.num_heads: tuple[int, ...] = ()  # query heads of each layer
        self.layers, attention_work = self._probe(tokens, expected, loaded.dtype)
        attention_work *= _ATTENTION_FACTOR[mx.default_device().type]
        # Tokens of context over which attention takes a token as long as all else; None: it hardly grows.
        self.halving_context = max(1, round(linear_work / attention_work)) if attention_work else None

    def __call__(self, token_ids: mx.array, views: Sequence[LayerKVView], rows: mx.array | None) -> mx.array:
        """Logits [S, V] of the given rows [S] of token ids [T], all T rows if None. Lazy, like all MLX."""
        self._head.rows = rows
        logits: mx.array = self._model(token_ids[:, None], cache=list(views)).squeeze(1)
        self._head.rows = None
        # A head of another name (internlm2's `output`) saw all rows.
        if rows is not None and logits.shape[0] != rows.shape[0]:
            logits = logits[rows]
        return logits

    def activation_bytes(self, num_tokens: int) -> int:
        """Peak memory beyond weights of a step of num_tokens tokens with one sample, measured by running one."""
        tokens = mx.zeros((num_tokens,), mx.int32)
        views = self._recording_views(num_tokens)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(self(tokens, views, mx.array([num_tokens - 1])))
        peak = int(mx.get_peak_memory()) - int(before)
        mx.clear_cache()
        return max(peak, 0)

    def _dense_caches(self) -> list[Any]:
        if hasattr(self._model, "make_cache"):
            return list(self._model.make_cache())
        return [KVCache() for _ in self._model.layers]

    def _check_caches(self) -> list[int | None]:
        """Each layer's sliding window. Refuses state that isn't plain K/V."""
        windows: list[int | None] = []
        for layer, cache in enumerate(self._dense_caches()):
            if type(cache) is KVCache:
                windows.append(None)
            elif type(cache) is RotatingKVCache and cache.keep == 0:
                windows.append(int(cache.max_size))
            else:
                raise ModelLoadError(
                    f"the architecture {self._name!r} can't be served: layer {layer} keeps a {type(cache).__name__}, "
                    "and a paged pool holds plain K/V only (attention layers, sliding windows included)."
                )
        return windows

    def _recording_views(self, num_tokens: int) -> list[_RecordingView]:
        return [_RecordingView(num_tokens, window) for window in self._windows]

    def _probe(self, tokens: mx.array, expected: mx.array, dtype: mx.Dtype) -> tuple[tuple[LayerKVSpec, ...], float]:
        """Runs the tokens as ragged rows, compares logits, and reads off what each layer stores.

        Also returns the multiplications of attention, all layers without a window together, for a token of context.
        """
        views = self._recording_views(len(tokens))
        try:
            errors = [
                _relative_error(self(tokens[:few], self._recording_views(few), None), expected[:few]) for few in _FEWER
            ]
            errors.append(_relative_error(self(tokens, views, None), expected))
            error = max(errors, key=lambda e: math.inf if math.isnan(e) else e)
        # Whatever an architecture does with a cache that isn't mlx-lm's own ends here.
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as reason:
            raise ModelLoadError(
                f"the architecture {self._name!r} can't be served: it does not run with one token a row ({reason})"
            ) from reason
        limit = _TOLERANCE.get(dtype, 1e-1)
        if not error <= limit:
            raise ModelLoadError(
                f"the architecture {self._name!r} can't be served: on paged K/V its logits differ from its own by "
                f"{error:.2g} of their norm (at most {limit:g} is rounding)"
            )
        missing = [layer for layer, view in enumerate(views) if view.spec is None or not view.attended]
        if missing:
            raise ModelLoadError(
                f"the architecture {self._name!r} can't be served: its layers {missing} don't attend to their cache"
            )
        specs = tuple(view.spec for view in views if view.spec is not None)
        self.num_heads = tuple(view.num_heads for view in views)
        work = sum(
            view.num_heads * (spec.key_head_dim + spec.value_head_dim)
            for view, spec in zip(views, specs, strict=True)
            if spec.sliding_window is None
        )
        return specs, float(work)


def _relative_error(got: mx.array, expected: mx.array) -> float:
    error: float = abs((mx.linalg.norm(got - expected) / mx.linalg.norm(expected)).item())
    return error


def _linear_work(loaded: LoadedModel) -> float:
    """Multiplications of the linear layers for a token, about: those that each token runs, without the LM head."""
    config = loaded.config
    experts = next((config[key] for key in _EXPERT_COUNTS if config.get(key)), None)
    chosen = config.get("num_experts_per_tok")
    total = 0.0
    for name, module in loaded.model.named_modules():
        weight = module.get("weight")
        if weight is None or weight.ndim < 2 or isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            continue
        if name.split(".")[-1] == "lm_head":
            continue
        size = weight.size * 32 / module.bits if "scales" in module else weight.size
        # Three dimensions: one matrix for each expert.
        total += size * chosen / experts if weight.ndim == 3 and experts and chosen else size
    return total


class _RowSelector:
    """Lets the LM head see only the rows that are sampled: a prefill chunk needs one row of logits, not hundreds."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: mx.array | None = None
        heads = 0
        for name, module in list(model.named_modules()):
            if name.split(".")[-1] == "lm_head":
                replace_module(model, name, _SelectingHead(module, self))
                heads += 1
        if heads:
            return
        for _, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._wrap_tied(module)

    def select(self, x: mx.array) -> mx.array:
        """The wanted rows of [T, 1, d]."""
        return x if self.rows is None else x[self.rows]

    def _wrap_tied(self, embedding: Any) -> None:
        original = embedding.as_linear
        embedding.as_linear = lambda x: original(self.select(x))


class _SelectingHead(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: nn.Module, selector: _RowSelector) -> None:
        super().__init__()
        self.inner = inner
        self._selector = selector

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(self._selector.select(x))  # type: ignore[no-any-return]


class _RecordingView(PagedView):
    """A cache of one sequence whose tokens are the rows: plain dense attention, and a record of what was stored."""

    __slots__ = ("_keys", "_num_tokens", "_values", "_window", "attended", "num_heads", "spec")

    def __init__(self, num_tokens: int, window: int | None) -> None:
        self.offset = mx.arange(num_tokens)
        self._num_tokens = num_tokens
        self._window = window
        self.spec: LayerKVSpec | None = None
        self.attended = False
        self.num_heads = 0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> PagedMask:
        return PagedMask(narrower(window_size, self._window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[:1] != (self._num_tokens,) or keys.shape[2] != 1:
            raise ValueError(f"stores keys of shape {keys.shape} for {self._num_tokens} rows")
        self.spec = LayerKVSpec(keys.shape[1], keys.shape[3], values.shape[3], self._window)
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: Any, *, scale: float, mask: Any, sinks: Any | None) -> Any:
        if not isinstance(mask, PagedMask):
            raise TypeError(f"attends with a mask of its own ({type(mask).__name__})")
        self.attended = True
        self.num_heads = queries.shape[1]
        window = narrower(mask.window, self._window)
        if self.spec is not None and window != self.spec.sliding_window:
            spec = self.spec
            self.spec = LayerKVSpec(spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim, window)
        position = mx.arange(self._num_tokens)
        visible = position[:, None] >= position
        if window is not None:
            visible = visible & (position > position[:, None] - window)
        q, k, v = (x.squeeze(2).transpose(1, 0, 2)[None] for x in (queries, self._keys, self._values))
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=visible, sinks=sinks)
        return out[0].transpose(1, 0, 2)[:, :, None]
