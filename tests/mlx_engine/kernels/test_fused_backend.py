"""The fused backend in an engine, its kernels run by the host: the same tokens as with the gather backend."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import memory, model_runner
from mlx_engine.attention import fused
from mlx_engine.attention.fused import FusedBackend, FusedStep
from mlx_engine.attention.kernels import PagedKernels, texts
from mlx_engine.compiled_decode import row_bucket, width_bucket
from mlx_engine.config import EngineConfig
from mlx_engine.engine import Engine
from mlx_engine.errors import ConfigError
from mlx_engine.types import Request, SamplingParams
from plugins import build
from tests.mlx_engine.kernels.fake_graphs import FakeGraphs
from tests.mlx_engine.test_drafts import Replay, answers
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
    sizes = {"num_blocks": 40, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    config = EngineConfig(**{"model": "tiny", "cpu_backend": "blas", **sizes, **options})  # type: ignore[arg-type]
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


def _record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets steps be recorded as on CUDA."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "load_graphs", FakeGraphs)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)


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
        _record(monkeypatch)
    engine = _engine(name, attention_backend="fused", kv_cache_dtype=kv, compile_decode=how != "eager")
    assert engine.stats().dispatch == {}, "what the warm-up did is none of a request's"
    assert engine.info.kv_dtype == {"auto": "float32", "int8": "int8"}[kv]
    assert _tokens(engine) == expected
    counts = engine.stats().dispatch
    assert counts["fused"] > 0
    assert counts["chunk_sdpa"] > 0
    assert {path for path in ("compiled", "recorded") if counts.get(path)} == {how} - {"eager"}


@pytest.mark.parametrize("how", ["eager", "recorded"])
def test_8_bits_on_matrix_instructions_give_the_same_tokens(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Decode rows by their own kernel, chunks by MLX's attention: 16 bits round otherwise, which may tell in a draw."""
    expected = _tokens(_engine("llama_bfloat16", attention_backend="gather", kv_cache_dtype="int8"))
    monkeypatch.setattr(model_runner, "kernels_run_here", lambda: True)
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    used: set[str] = set()
    make = texts.kernel
    monkeypatch.setattr(texts, "kernel", lambda name, *size: (used.add(name), make(name, *size))[1])
    if how == "recorded":
        _record(monkeypatch)
    engine = _engine(
        "llama_bfloat16", attention_backend="fused", kv_cache_dtype="int8", compile_decode=how == "recorded"
    )
    got = _tokens(engine)
    assert sum(got[request] == expected[request] for request in expected) >= len(expected) - 1
    assert "decode_matrix_int8" in used
    assert not used & {"decode", "prefill", "prefill_warpgroup"}
    assert engine.stats().dispatch["chunk_sdpa"] > 0


def test_large_steps_are_handed_over_layer_by_layer(kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _tokens(_engine("llama_biases", attention_backend="gather"))
    launched: list[tuple[int, ...]] = []
    async_eval = mx.async_eval

    def watched(*arrays: Any) -> None:
        if len(arrays) == 1 and isinstance(arrays[0], mx.array):
            launched.append(arrays[0].shape)
        async_eval(*arrays)

    monkeypatch.setattr(mx, "async_eval", watched)
    monkeypatch.setattr(fused, "_LAUNCHED_ROWS", 20)
    engine = _engine("llama_biases", attention_backend="fused", compile_decode=False, overlap=False)
    assert _tokens(engine) == expected
    num_layers = TINY["llama_biases"]["num_hidden_layers"]
    steps = [launched[i : i + num_layers] for i in range(0, len(launched), num_layers)]
    assert len(steps) > 1
    assert all(len(set(step)) == 1 and step[0][0] >= 20 for step in steps)


def test_what_is_left_of_a_step_that_failed_runs_in_no_later_one(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, say: once its requests are ended the engine can go on."""
    options = {"attention_backend": "fused", "prefix_cache": "none"}
    expected = _tokens(_engine("llama_biases", **options))
    engine = _engine("llama_biases", **options)
    attend, followed = FusedBackend.attend_fused, []

    def fails_in_the_second_layer(self: FusedBackend, layer: int, *arguments: Any) -> mx.array:
        if layer == 1:
            raise RuntimeError("out of memory")
        return attend(self, layer, *arguments)

    engine.add_request(Request("failed", tuple(range(3, 20)), SamplingParams(max_tokens=5)))
    with monkeypatch.context() as patch:
        patch.setattr(FusedBackend, "attend_fused", fails_in_the_second_layer)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    engine.abort_request("failed")
    assert not engine.has_unfinished_requests()

    make_step = fused._make_step

    def watched(batch: Any, block_size: int, after: Any) -> FusedStep:
        followed.append(list(after))
        return make_step(batch, block_size, after)

    monkeypatch.setattr(fused, "_make_step", watched)
    assert _tokens(engine) == expected
    assert followed[0] == []


@pytest.mark.parametrize(
    ("name", "compiled", "wrong_every"), [("llama_biases", True, 3), ("gpt_oss", False, 3), ("gpt_oss", True, 10**9)]
)
def test_drafts_are_checked_by_the_decode_kernel(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, name: str, wrong_every: int, compiled: bool
) -> None:
    """Beside prefill chunks, whose tokens the same kernel stores."""
    expected, plain = answers(_engine(name, attention_backend="gather"))
    monkeypatch.setattr(build, "create_drafter", lambda name, options: Replay(expected, wrong_every))
    got, stats = answers(_engine(name, attention_backend="fused", compile_decode=compiled, max_num_seqs=24))
    assert got == expected
    assert stats.steps < 0.75 * plain.steps
    assert stats.draft_tokens >= stats.accepted_draft_tokens > 0
    assert (stats.accepted_draft_tokens == stats.draft_tokens) == (wrong_every > 3)
    assert stats.dispatch["fused"] > 0
    # All steps but those with chunks, of which there is one for each of six prompts and one more for each long one.
    assert stats.dispatch.get("compiled", 0) >= (stats.steps - 9 if compiled else 0)


@pytest.mark.parametrize("how", ["eager", "compiled", "recorded"])
def test_drafts_run_where_a_kernel_takes_the_chunks(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Steps with drafts and no chunk, in 16 bits."""
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    options = {"attention_backend": "fused", "compile_decode": how != "eager"}
    expected, plain = answers(_engine("llama_bfloat16", **options))
    if how == "recorded":
        _record(monkeypatch)
    monkeypatch.setattr(build, "create_drafter", lambda name, options: Replay(expected, 3))
    got, stats = answers(_engine("llama_bfloat16", max_num_seqs=24, **options))
    assert got == expected
    assert stats.steps < 0.75 * plain.steps
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0
    assert stats.dispatch.get("compiled", 0) > 0 or how == "eager"


def test_rows_with_drafts_are_stored_first_and_the_decode_kernel_takes_what_says_so(
    kernels_on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels here run one after the other in any case; on a GPU only an argument keeps them in order."""
    calls: list[object] = []
    append, decode = FusedBackend.append, PagedKernels.decode

    def watched_append(self: FusedBackend, layer: int, step: FusedStep, *new: mx.array) -> mx.array:
        if step.first_stored < step.num_decodes:
            calls.append(step.seq_lens)
        return append(self, layer, step, *new)

    def watched_decode(self: PagedKernels, *args: mx.array, **options: Any) -> mx.array:
        if calls and isinstance(calls[-1], mx.array):
            # Its own lengths, made anew after the kernel that stored.
            calls.append((args[-1] is not calls[-1], mx.array_equal(args[-1], calls[-1]).item()))
        return decode(self, *args, **options)

    expected, _ = answers(_engine("llama_biases", attention_backend="gather"))
    monkeypatch.setattr(FusedBackend, "append", watched_append)
    monkeypatch.setattr(PagedKernels, "decode", watched_decode)
    monkeypatch.setattr(build, "create_drafter", lambda name, options: Replay(expected, 10**9))
    answers(_engine("llama_biases", attention_backend="fused", compile_decode=False))
    assert len(calls) > 10
    assert set(calls[1::2]) == {(True, True)}


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
