"""Blocks of few kernels in tiny models, run on the host: which models get them, and that these stay themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from mlx_engine import decoder_block, gpu, paged_model
from mlx_engine.attention.kernels import PagedKernels, texts
from mlx_engine.attention.kernels.gemv import Rotation, gemv, rotate
from mlx_engine.config import EngineConfig
from mlx_engine.decoder_block import FusedDecoderBlock, RotaryTable, RotaryTables
from mlx_engine.engine import Engine
from mlx_engine.errors import ModelLoadError
from mlx_engine.gpu import RowEmbedding, adapt_for_gpu
from mlx_engine.models.load import LoadedModel
from mlx_engine.paged_model import PagedModel
from mlx_engine.types import Request, SamplingParams
from plugins import build as build_module
from tests.parity.tiny_models import TINY, build

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_WHOLE_CHUNKS = {"hidden_size": 64, "intermediate_size": 128}
_SCALED = {"rope_type": "linear", "factor": 3.0}


def blocks(model: nn.Module) -> list[FusedDecoderBlock]:
    """Those of the model."""
    return [module for module in model.modules() if type(module) is FusedDecoderBlock]


def greedy_tokens(engine: Engine, sizes: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """Of requests of so many random tokens in and so many out, all there at once."""
    rng = np.random.default_rng(3)
    found: dict[str, list[int]] = {}
    for i, (length, max_tokens) in enumerate(sizes):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(i), tuple(rng.integers(3, 90, length).tolist()), sampling))
        found[str(i)] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
    return found


def changed(name: str, **changes: Any) -> LoadedModel:
    """One of the tiny models, with another configuration."""
    return build({**TINY[name], **changes})


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that the probe finds: with 1 and 2 rows, which run through our products, then with 12, through MLX's."""
    found: list[float] = []
    original = paged_model._relative_error

    def noted(got: mx.array, expected: mx.array) -> float:
        found.append(original(got, expected))
        return found[-1]

    monkeypatch.setattr(paged_model, "_relative_error", noted)
    return found


@pytest.mark.parametrize(
    ("name", "changes", "limit"),
    [
        ("llama_mqa", {"rope_scaling": _LLAMA3}, 1e-5),
        ("llama_mqa", {"rope_scaling": _YARN}, 1e-5),
        ("llama_bfloat16", {"rope_scaling": _SCALED, "attention_bias": True, "tie_word_embeddings": True}, 3e-2),
        ("qwen2", {}, 1e-5),
        ("qwen3_float16", {}, 4e-3),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}, 1e-5),
    ],
)
def test_a_model_on_these_blocks_gives_its_own_logits(
    gpu_path_on_host: None, errors: list[float], name: str, changes: dict[str, Any], limit: float
) -> None:
    loaded = changed(name, num_hidden_layers=2, **changes)
    assert PagedModel(loaded, adapt_for_gpu).num_heads == (4, 4)
    assert len(blocks(loaded.model)) == 2
    assert len(errors) == 3
    assert max(errors) < limit


@pytest.fixture
def bulk_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has them, until it forgoes them."""
    monkeypatch.setattr(texts, "_FORGONE", set())
    monkeypatch.setattr(texts, "_compute_capability", lambda: 100)


@pytest.mark.parametrize(
    ("name", "changes", "limit", "takes"),
    [
        ("llama_bfloat16", {"rope_scaling": _LLAMA3, "attention_bias": True}, 3e-2, True),
        ("llama_bfloat16", {"rope_scaling": _YARN}, 3e-2, True),  # rotated by MLX
        ("qwen3_float16", {}, 4e-3, True),
        ("qwen3_float16", {}, 4e-3, False),
    ],
)
def test_a_few_rows_run_on_bulk_copies(
    gpu_path_on_host: None,
    bulk_copies: None,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[float],
    name: str,
    changes: dict[str, Any],
    limit: float,
    takes: bool,
) -> None:
    """The 2 rows of the probe, if all products of the block can; the one and the 12 don't. The check has 3 rows."""
    if not takes:
        monkeypatch.setattr(decoder_block, "skinny_gemm_takes", lambda weight: weight.shape != (64, 128))
    used: list[int] = []
    product = decoder_block.skinny_gemm
    monkeypatch.setattr(decoder_block, "skinny_gemm", lambda x, *a, **o: (used.append(len(x)), product(x, *a, **o))[1])
    PagedModel(changed(name, num_hidden_layers=2, **_WHOLE_CHUNKS, **changes), adapt_for_gpu)
    assert len(errors) == 3
    assert max(errors) < limit
    assert used == ([3] * 4 + [2] * 8 if takes else [])


def _wrong(x: mx.array, weight: mx.array, **options: Any) -> mx.array:
    return gemv(x, weight, **options) * 1.2


def _impossible(*_: Any, **__: Any) -> mx.array:
    raise RuntimeError("no such instruction")


def test_a_layer_that_adds_little_is_no_reason_to_forgo_them(gpu_path_on_host: None, bulk_copies: None) -> None:
    """Rounding of what it adds to is no error of the products."""
    loaded = changed("llama_bfloat16", num_hidden_layers=1, **_WHOLE_CHUNKS)
    for linear in (loaded.model.layers[0].self_attn.o_proj, loaded.model.layers[0].mlp.down_proj):
        linear.weight = linear.weight * 0.01
    adapt_for_gpu(loaded.model)
    assert texts.has_bulk_copies()
    assert blocks(loaded.model)[0].skinny_error() < 0.02


@pytest.mark.parametrize(("product", "said"), [(_wrong, "relative error"), (_impossible, "no such instruction")])
def test_products_that_are_wrong_on_a_gpu_are_not_used(
    gpu_path_on_host: None,
    bulk_copies: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    product: Any,
    said: str,
) -> None:
    monkeypatch.setattr(decoder_block, "skinny_gemm", product)
    loaded = changed("llama_bfloat16", num_hidden_layers=2, **_WHOLE_CHUNKS)
    PagedModel(loaded, adapt_for_gpu)
    assert not texts.has_bulk_copies()
    assert [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert [block.takes_skinny for block in blocks(loaded.model)] == [False, False]


@pytest.mark.parametrize("broken", ["gemv", "rotate", "_add_product", "_inverse_frequencies"])
def test_the_probe_notices_a_block_that_is_wrong(
    gpu_path_on_host: None, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Whether it is wrong for few rows or for more."""
    original = getattr(decoder_block, broken)
    monkeypatch.setattr(decoder_block, broken, lambda *args, **options: original(*args, **options) * 1.1)
    with pytest.raises(ModelLoadError, match="its logits differ"):
        PagedModel(changed("llama_mqa", num_hidden_layers=1), adapt_for_gpu)


def test_requests_get_the_same_tokens_on_them(gpu_path_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from the model's own blocks: decode steps of one row and of more, beside chunks or not."""

    def tokens() -> dict[str, list[int]]:
        config = EngineConfig(
            model="tiny",
            num_blocks=20,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=6,
            cpu_backend="blas",
            attention_backend="fused",
            compile_decode=False,
        )
        engine = build_module.build_engine_for(config, changed("llama_mqa", num_hidden_layers=1))
        return greedy_tokens(engine, ((2, 5), (7, 2), (3, 2)))

    expected = tokens()
    made: list[FusedDecoderBlock] = []

    def adapt(model: nn.Module, native: object = None) -> None:
        adapt_for_gpu(model)
        made.extend(blocks(model))

    monkeypatch.setattr(build_module, "adapt_for_cpu", adapt)
    assert tokens() == expected
    assert len(made) == 1


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_attention_rotates_where_a_step_has_decode_rows_only(
    gpu_path_on_host: None, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """Steps of three rows and more; those with chunks, whose keys another kernel stores, are rotated before."""
    monkeypatch.setattr(texts, "has_matrix_instructions", lambda: True)
    monkeypatch.setattr(build_module, "adapt_for_cpu", lambda model, native: adapt_for_gpu(model))
    rotated_before: list[int] = []
    in_attention: list[int] = []
    rotate, decode = decoder_block.rotate, PagedKernels.decode

    def watched_decode(self: PagedKernels, queries: mx.array, *args: Any, **options: Any) -> mx.array:
        if options["rotation"] is not None:
            assert options["rotation"][0].shape == (len(queries), 32)
            in_attention.append(len(queries))
        return decode(self, queries, *args, **options)

    monkeypatch.setattr(decoder_block, "rotate", lambda x, r: (rotated_before.append(len(x)), rotate(x, r))[1])
    monkeypatch.setattr(PagedKernels, "decode", watched_decode)

    def tokens() -> dict[str, list[int]]:
        config = EngineConfig(
            model="tiny", num_blocks=24, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=9, cpu_backend="blas",
            attention_backend="fused", compile_decode=False, kv_cache_dtype=kv,
        )  # fmt: skip
        engine = build_module.build_engine_for(config, changed("llama_bfloat16", num_hidden_layers=1))
        rotated_before.clear()
        return greedy_tokens(engine, ((2, 9), (7, 9), (3, 9), (12, 9)))

    got = tokens()
    assert len(in_attention) >= 3
    assert min(in_attention) >= 3
    assert rotated_before, "of steps with chunks"
    monkeypatch.setattr(PagedKernels, "rotates", lambda self, pool: False)
    in_attention.clear()
    assert tokens() == got
    assert not in_attention


@pytest.mark.parametrize("name", ["llama_biases", "mixtral", "qwen3_moe", "gemma3", "gpt_oss", "phi3", "olmo2"])
def test_other_architectures_keep_their_blocks(gpu_path_on_host: None, name: str) -> None:
    """And blocks of the family whose MLP has biases."""
    model = build(TINY[name]).model
    layers = [weakref.ref(layer) for layer in model.layers]
    adapt_for_gpu(model)
    assert [layer() for layer in layers] == model.layers
    assert not blocks(model)


@pytest.mark.parametrize(("name", "tied"), [("llama_mqa", True), ("llama_bfloat16", False), ("gpt_oss", False)])
def test_embeddings_copy_rows_in_any_architecture(
    gpu_path_on_host: None, monkeypatch: pytest.MonkeyPatch, name: str, tied: bool
) -> None:
    """With as many tokens as the kernel is made for; an embedding that is the head too stays that."""
    copied: list[tuple[int, ...]] = []
    embed = gpu.embed
    monkeypatch.setattr(gpu, "embed", lambda table, ids: (copied.append(ids.shape), embed(table, ids))[1])
    loaded = changed(name, tie_word_embeddings=tied)
    assert PagedModel(loaded, adapt_for_gpu).layers
    embeddings = [module for module in loaded.model.modules() if isinstance(module, nn.Embedding)]
    assert [type(module) for module in embeddings] == [RowEmbedding]
    assert copied == [(12, 1)], "the probe of 12 tokens, and none of fewer"


def test_embeddings_of_no_whole_pieces_are_left() -> None:
    assert RowEmbedding.takes(nn.Embedding(10, 8))
    assert not RowEmbedding.takes(nn.Embedding(10, 6))
    assert not RowEmbedding.takes(nn.QuantizedEmbedding(10, 64))
    assert not RowEmbedding.takes(nn.Linear(8, 8))


def test_without_a_gpu_no_block_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "blocks_run_here", lambda: False)
    model = build(TINY["llama_mqa"]).model
    adapt_for_gpu(model)
    assert not blocks(model)


def _quantize(block: Any) -> None:
    block.mlp.down_proj = nn.QuantizedLinear.from_linear(block.mlp.down_proj, 32, 8)


def _mix_types(block: Any) -> None:
    block.self_attn.o_proj.weight = block.self_attn.o_proj.weight.astype(mx.bfloat16)


def _norm_in_another_type(block: Any) -> None:
    block.input_layernorm.weight = block.input_layernorm.weight.astype(mx.bfloat16)


def _narrow(block: Any) -> None:
    block.mlp.gate_proj, block.mlp.up_proj = nn.Linear(128, 162, bias=False), nn.Linear(128, 162, bias=False)
    block.mlp.down_proj = nn.Linear(162, 128, bias=False)


def _bias_of_one(block: Any) -> None:
    block.self_attn.q_proj.bias = mx.zeros((block.self_attn.q_proj.weight.shape[0],))


@pytest.mark.parametrize("change", [_quantize, _mix_types, _norm_in_another_type, _narrow, _bias_of_one])
def test_a_block_that_the_kernels_could_not_run_is_left(gpu_path_on_host: None, change: Any) -> None:
    """Weights of fewer bits, of several types, rows of no whole pieces of 16 bytes, a bias for some of the columns."""
    model = build(TINY["llama_mqa"]).model
    change(model.layers[1])
    assert [FusedDecoderBlock.takes(layer) for layer in model.layers] == [True, False, True]
    adapt_for_gpu(model)
    assert [type(layer) is FusedDecoderBlock for layer in model.layers] == [True, False, True]


@pytest.mark.parametrize("name", ["llama_mqa", "llama_biases"])
def test_weights_are_not_kept_twice_nor_held_twice_on_the_way(gpu_path_on_host: None, name: str) -> None:
    """Whether the block is replaced or its products are put together."""
    loaded = changed(name, num_hidden_layers=8)
    model = loaded.model
    parts = [weakref.ref(layer.self_attn.q_proj) for layer in model.layers]
    size = sum(int(array.nbytes) for _, array in tree_flatten(model.layers[0].parameters()))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    adapt_for_gpu(model)
    assert mx.get_peak_memory() - before < 3 * size
    assert mx.get_active_memory() - before < size / 2
    assert [part() for part in parts] == [None] * 8


def test_layers_share_a_table_where_their_embeddings_are_the_same(gpu_path_on_host: None) -> None:
    model = build(TINY["llama_mqa"]).model
    model.layers[1].self_attn.rope = nn.RoPE(96, base=500.0)
    adapt_for_gpu(model)
    first, other, last = (block._angles for block in model.layers)
    assert first is last is not other
    assert (first.num_layers, other.num_layers) == (2, 1)


def test_a_table_is_made_once_a_step_and_let_go_after_its_last_layer() -> None:
    tables = RotaryTables()
    table, second, third = (tables.of(nn.RoPE(8), 8) for _ in range(3))
    assert isinstance(table, RotaryTable)
    assert table is second is third
    for start in (0, 7):
        positions = mx.arange(start, start + 5)
        pairs = [table(positions) for _ in range(3)]
        assert pairs[0] is pairs[1] is pairs[2]
        np.testing.assert_allclose(np.array(pairs[0][0][:, 0]), np.cos(np.arange(start, start + 5)), atol=1e-6)
        assert table._table is table._positions is None


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(32, base=20_000.0),
        nn.RoPE(32, scale=0.25),
        Llama3RoPE(32, base=500_000.0, scaling_config={**_LLAMA3, "original_max_position_embeddings": 2048}),
    ],
    ids=["plain", "scaled", "llama3"],
)
def test_tables_turn_heads_as_the_embedding_does(gpu_path_on_host: None, rope: Any) -> None:
    table = RotaryTables().of(rope, 32)
    assert table is not None
    positions = mx.array([0, 1, 250, 4000], mx.int32)
    x = mx.random.normal((4, 3 * 32), key=mx.random.key(1))
    got = rotate(x, Rotation(*table(positions), 3)).reshape(4, 3, 32)
    expected = rope(x.reshape(4, 3, 1, 32), offset=positions)[:, :, 0]
    # What a rounded angle of some thousand radians makes.
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-3)


@pytest.mark.parametrize(
    "rope",
    [nn.RoPE(32, traditional=True), nn.RoPE(16), YarnRoPE(32, scaling_factor=4.0)],
    ids=["traditional", "a part of the head", "yarn"],
)
def test_other_embeddings_have_no_table(rope: nn.Module) -> None:
    assert RotaryTables().of(rope, 32) is None


def test_heads_that_are_normed_are_turned_by_the_model(gpu_path_on_host: None) -> None:
    model = build(TINY["qwen3"]).model
    adapt_for_gpu(model)
    assert len(blocks(model)) == 3
    assert all(block._angles is None and block.head_norms for block in blocks(model))
