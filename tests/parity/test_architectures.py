"""Every architecture answers as mlx_lm does: alone, batched, chunked, cached, preempted, under every policy."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_engine.models.load import LoadedModel
from tests.parity.compare import Reference, assert_same
from tests.parity.reference import references
from tests.parity.runs import WAYS, Way, run
from tests.parity.tiny_models import TINY, build, prompts

MAX_TOKENS = 12
PROMPTS = prompts()
# A pool's slab, and the most that one request here can have.
LONGEST = 112


# Beyond what was asked for, and much like the others.
SLOW = ("olmo2", "phi3", "starcoder2", "qwen3_moe")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TINY]


@pytest.fixture(scope="module")
def all_references(request: pytest.FixtureRequest) -> dict[str, list[Reference]]:
    """Of the models that this session tests."""
    wanted = {_params(item)["name"] for item in request.session.items if "name" in _params(item)}
    return references(dict.fromkeys(sorted({"llama_biases", *wanted}), PROMPTS), MAX_TOKENS)


def _params(item: pytest.Item) -> dict[str, str]:
    return item.callspec.params if hasattr(item, "callspec") and item.path.samefile(__file__) else {}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> LoadedModel:
    return build(TINY[name])


def test_answers_vary_with_the_prompt(name: str, all_references: dict[str, list[Reference]]) -> None:
    """A model that says the same whatever it is asked would make the other tests pass for nothing."""
    answers = all_references[name]
    assert len({answer.tokens for answer in answers}) > 0.9 * len(PROMPTS)
    gaps = np.array([answer.gaps for answer in answers])
    assert np.quantile(gaps, 0.1) > 0.02, "most tokens are near ties, which would be forgiven"


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_as_mlx_lm(
    name: str, loaded: LoadedModel, way: str, all_references: dict[str, list[Reference]]
) -> None:
    result = run(loaded, WAYS[way], PROMPTS, MAX_TOKENS, max_model_len=LONGEST)
    for answers in result.sendings:
        assert_same(answers.tokens, all_references[name], max_forgiven=3)
    if WAYS[way].times > 1:
        block_size = WAYS[way].options["block_size"]
        for prompt, output in zip(PROMPTS, result.sendings[-1].last, strict=True):
            assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size


def test_same_tokens_after_preemption(
    name: str, loaded: LoadedModel, all_references: dict[str, list[Reference]]
) -> None:
    way = Way({"num_blocks": 24, "block_size": 8, "max_prefill_chunk": 32, "max_model_len": LONGEST})
    result = run(loaded, way, PROMPTS, MAX_TOKENS)
    assert result.stats.num_preemptions > 0
    assert_same(result.sendings[0].tokens, all_references[name], max_forgiven=3)


POLICIES = [
    pytest.param(scheduler, kv_manager, prefix_cache, id=f"{scheduler}-{kv_manager}-{prefix_cache}")
    for scheduler in ("fcfs", "wave", "priority")
    for kv_manager, prefix_cache in (
        ("paged", "radix"),
        ("paged", "hash_chain"),
        ("paged", "none"),
        ("contiguous", "none"),
    )
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("scheduler", "kv_manager", "prefix_cache"), POLICIES)
def test_same_tokens_under_every_combination_of_policies(
    scheduler: str, kv_manager: str, prefix_cache: str, overlap: bool, all_references: dict[str, list[Reference]]
) -> None:
    """In a pool that is too small for all of them, sent twice."""
    few = slice(None, None, 2)
    way = Way(
        {
            "scheduler": scheduler,
            "kv_manager": kv_manager,
            "prefix_cache": prefix_cache,
            "overlap": overlap,
            "num_blocks": 56,
            "block_size": 8,
            "max_prefill_chunk": 24,
            "max_model_len": LONGEST,
        },
        times=2,
    )
    result = run(build(TINY["llama_biases"]), way, PROMPTS[few], MAX_TOKENS)
    for answers in result.sendings:
        assert_same(answers.tokens, all_references["llama_biases"][few], max_forgiven=3)
