from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_engine.detokenizer import IncrementalDetokenizer
from mlx_engine.models.resolve import resolve_model
from mlx_engine.models.tokenizer import Tokenizer

# The first example loads the tokenizer, and the machine may be busy.
unhurried = settings(deadline=None)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("embedded"))


@cache
def broken_tokens() -> list[int]:
    """Ids that are no whole characters by themselves."""
    return [i for i in range(tokenizer().vocab_size) if "\ufffd" in tokenizer().decode([i])]


def _stream(token_ids: list[int], stop: list[str] | None = None, step: int = 1) -> tuple[list[str], bool]:
    detokenizer = IncrementalDetokenizer(tokenizer(), stop or [])
    deltas = [detokenizer.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer.stopped


@unhurried
@given(
    st.lists(st.integers(0, 49151) | st.sampled_from(list(range(17, 300))), max_size=60),
    st.integers(1, 4),
)
def test_deltas_join_to_the_decoding_of_all_tokens(token_ids: list[int], step: int) -> None:
    assert "".join(_stream(token_ids, step=step)[0]) == tokenizer().decode(token_ids)


@unhurried
@given(st.data())
def test_broken_characters_join_too_and_are_not_held_for_ever(data: st.DataObject) -> None:
    tokens = st.sampled_from(broken_tokens()) | st.integers(0, 49151)
    token_ids = data.draw(st.lists(tokens, min_size=20, max_size=120))
    deltas, _ = _stream(token_ids)
    assert "".join(deltas) == tokenizer().decode(token_ids)
    # Whatever comes, text is never more than a few tokens late.
    for i in range(len(deltas) - 21):
        assert any(deltas[i : i + 20]) or not tokenizer().decode(token_ids[i : i + 20])


@unhurried
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_text_streams_without_half_characters(text: str) -> None:
    token_ids = tokenizer().encode(text)
    # The vocabulary has no tokens for some of the bytes that only unassigned characters use.
    assume(tokenizer().decode(token_ids) == text and "\ufffd" not in text)
    assert not any("\ufffd" in delta for delta in _stream(token_ids)[0])


def test_emoji_comes_whole() -> None:
    deltas, _ = _stream([10813, 38887, 10813, 38887])
    assert deltas == ["", "\U0001f642", "", "\U0001f642", ""]


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    deltas, _ = _stream([10813])
    assert deltas == ["", "\ufffd"]
    assert "".join(deltas) == tokenizer().decode([10813])


def test_special_tokens_leave_no_text_unless_asked_for() -> None:
    token_ids = [1, *tokenizer().encode("user"), 2]
    assert "".join(_stream(token_ids)[0]) == "user"
    shown = IncrementalDetokenizer(tokenizer(), skip_special_tokens=False)
    assert shown.push(token_ids) + shown.finish() == "<|im_start|>user<|im_end|>"


@unhurried
@given(
    st.text("ab ", min_size=1, max_size=14),
    st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_text_is_cut_before_the_earliest_stop_string(text: str, stop: list[str], step: int) -> None:
    token_ids = [tokenizer().encode(character)[0] for character in text]
    deltas, stopped = _stream(token_ids, stop, step)
    wanted = text[: min((text.index(s) for s in stop if s in text), default=len(text))]
    assert "".join(deltas) == wanted
    assert stopped == any(s in text for s in stop)
    # Nothing that had to be taken back was ever sent.
    for i in range(len(deltas)):
        assert wanted.startswith("".join(deltas[:i]))


@pytest.mark.parametrize("size", [3, 5, 9])
def test_stop_string_over_token_boundaries(size: int) -> None:
    text = " The English alphabet: A B C D E F G, and so on to the end.\nThen \U0001f642 again."
    token_ids = tokenizer().encode(text)
    for start in range(1, len(text) - size):
        stop = text[start : start + size]
        deltas, stopped = _stream(token_ids, [stop])
        assert "".join(deltas) == text[: text.index(stop)]
        assert stopped


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    detokenizer = IncrementalDetokenizer(tokenizer(), ["zebra"])
    assert detokenizer.push(tokenizer().encode("plain")) == "plain"
    assert detokenizer.push(tokenizer().encode(" z")) == " "
    assert detokenizer.push(tokenizer().encode("oo")) == "zoo"
    assert not detokenizer.stopped


def test_nothing_comes_after_a_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(tokenizer(), ["END"])
    assert detokenizer.push(tokenizer().encode("one END two")) == "one "
    assert (detokenizer.stopped, detokenizer.stop_string) == (True, "END")
    assert detokenizer.push(tokenizer().encode(" three")) == ""
    assert detokenizer.finish() == ""


def test_beginning_of_a_stop_string_is_given_out_when_the_sequence_ends() -> None:
    detokenizer = IncrementalDetokenizer(tokenizer(), ["hello world"])
    assert detokenizer.push(tokenizer().encode("hello wor")) == ""
    assert detokenizer.finish() == "hello wor"
    assert not detokenizer.stopped


def test_shorter_stop_string_waits_for_one_that_began_earlier() -> None:
    ids = [tokenizer().encode(c)[0] for c in "xabcdy"]
    assert "".join(_stream(ids, ["bc", "abcd"])[0]) == "x"
    assert "".join(_stream(ids[:4], ["bc", "abcd"])[0]) == "xa"  # it ended before the longer one could be whole


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        IncrementalDetokenizer(tokenizer(), ["a", ""])
