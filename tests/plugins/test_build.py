"""What an engine is put together from, and what is said where the native library can't be had."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest

from mlx_engine.config import EngineConfig
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
    engine.add_request(
        Request("a", tuple(range(3, 40)), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    )
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.new_token_ids
    return engine.info.linear_backend, tokens


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
