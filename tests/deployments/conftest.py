"""The embedded model's real tokenizer, and a server over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.engine_api import TextModel
from deployments.text import TokenizerText
from mlx_engine.models.resolve import resolve_model
from tests.deployments.fakes import FakeEngine, Server, serving


@pytest.fixture(scope="session")
def text() -> TextModel:
    return TokenizerText(resolve_model("embedded"))


@pytest.fixture
def server(text: TextModel) -> Iterator[Server]:
    with serving(FakeEngine(text)) as running:
        yield running
