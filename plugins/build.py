"""Puts an engine together from a configuration: the model, the memory plan, and each policy by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_engine.attention.fused import kernels_run_here
from mlx_engine.compiled_decode import CompiledDecode
from mlx_engine.config import EngineConfig
from mlx_engine.cpu import adapt_for_cpu, keep_freed_memory, use_huge_pages
from mlx_engine.drafts import DraftSource
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError, KernelError
from mlx_engine.gpu import adapt_for_gpu
from mlx_engine.memory import check_weights_fit, limit_memory, plan_kv_blocks, usable_memory_bytes
from mlx_engine.model_runner import MLXModelRunner
from mlx_engine.models.embedded import served_name
from mlx_engine.models.load import LoadedModel, load_model, runs_on_cpu
from mlx_engine.models.resolve import resolve_model
from mlx_engine.native import NativeLibrary, NativeUnavailable, load_native
from mlx_engine.native.graphs import load_graphs
from mlx_engine.paged_model import PagedModel
from mlx_engine.recorded_chunks import RecordedChunks
from mlx_engine.recorded_decode import RecordedDecode
from mlx_engine.scheduler import Scheduler
from mlx_engine.types import EngineInfo, cdiv
from plugins.registry import ATTENTION_BACKENDS, KV_MANAGERS, PREFIX_CACHES, SCHEDULERS, create, create_drafter

logger = logging.getLogger(__name__)

# What recordings of decode steps may take of the memory that weights and K/V leave, and those of steps with chunks of
# the same and of all. The rest is for the steps that are not recorded.
_RECORDED_OF_FREE = 0.4
_CHUNKS_OF_FREE = 0.2
_CHUNKS_OF_ALL = 0.1

Progress = Callable[[str, float], None]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Loads the model and builds the engine on the calling thread, which owns all arrays from then on.

    progress(stage, fraction) is told about "convert" (GGUF files, once), "load", "compile" (on a CPU), "check",
    "allocate" and "warm_up" (on a GPU).
    Raises ConfigError, ModelLoadError or PluginError, each saying what to change.
    """
    report = progress or _silent
    # Policies first: a wrong name should not cost a model load.
    policies = _create_policies(config)
    native = _native_library(config, report)
    limit_memory(config)
    loaded = load_model(resolve_model(config.model, report), config.dtype, report)
    return _assemble(config, loaded, native, *policies, report)


def build_engine_for(config: EngineConfig, loaded: LoadedModel) -> Engine:
    """An engine around a model that is loaded already, on the thread that loaded it. For tests and benches."""
    limit_memory(config)
    return _assemble(config, loaded, _native_library(config, _silent), *_create_policies(config), _silent)


def build_model(config: EngineConfig, loaded: LoadedModel) -> PagedModel:
    """The model as an engine of this configuration runs it. For benches that need more logits than an engine's."""
    return _paged_model(loaded, _native_library(config, _silent))


def _paged_model(loaded: LoadedModel, native: NativeLibrary | None) -> PagedModel:
    return PagedModel(loaded, partial(adapt_for_cpu, native=native) if runs_on_cpu() else adapt_for_gpu)


def _attention_backend(config: EngineConfig) -> str:
    """The name of the attention backend, chosen where the configuration leaves it open."""
    if config.attention_backend != "auto":
        return config.attention_backend
    return "fused" if kernels_run_here() and not config.attention_backend_options else "gather"


def _create_policies(config: EngineConfig) -> tuple[Any, Any, Any, Any]:
    """Scheduler policy, attention backend, prefix cache and drafter: those that need no loaded model."""
    return (
        create(SCHEDULERS, config.scheduler, kwargs={}, options=config.scheduler_options),
        create(ATTENTION_BACKENDS, _attention_backend(config), kwargs={}, options=config.attention_backend_options),
        create(
            PREFIX_CACHES,
            config.prefix_cache,
            kwargs={"block_size": config.block_size},
            options=config.prefix_cache_options,
        ),
        create_drafter(config.drafter, config.drafter_options),
    )


def _assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    native: NativeLibrary | None,
    policy: Any,
    backend: Any,
    prefix_cache: Any,
    drafter: Any,
    report: Progress,
) -> Engine:
    max_model_len = _max_model_len(config, loaded)
    check_weights_fit(config, loaded.weight_bytes)
    on_cpu = runs_on_cpu()
    if on_cpu:
        keep_freed_memory()
    report("check", 0.0)
    model = _paged_model(loaded, native)
    if on_cpu:
        use_huge_pages(array for _, array in tree_flatten(loaded.model.parameters()))
    activation_bytes = 0
    if config.num_blocks is None:
        activation_bytes = model.activation_bytes(min(config.max_num_batched_tokens, max_model_len))
    kv_dtype = mx.int8 if config.kv_cache_dtype == "int8" else loaded.dtype
    backend_name, backend = _checked_backend(config, backend, model, loaded.dtype, kv_dtype)
    report("check", 1.0)
    report("allocate", 0.0)
    plan = plan_kv_blocks(
        config,
        model.layers,
        kv_dtype=kv_dtype,
        block_size=config.block_size,
        weights_bytes=loaded.weight_bytes,
        activation_bytes=activation_bytes,
        max_model_len=max_model_len,
    )
    kv = create(
        KV_MANAGERS,
        config.kv_manager,
        kwargs={
            "num_blocks": plan.num_blocks,
            "block_size": config.block_size,
            "prefix_cache": prefix_cache,
            "max_model_len": max_model_len,
        },
        options=config.kv_manager_options,
    )
    backend.initialize(model.layers, plan.num_blocks, config.block_size, loaded.dtype, kv_dtype)
    report("allocate", 1.0)
    name = served_name(config.model)
    scheduler = Scheduler(
        policy,
        kv,
        model_name=name,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=max_model_len,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        chunk_halving_context=(
            model.halving_context if config.chunk_halving_context == "auto" else config.chunk_halving_context
        ),
        drafts=DraftSource(drafter, loaded.vocab_size) if drafter is not None else None,
        seed=config.seed,
    )
    compiled = None
    if config.compile_decode and getattr(backend, "compiles", False):
        max_tokens = min(scheduler.max_total_tokens, max_model_len)
        pages = cdiv(max_tokens, config.block_size)
        compiled = CompiledDecode(model, backend, config.max_num_seqs, pages, has_drafter=drafter is not None)
    recorded = _recorded_decode(config, compiled)
    runner = MLXModelRunner(
        model,
        backend,
        block_size=config.block_size,
        vocab_size=loaded.vocab_size,
        compiled=compiled,
        recorded=recorded,
        recorded_chunks=_recorded_chunks(config, model, backend, recorded),
    )
    for fraction in runner.warm_up():
        report("warm_up", fraction)
    info = EngineInfo(
        model_name=name,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_tokens_per_request=scheduler.max_total_tokens,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        device=mx.default_device().type.name,
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        kv_dtype=str(kv_dtype).removeprefix("mlx.core."),
        policies={
            "scheduler": config.scheduler,
            "kv_manager": config.kv_manager,
            "prefix_cache": config.prefix_cache,
            "attention_backend": backend_name,
            "drafter": config.drafter,
        },
        linear_backend=("blas" if native is None else "native") if on_cpu else "mlx",
    )
    logger.info("engine ready: %s", info)
    return Engine(scheduler, runner, info, overlap=config.overlap)


def _checked_backend(
    config: EngineConfig, backend: Any, model: PagedModel, dtype: mx.Dtype, kv_dtype: mx.Dtype
) -> tuple[str, Any]:
    """The backend and its name; `gather` where it was chosen here and its kernels turn out wrong on this GPU."""
    name = _attention_backend(config)
    check = getattr(backend, "check", None)
    if check is None:
        return name, backend
    try:
        check(model.num_heads, model.layers, config.block_size, dtype, kv_dtype)
    except KernelError as error:
        if config.attention_backend != "auto":
            raise ConfigError(
                f"engine.attention_backend is {name}: {error}. Set it to gather, or to auto, to run without the kernels"
            ) from error
        logger.warning("attention runs on MLX's own operations, much slower: %s. Please report it", error)
        return "gather", create(ATTENTION_BACKENDS, "gather", kwargs={}, options={})
    return name, backend


def _native_library(config: EngineConfig, report: Progress) -> NativeLibrary | None:
    """What linear layers run on, None for MLX's own products. Raises ConfigError where "native" can't be had."""
    if config.cpu_backend == "blas" or not runs_on_cpu():
        return None
    try:
        return load_native(lambda: report("compile", 0.0))
    except NativeUnavailable as error:
        if config.cpu_backend == "native":
            raise ConfigError(
                f"engine.cpu_backend is native, but the native CPU library can't be had: {error}. With `auto` the "
                "engine runs on OpenBLAS instead"
            ) from error
        logger.warning("linear layers run on OpenBLAS, about half as fast; no native CPU library: %s", error)
        return None


def _recorded_decode(config: EngineConfig, compiled: CompiledDecode | None) -> RecordedDecode | None:
    """Recordings of compiled steps, where CUDA and a C++ compiler are there."""
    if compiled is None or not config.record_decode or not mx.cuda.is_available():
        return None
    try:
        max_bytes = int(_RECORDED_OF_FREE * _free_bytes(config))
        return RecordedDecode(compiled, load_graphs(), config.block_size, max_bytes)
    except NativeUnavailable as error:
        logger.warning("decode steps are compiled but not recorded, slower for small batches: %s", error)
        return None


def _recorded_chunks(
    config: EngineConfig, model: PagedModel, backend: Any, recorded: RecordedDecode | None
) -> RecordedChunks | None:
    """Recordings of small steps with prefill chunks, where decode steps are recorded and the kernels take chunks."""
    tile_shape = None if recorded is None else backend.tile_shape(model.num_heads)
    if recorded is None or tile_shape is None:
        return None
    return RecordedChunks(
        model,
        backend,
        load_graphs(),
        recorded.samples,
        tile_shape=tile_shape,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_pages=recorded.max_pages,
        block_size=config.block_size,
        max_bytes=int(min(_CHUNKS_OF_ALL * usable_memory_bytes(config), _CHUNKS_OF_FREE * _free_bytes(config))),
    )


def _free_bytes(config: EngineConfig) -> int:
    return max(0, usable_memory_bytes(config) - int(mx.get_active_memory()))


def _max_model_len(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.max_model_len is None:
        return loaded.max_model_len
    if config.max_model_len > loaded.max_model_len:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but the model was made for {loaded.max_model_len} "
            "tokens; lower it, or leave it out"
        )
    return config.max_model_len


def _silent(stage: str, fraction: float) -> None:
    del stage, fraction
