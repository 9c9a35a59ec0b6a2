"""SmolLM2-135M-Instruct, as shipped, answers real prompts as mlx_lm does, in every way of running them."""

from __future__ import annotations

import pytest

from mlx_engine.models.load import LoadedModel, load_model, resolve_model
from mlx_engine.models.tokenizer import Tokenizer
from tests.parity.compare import Reference, assert_same
from tests.parity.prompts import PROMPTS
from tests.parity.reference import SMOLLM2, references
from tests.parity.runs import WAYS, Run, Way, run

MAX_TOKENS = 12
LONGEST = 400  # tokens of one request


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(resolve_model("embedded"))


@pytest.fixture(scope="module")
def token_prompts() -> list[list[int]]:
    tokenizer = Tokenizer(resolve_model("embedded"))
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def answers(token_prompts: list[list[int]]) -> list[Reference]:
    return references({SMOLLM2: token_prompts}, MAX_TOKENS)[SMOLLM2]


def test_the_prompts_are_many_and_varied(token_prompts: list[list[int]]) -> None:
    lengths = sorted(len(prompt) for prompt in token_prompts)
    assert len(set(PROMPTS)) == len(PROMPTS) >= 64
    assert lengths[0] == 1
    assert 150 < lengths[-1] < LONGEST - MAX_TOKENS


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_as_mlx_lm(
    loaded: LoadedModel, way: str, token_prompts: list[list[int]], answers: list[Reference]
) -> None:
    result = run(loaded, WAYS[way], token_prompts, MAX_TOKENS, max_model_len=LONGEST)
    for sending in result.sendings:
        assert_same(sending.tokens, answers, max_forgiven=2)
    if WAYS[way].times > 1:
        block_size = WAYS[way].options["block_size"]
        for prompt, output in zip(token_prompts, result.sendings[-1].last, strict=True):
            assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size


REPEATED = [
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat on the log. The cat sat",
    "one two three four five six seven eight one two three four five six seven eight one two three",
    "- apples\n- bread\n- cheese\n- dates\n- eggs\n\nThe list once more:\n\n- apples\n- bread\n- cheese\n-",
    "x = 1\ny = 2\nprint(x + y)\nx = 1\ny = 2\nprint(x + y)\nx = 1\ny = 2\n",
]


@pytest.fixture(scope="module")
def repeated(loaded: LoadedModel) -> tuple[list[list[int]], Run]:
    """Prompts, and a run of them without drafts."""
    tokenizer = Tokenizer(resolve_model("embedded"))
    prompts = [tokenizer.encode(prompt) for prompt in REPEATED]
    return prompts, run(loaded, Way({"drafter": "none"}, alone=True), prompts, 40, max_model_len=LONGEST)


@pytest.mark.parametrize("overlap", [True, False])
def test_text_that_repeats_itself_takes_fewer_steps_with_drafts(
    loaded: LoadedModel, repeated: tuple[list[list[int]], Run], overlap: bool
) -> None:
    prompts, plain = repeated
    way = Way({"drafter": "ngram", "overlap": overlap}, alone=True)
    drafted = run(loaded, way, prompts, 40, max_model_len=LONGEST)
    assert drafted.sendings[0].tokens == plain.sendings[0].tokens
    assert plain.stats.draft_tokens == 0
    assert drafted.stats.accepted_draft_tokens > 0.5 * drafted.stats.draft_tokens > 0
    assert drafted.stats.steps < 0.7 * plain.stats.steps


def test_same_tokens_after_preemption(
    loaded: LoadedModel, token_prompts: list[list[int]], answers: list[Reference]
) -> None:
    way = Way({"num_blocks": 26, "block_size": 16, "max_prefill_chunk": 64, "max_model_len": LONGEST}, per_step=8)
    result = run(loaded, way, token_prompts, MAX_TOKENS)
    assert result.stats.num_preemptions > 0
    assert_same(result.sendings[0].tokens, answers, max_forgiven=2)
