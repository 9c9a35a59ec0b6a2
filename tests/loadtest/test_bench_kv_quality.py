from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from loadtest import bench_kv_quality
from loadtest.bench_kv_quality import Scorer, Scores, parse_args, perplexity, python_text, same_tokens, spread
from mlx_engine.paged_model import PagedModel
from tests.parity.tiny_models import TINY, VOCAB, build


def test_pieces_are_spread_over_the_whole_text_without_overlapping() -> None:
    assert spread(range(100), 4, 10) == [list(range(start, start + 10)) for start in (0, 25, 50, 75)]
    assert spread(range(7), 3, 2) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="7 tokens, fewer than 4 times 2"):
        spread(range(7), 4, 2)


def test_same_tokens_are_counted_by_place_and_up_to_the_first_that_differs() -> None:
    assert same_tokens([1, 2, 3, 4], [1, 2, 9, 4]) == (75.0, 2)
    assert same_tokens([1, 2], [1, 2]) == (100.0, 2)


def test_perplexity_is_of_all_tokens_together() -> None:
    two, one = Scores([math.log(2)] * 3, []), Scores([math.log(32)], [])
    assert one.perplexity == pytest.approx(32)
    assert perplexity([two, one]) == pytest.approx(2 ** ((3 + 5) / 4))


def test_the_sizes_are_those_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    full = parse_args([])
    assert full.windows * full.context > 8000
    assert full.context >= 1024
    assert parse_args(["--quick", "--context", "200"]).context == 200
    with pytest.raises(SystemExit):
        parse_args(["--context", "64", "--decode-tokens", "63"])
    assert "at most 62" in capsys.readouterr().err


def test_python_brings_enough_text() -> None:
    assert len(python_text()) > 200_000


def test_scores_are_the_models_own_losses_whatever_path_a_token_takes() -> None:
    rng = np.random.default_rng(4)
    windows = [rng.integers(0, VOCAB, 70).tolist() for _ in range(3)]
    logits = build(TINY["llama_biases"]).model(mx.array(windows))[:, :-1]
    losses = np.array(nn.losses.cross_entropy(logits, mx.array(windows)[:, 1:]))
    best = np.array(mx.argmax(logits, axis=-1))
    scorer = Scorer(PagedModel(build(TINY["llama_biases"])), windows, mx.float32, mx.float32)
    scores = scorer.run(decode_tokens=9)
    for window in range(3):
        chunk, decode = (scores[path][window] for path in ("prefill chunks", "decode rows"))
        assert len(decode.losses) == 9
        np.testing.assert_allclose(chunk.losses + decode.losses, losses[window], atol=1e-4)
        assert chunk.best + decode.best == best[window].tolist()
    # 8 bits come close, and are not the same.
    coarse = Scorer(PagedModel(build(TINY["llama_biases"])), windows, mx.float32, mx.int8).run(decode_tokens=9)
    difference = np.array(coarse["decode rows"][0].losses) - scores["decode rows"][0].losses
    assert 0 < np.abs(difference).max() < 0.2


def test_a_type_that_no_engine_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--dtype", "float32"]).dtype == "float32"
    with pytest.raises(SystemExit):
        parse_args(["--dtype", "foo"])
    assert "argument --dtype: invalid choice: 'foo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "16,90000"], "--prompt-tokens and --output-tokens make 90008 tokens, and the model was"),
        (["--context", "90000"], "--context makes 90000 tokens, and the model was made for"),
        (["--prompts", "90000"], "tokens, fewer than 90000 times 16"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(*_: Any) -> None:
        raise AssertionError("begun")

    monkeypatch.setattr(bench_kv_quality, "score_text", measured)
    assert bench_kv_quality.main(["--quick", "--out", str(tmp_path / "kv.json"), *arguments]) == 2
    assert message in capsys.readouterr().err
