"""The fused backend in an engine, its kernels run by the host: the same tokens as with the gather backend."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import model_runner
from mlx_engine.compiled_decode import row_bucket, width_bucket
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError
from mlx_engine.types import Request, SamplingParams
from plugins import build
from tests.mlx_engine.kernels.fake_graphs import FakeGraphs
from tests.parity.tiny_models import TINY
from tests.parity.tiny_models import build as build_model

_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.8},
]


def _engine(name: str, **options: object) -> Engine:
    config = EngineConfig(
        model="tiny",
        num_blocks=40,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        cpu_backend="blas",
        **options,  # type: ignore[arg-type]
    )
    return build.build_engine_for(config, build_model(TINY[name]))


def _tokens(engine: Engine) -> dict[str, list[int]]:
    """Prompts of several lengths, some longer than a step, two of them greedy and the others drawn."""
    rng = np.random.default_rng(5)
    tokens: dict[str, list[int]] = {}
    for i, length in enumerate((3, 30, 17, 1, 21)):
        prompt = tuple(rng.integers(3, 90, length).tolist())
        sampling = SamplingParams(max_tokens=5, seed=i, ignore_eos=True, **_OPTIONS[i])
        engine.add_request(Request(str(i), prompt, sampling))
        tokens[str(i)] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.check_idle()
    return tokens


@pytest.mark.parametrize("how", ["eager", "compiled", "recorded"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("name", ["llama_biases", "gpt_oss", "deepseek_v2"])
def test_the_same_tokens_as_by_gathering(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, name: str, kv: str, how: str
) -> None:
    """Those of MLX's operations, sampler included, whether a step's rows are greedy or drawn."""
    expected = _tokens(_engine(name, attention_backend="gather", kv_cache_dtype=kv))
    monkeypatch.setattr(model_runner, "kernels_run_here", lambda: True)
    if how == "recorded":
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
        monkeypatch.setattr(build, "load_graphs", FakeGraphs)
    engine = _engine(name, attention_backend="fused", kv_cache_dtype=kv, compile_decode=how != "eager")
    assert engine.info.kv_dtype == {"auto": "float32", "int8": "int8"}[kv]
    assert _tokens(engine) == expected
    counts = engine.stats().dispatch
    assert counts["fused"] > 0
    assert counts["chunk_sdpa"] > 0
    assert {path for path in ("compiled", "recorded") if counts.get(path)} == {how} - {"eager"}


def test_auto_is_fused_where_its_kernels_run(kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernels_run_here", lambda: True)
    assert _engine("llama_biases", compile_decode=False).info.policies["attention_backend"] == "fused"
    monkeypatch.setattr(build, "kernels_run_here", lambda: False)
    assert _engine("llama_biases").info.policies["attention_backend"] == "gather"


@pytest.mark.skipif(mx.default_device().type == mx.DeviceType.gpu, reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="set it to gather"):
        _engine("llama_biases", attention_backend="fused")


def test_buckets_hold_what_they_are_for() -> None:
    for n in range(1, 300):
        assert n <= row_bucket(n) < max(1.5 * n + 1, 2)
        assert n <= width_bucket(n) < max(2 * n, 9)
    assert len({row_bucket(n) for n in range(1, 257)}) == 14
