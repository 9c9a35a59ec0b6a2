"""Loads a model's weights for the device that MLX runs on."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

from mlx_engine.blas import preload_openblas
from mlx_engine.errors import ModelLoadError
from mlx_engine.models.checkpoint import Checkpoint, open_checkpoint
from mlx_engine.models.dequantize import dequantize_layers
from mlx_engine.models.end_tokens import end_token_ids
from mlx_engine.models.gguf import MARKER, Progress
from mlx_engine.models.resolve import resolve_model

__all__ = ["LoadedModel", "can_compile_on_cpu", "load_model", "resolve_model"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length")
_FALLBACK_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on the thread that loaded it."""

    model: nn.Module
    config: dict[str, Any]  # config.json, with mlx-lm's own additions
    dtype: mx.Dtype  # of activations, and so of K/V
    eos_token_ids: frozenset[int]  # any of them ends a sequence
    max_model_len: int  # tokens, from the model's own config
    vocab_size: int
    weight_bytes: int  # in memory, as loaded


def runs_on_cpu() -> bool:
    """Whether MLX's default device is the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def load_model(path: Path, dtype: str = "auto", progress: Progress | None = None) -> LoadedModel:
    """Loads the folder `path` on the calling thread, which owns the model's arrays from then on.

    dtype "auto" is float32 on the CPU and the model's own on a GPU; "float32", "float16" and "bfloat16" are honoured
    everywhere. On the CPU quantized layers are made dense. progress(stage, fraction) is told about "load".
    Raises ModelLoadError naming the file, tensor, layer or key at fault.
    """
    report = progress or _ignore
    report("load", 0.0)
    checkpoint = open_checkpoint(path)
    model, config = _build(checkpoint)
    target = _target_dtype(model, config, dtype)
    if runs_on_cpu():
        _prepare_cpu()
        count = dequantize_layers(model, target or mx.float32, lambda part: report("load", 0.9 * part))
        if count:
            logger.info("%d quantized layers made dense in %s: on the CPU that is faster", count, target)
    if target is not None:
        _cast(model, target)
    mx.eval(model.parameters())
    loaded = _describe(path, model, config, target)
    report("load", 1.0)
    logger.info("loaded %s: %s, %.2f GB of weights", path, loaded.dtype, loaded.weight_bytes / 1e9)
    return loaded


def can_compile_on_cpu() -> bool:
    """Whether `mx.compile` fuses operations on the CPU, for which MLX runs g++ while the program runs.

    Without a g++ MLX doesn't fuse, and all works. With one that fails, or no writable temporary folder, every
    compiled function would raise: then this turns compilation off for the process (`mx.disable_compile`).
    """
    compiler = shutil.which("g++")
    if compiler is None:
        logger.info("no g++ on PATH: element-wise operations run unfused on the CPU, somewhat slower")
        return False
    failure = _unusable_cache() or _try_compiler(compiler)
    if failure is None:
        return True
    mx.disable_compile()
    logger.warning("mx.compile is off, element-wise operations run unfused on the CPU: %s", failure)
    return False


def _unusable_cache() -> str | None:
    """Why MLX couldn't write its compiled code, which goes into `mlx` in C++'s idea of the temporary folder; or None.

    On a shared machine the folder may be another user's.
    """
    names = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    folder = Path(next(filter(None, names), "/tmp")) / "mlx" / metadata.version("mlx") / "cpu"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return None
    return f"{existing} can't be written to: set TMPDIR to a folder of your own"


def _try_compiler(compiler: str) -> str | None:
    """Builds a shared library as MLX would; what went wrong, or None."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [compiler, "-std=c++17", "-fPIC", "-shared", "-x", "c++", "-", "-o", os.path.join(folder, "a.so")]
            source = '#include <cmath>\nextern "C" float f(float x) { return std::exp(x); }\n'
            result = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler}: {error}"
    if result.returncode == 0:
        return None
    return f"{compiler} fails: {(result.stderr.strip().splitlines() or ['no message'])[0]}"


def _prepare_cpu() -> None:
    status = preload_openblas()
    logger.log(logging.INFO if status.active or not status.needed else logging.WARNING, "%s", status.message)
    can_compile_on_cpu()


def _build(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
    """The model with its weights still on disk. Raises ModelLoadError for what mlx-lm refuses."""
    with checkpoint.view() as folder:
        try:
            model, config = mlx_lm_utils.load_model(folder, lazy=True, model_config=checkpoint.config_overrides())
        # mlx-lm and the models' own classes raise whatever they meet.
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, IndexError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ModelLoadError(f"{checkpoint.folder} can't be loaded: {checkpoint.explain(reason)}") from error
    return model, config


def _target_dtype(model: nn.Module, config: dict[str, Any], dtype: str) -> mx.Dtype | None:
    """What to cast weights to; None leaves them as they are stored."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if runs_on_cpu():
        return mx.float32
    if MARKER in config:
        # A GGUF mixes types: float32 norms would make every activation float32.
        return _DTYPES[config["torch_dtype"]]
    return None


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Casts floating-point weights, except those that the model says must stay as they are."""
    predicate: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    upcast = dtype == mx.float32

    def cast(name: str, array: mx.array) -> mx.array:
        floating = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if floating and (upcast or predicate(name)) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _describe(path: Path, model: nn.Module, config: dict[str, Any], target: mx.Dtype | None) -> LoadedModel:
    text = config.get("text_config") or {}
    context = next((int(c[key]) for c in (text, config) for key in _CONTEXT_KEYS if c.get(key)), None)
    if context is None:
        logger.warning("%s doesn't say how long its context is: %d tokens assumed", path, _FALLBACK_CONTEXT)
    arrays = {id(array): array for _, array in tree_flatten(model.parameters())}
    return LoadedModel(
        model=model,
        config=config,
        dtype=target or _activation_dtype(model),
        eos_token_ids=end_token_ids(path, config),
        max_model_len=context or _FALLBACK_CONTEXT,
        vocab_size=int(config.get("vocab_size") or text.get("vocab_size") or _embedding_rows(model)),
        weight_bytes=sum(int(array.nbytes) for array in arrays.values()),
    )


def _embedding(model: nn.Module) -> Any:
    for _, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            return module
    raise ModelLoadError("the model has no token embedding")


def _embedding_rows(model: nn.Module) -> int:
    return int(_embedding(model).weight.shape[0])


def _activation_dtype(model: nn.Module) -> mx.Dtype:
    embedding = _embedding(model)
    if isinstance(embedding, nn.QuantizedEmbedding):
        # Modes other than affine keep scales in eight bits and compute in bfloat16.
        dtype: mx.Dtype = embedding.scales.dtype if embedding.mode == "affine" else mx.bfloat16
    else:
        dtype = embedding.weight.dtype
    return dtype


def _ignore(stage: str, fraction: float) -> None:
    del stage, fraction
