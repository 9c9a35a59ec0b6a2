"""What an engine is put together from, and what is said where the native library can't be had."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from pydantic import ValidationError

from mlx_engine import memory
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError
from mlx_engine.models.load import LoadedModel
from mlx_engine.native import NativeUnavailable, load_native
from mlx_engine.native.build import Starting
from mlx_engine.types import Request, SamplingParams
from plugins import build
from tests.parity.tiny_models import TINY
from tests.parity.tiny_models import build as build_model

_CONFIG = {"model": "tiny", "num_blocks": 64, "max_model_len": 256}

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the CPU's own choice")


def _tokens(backend: str) -> tuple[str, list[int]]:
    engine = build.build_engine_for(EngineConfig(**_CONFIG, cpu_backend=backend), build_model(TINY["llama_biases"]))
    return engine.info.linear_backend, _serve(engine)


def _serve(engine: Engine, request_id: str = "a") -> list[int]:
    engine.add_request(
        Request(request_id, tuple(range(3, 40)), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    )
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.new_token_ids
    return tokens


def test_both_backends_give_the_same_tokens_and_say_which_they_are() -> None:
    try:
        load_native()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    (name, native), (other, blas) = _tokens("native"), _tokens("blas")
    assert (name, other) == ("native", "blas")
    assert len(native) == 24
    assert native == blas


def test_without_the_library_auto_serves_on_openblas_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(starting: Starting | None = None) -> None:
        raise NativeUnavailable("there is no C++ compiler: install one")

    monkeypatch.setattr(build, "load_native", unavailable)
    monkeypatch.setattr(build, "resolve_model", lambda name, report: name)
    monkeypatch.setattr(build, "load_model", lambda *arguments: build_model(TINY["llama_biases"]))
    with caplog.at_level(logging.WARNING):
        assert build.build_engine(EngineConfig(**_CONFIG)).info.linear_backend == "blas"
    assert len([record for record in caplog.records if "native" in record.getMessage()]) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        name, tokens = _tokens("auto")
    assert (name, len(tokens)) == ("blas", 24)
    warnings = [record.getMessage() for record in caplog.records if "native" in record.getMessage()]
    assert len(warnings) == 1
    assert "install one" in warnings[0]
    with pytest.raises(ConfigError, match=r"cpu_backend is native.*install one.*`auto`"):
        _tokens("native")
    caplog.clear()
    assert _tokens("blas")[0] == "blas"
    assert "native" not in caplog.text


def test_int8_fits_more_tokens_into_the_same_memory_and_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 << 20)
    options = {"model": "tiny", "max_model_len": 256, "cpu_backend": "blas", "prefix_cache": "none"}
    wide, narrow = (
        build.build_engine_for(
            EngineConfig(**options, kv_memory_fraction=0.3, max_num_seqs=500, kv_cache_dtype=kv),
            build_model(TINY["llama_biases"]),
        )
        for kv in ("auto", "int8")
    )
    assert (wide.info.kv_dtype, narrow.info.kv_dtype) == ("float32", "int8")
    assert (wide.info.dtype, narrow.info.dtype) == ("float32", "float32")
    # Of 64 numbers 68 bytes instead of 256; what activations take is measured anew for each.
    assert 3.4 < narrow.info.num_blocks / wide.info.num_blocks < 4
    first, second = (_serve(narrow, request_id) for request_id in ("a", "b"))
    assert len(first) == 24
    assert first == second


def test_an_engine_plans_by_its_memory_limit_and_has_mlx_keep_to_it(mlx_limit: int) -> None:
    options = {"model": "tiny", "max_model_len": 256, "cpu_backend": "blas", "max_num_seqs": 500}
    small, large = (
        build.build_engine_for(EngineConfig(**options, memory_limit_gib=gib), build_model(TINY["llama_biases"]))
        for gib in (0.125, 0.25)
    )
    assert mx.get_memory_limit() == 2**28, "the latest engine's"
    assert small.info.num_blocks < large.info.num_blocks
    assert len(_serve(small)) == len(_serve(large)) == 24


def test_the_limit_holds_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch, mlx_limit: int) -> None:
    seen = []

    def load(*arguments: object) -> LoadedModel:
        seen.append(mx.get_memory_limit())
        return build_model(TINY["llama_biases"])

    monkeypatch.setattr(build, "resolve_model", lambda name, report: name)
    monkeypatch.setattr(build, "load_model", load)
    build.build_engine(EngineConfig(**_CONFIG, cpu_backend="blas", memory_limit_gib=0.125))
    build.build_engine(EngineConfig(**_CONFIG, cpu_backend="blas"))
    assert seen == [2**27, 2**27], "on a CPU an engine without a limit leaves MLX's as it is"


def test_a_limit_below_the_weights_is_refused(mlx_limit: int) -> None:
    with pytest.raises(ConfigError, match=r"memory_limit_gib is 1e-06.*weights alone take"):
        build.build_engine_for(EngineConfig(**_CONFIG, memory_limit_gib=1e-6), build_model(TINY["llama_biases"]))


def test_recordings_share_what_the_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 * 2**30)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10 * 2**30)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "load_graphs", lambda: None)
    monkeypatch.setattr(build, "RecordedDecode", lambda compiled, graphs, block_size, max_bytes: max_bytes)
    compiled: Any = object()
    for limit, free in ((None, 90), (30.0, 20), (5.0, 0)):
        config = EngineConfig(memory_limit_gib=limit)
        assert build._recorded_decode(config, compiled) == int(0.4 * free * 2**30)

    monkeypatch.setattr(build, "RecordedChunks", lambda *arguments, max_bytes, **options: max_bytes)
    given: Any = SimpleNamespace(num_heads=[4], tile_shape=lambda heads: (1, 1), samples=None, max_pages=1)
    for limit, most in ((None, 10.0), (30.0, 3.0), (12.0, 0.4)):
        config = EngineConfig(memory_limit_gib=limit)
        assert build._recorded_chunks(config, given, given, given) == int(most * 2**30)


def test_another_type_of_kv_is_refused_with_the_choices() -> None:
    with pytest.raises(ValidationError, match=r"kv_cache_dtype\n  Input should be 'auto' or 'int8'"):
        EngineConfig(kv_cache_dtype="fp8")
