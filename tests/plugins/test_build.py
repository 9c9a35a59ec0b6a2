"""What an engine is put together from, and what is said where the native library can't be had."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest
from pydantic import ValidationError

from mlx_engine import memory
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError
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


def test_another_type_of_kv_is_refused_with_the_choices() -> None:
    with pytest.raises(ValidationError, match=r"kv_cache_dtype\n  Input should be 'auto' or 'int8'"):
        EngineConfig(kv_cache_dtype="fp8")
