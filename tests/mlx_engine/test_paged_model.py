"""A model on paged K/V gives its own logits, row by row, for any mix of sequences."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import paged_model
from mlx_engine.attention.gather import GatherBackend
from mlx_engine.input_batch import build_input_batch
from mlx_engine.paged_model import PagedModel
from mlx_engine.types import LayerKVSpec, SamplingParams, ScheduledSequence, SchedulerOutput
from tests.parity.tiny_models import TINY, VOCAB, build

BLOCK = 4


def logits_of(
    name: str,
    steps: list[list[tuple[str, int, list[int]]]],
    rows: mx.array | None,
    kv_dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """The last step's logits; each step is a list of (sequence, start, tokens). Sequence `a` has blocks 1 to 8, ..."""
    model = PagedModel(build(TINY[name]))
    backend = GatherBackend()
    backend.initialize(model.layers, 32, BLOCK, mx.float32, kv_dtype)
    for step in steps:
        sequences = tuple(
            ScheduledSequence(
                sequence,
                start,
                len(tokens),
                tokens,
                [8 * "abcd".index(sequence) + block for block in (3, 1, 2, 8, 5, 4, 7, 6)],
                True,
                0,
                SamplingParams(),
                0,
            )
            for sequence, start, tokens in step
        )
        batch = build_input_batch(SchedulerOutput(0, sequences), BLOCK)
        is_last = step is steps[-1]
        logits = model(mx.array(batch.token_ids), backend.begin_step(batch), rows if is_last else None)
        mx.eval(logits, backend.state())
    return logits


def own_logits(name: str, tokens: list[int]) -> mx.array:
    """[n, V]: the untouched model on one dense sequence."""
    return build(TINY[name]).model(mx.array([tokens]))[0]


A = [5, 9, 200, 31, 7, 7, 450, 12, 8, 100, 3]
B = [400, 2, 2, 77, 19, 21]


@pytest.mark.parametrize("name", ["llama_biases", "llama_tied_mha", "gemma3", "gpt_oss", "mixtral"])
def test_ragged_rows_give_the_models_own_logits(name: str) -> None:
    """Step 1 runs parts of both; step 2 a decode row of one and a chunk of the other."""
    got = logits_of(name, [[("a", 0, A[:10]), ("b", 0, B[:2])], [("b", 2, B[2:]), ("a", 10, A[10:])]], None)
    expected = mx.concatenate([own_logits(name, A)[10:], own_logits(name, B)[2:]])
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-4)


@pytest.mark.parametrize("name", ["llama_biases", "gemma3", "gpt_oss", "deepseek_v2"])
def test_8_bits_of_keys_and_values_change_the_logits_a_little(name: str) -> None:
    steps = [[("a", 0, A[:10]), ("b", 0, B[:2])], [("b", 2, B[2:]), ("a", 10, A[10:])]]
    exact, coarse = (logits_of(name, steps, None, kv_dtype) for kv_dtype in (mx.float32, mx.int8))
    error = (mx.linalg.norm(coarse - exact) / mx.linalg.norm(exact)).item()
    assert 0 < error < 0.05


@pytest.mark.parametrize("name", ["llama_biases", "llama_tied_mha", "gemma3", "internlm2"])
def test_only_the_asked_rows_get_logits_and_they_are_the_same(name: str) -> None:
    """With an output head of its own, with the embedding as the head, and with a head of an unusual name."""
    steps = [[("a", 0, A), ("b", 0, B)]]
    everything = logits_of(name, steps, None)
    some = logits_of(name, steps, mx.array([10, 16]))
    assert some.shape == (2, VOCAB)
    np.testing.assert_allclose(np.array(some), np.array(everything)[[10, 16]], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama_mqa", [LayerKVSpec(1, 96, 96, None)] * 3),
        ("deepseek_v2", [LayerKVSpec(4, 64, 48, None)] * 3),
        ("gemma3", [LayerKVSpec(1, 256, 256, 16)] * 2 + [LayerKVSpec(1, 256, 256, None)]),
        ("mistral", [LayerKVSpec(2, 64, 64, 12), LayerKVSpec(2, 64, 64, None), LayerKVSpec(2, 64, 64, 12)]),
    ],
)
def test_what_each_layer_stores_is_read_off_the_model(name: str, expected: list[LayerKVSpec]) -> None:
    assert list(PagedModel(build(TINY[name])).layers) == expected


def test_the_models_own_path_still_works_afterwards() -> None:
    """Benches and references run the same process: dense caches must go the original way."""
    loaded = build(TINY["llama_biases"])
    before = loaded.model(mx.array([A]))
    mx.eval(before)
    PagedModel(loaded)
    np.testing.assert_allclose(np.array(loaded.model(mx.array([A]))), np.array(before), atol=1e-5)


def test_activation_memory_grows_with_the_tokens_of_a_step() -> None:
    model = PagedModel(build(TINY["llama_biases"]))
    small, large = model.activation_bytes(8), model.activation_bytes(256)
    # At least the hidden states of all tokens, and two sets of them.
    assert large > small
    assert large > 2 * 256 * 128 * 4


def test_halving_context_compares_linear_layers_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_model, "_ATTENTION_FACTOR", dict.fromkeys(paged_model._ATTENTION_FACTOR, 1.0))
    # A layer: Q and O 128 x 256, K and V 128 x 128, three of 128 x 160; 4 heads of 64 + 64 for a token of context.
    layer = 2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 160
    assert PagedModel(build(TINY["llama_biases"])).halving_context == round(layer / (4 * 128))
    # One layer of three has no window, so a token of context costs a third.
    assert PagedModel(build(TINY["mistral"])).halving_context == round(3 * layer / (4 * 128))


def test_halving_context_counts_only_the_experts_that_a_token_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_model, "_ATTENTION_FACTOR", dict.fromkeys(paged_model._ATTENTION_FACTOR, 1.0))
    config = TINY["mixtral"]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim, kv_heads = hidden // heads, config["num_key_value_heads"]
    attention = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim
    experts = 2 * 3 * hidden * config["intermediate_size"] + hidden * config["num_local_experts"]
    expected = round((attention + experts) / (heads * 2 * dim))
    assert PagedModel(build(config)).halving_context == expected
