from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_engine.errors import ModelLoadError, RequestError
from mlx_engine.models.gguf import convert_gguf
from mlx_engine.models.resolve import resolve_model
from mlx_engine.models.tokenizer import Tokenizer
from tests.mlx_engine.models.tiny import TinyGGUF

USER = {"role": "user", "content": "Name a colour."}
ASSISTANT = {"role": "assistant", "content": "The colour I like most is"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("embedded"))


def _with_template(folder: Path, template: str | None) -> Tokenizer:
    shutil.copytree(resolve_model("embedded"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def test_facts_on_the_embedded_model(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.id_to_token(0) == "<|endoftext|>"
    assert tokenizer.encode("\U0001f642") == [10813, 38887]
    assert tokenizer.encode("") == []
    assert {0, 1, 2} <= tokenizer.special_token_ids
    # Each digit is a token of its own, and no BOS is added.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]


@pytest.mark.parametrize(
    "text", ["plain words, twice  spaced", "line\nline\r\n\ttab", "naïve Ελληνικά 你好 \U0001f468‍\U0001f469", "x" * 300]
)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]


def test_special_tokens_in_text_are_those_tokens_and_are_skipped_in_decoding(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<|im_start|>user")
    assert token_ids[0] == 1
    assert tokenizer.decode(token_ids) == "user"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>user"


def test_chat_is_rendered_by_the_models_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([USER])
    assert text.endswith("<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n")
    assert "SmolLM" in text  # the system turn that this template puts in by itself
    assert tokenizer.apply_chat_template([USER]) == tokenizer.encode(text)
    assert not tokenizer.render_chat([USER], add_generation_prompt=False).endswith("assistant\n")


def test_prefilled_answer_stays_open(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe colour I like most is")
    with pytest.raises(RequestError, match="add_generation_prompt"):
        tokenizer.render_chat([USER, ASSISTANT], add_generation_prompt=True, continue_final_message=True)


def test_variables_and_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{{ mood }}|{% for t in tools %}{{ t['function']['name'] }}{% endfor %}|{{ messages[0]['content'] }}"
    tokenizer = _with_template(tmp_path / "m", template)
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    assert tokenizer.render_chat([USER], tools=tools, mood="glad") == "glad|add|Name a colour."


def test_template_that_refuses_is_quoted_and_the_next_request_works(tmp_path: Path) -> None:
    refusal = "{% if messages[0]['role']=='system' %}{{ raise_exception('system not allowed here') }}{% endif %}"
    tokenizer = _with_template(tmp_path / "m", refusal + "{{ messages[0]['content'] }}")
    with pytest.raises(RequestError, match="system not allowed here") as caught:
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}, USER])
    assert caught.value.param == "messages"
    assert tokenizer.decode(tokenizer.apply_chat_template([USER])) == "Name a colour."


def test_no_template_anywhere(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path / "m", None)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("still works")
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([USER])


def test_template_with_a_syntax_error_is_a_request_error(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path / "m", "{% for m in messages %}{{ m.role }")
    assert tokenizer.has_chat_template
    with pytest.raises(RequestError, match="syntax error"):
        tokenizer.apply_chat_template([USER])


@pytest.mark.parametrize("content", [None, ["a"], {"a": 1}])
def test_template_that_fails_on_the_content(tokenizer: Tokenizer, content: object) -> None:
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": content}])


def test_template_that_renders_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nothing"):
        _with_template(tmp_path / "m", "{# nothing at all #}").apply_chat_template([USER])


def test_threads_may_share_it(tokenizer: Tokenizer) -> None:
    texts = [f"{i} " * (i % 50 + 1) for i in range(400)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "hello 2024", ["hello", " ", "2", "0", "2", "4"]),
        ("smollm", "hello world", ["hello", " w", "or", "l", "d"]),
        ("qwen2", "e\u0301", ["é"]),  # composed first
    ],
)
def test_text_splitters(tmp_path: Path, quire_cache: Path, pre: str, text: str, pieces: list[str]) -> None:
    TinyGGUF(arch="qwen2" if pre == "qwen2" else "llama", pre=pre).write(tmp_path / "t.gguf")
    tokenizer = Tokenizer(convert_gguf(tmp_path / "t.gguf"))
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == "".join(pieces)
    if pre != "qwen2":
        assert [tokenizer.decode([i]) for i in token_ids] == pieces


def test_bos_is_added_where_the_family_does(tmp_path: Path, quire_cache: Path) -> None:
    TinyGGUF(pre="llama-bpe").write(tmp_path / "t.gguf")
    tokenizer = Tokenizer(convert_gguf(tmp_path / "t.gguf"))
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1
    # The template writes its own specials: nothing is added to it.
    assert tokenizer.apply_chat_template([USER])[:1] == [1]
    assert tokenizer.apply_chat_template([USER])[1] != 1
