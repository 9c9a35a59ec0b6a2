"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deployments.openai_types import ChatCompletionRequest, CompletionRequest
from deployments.reference import FIELD_NOTES, render
from deployments.settings import load_settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_that_the_code_writes() -> None:
    assert render(README) == README, "run `make docs`"


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="config:begin"):
        render("no tables here")


def test_every_request_field_is_explained_and_no_other() -> None:
    assert set(FIELD_NOTES) == {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}


def test_environment_variables_that_are_shown_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = set(re.findall(r"\bQUIRE_[A-Z_]+__[A-Z_]+=\w+", README))
    assert shown
    for assignment in shown:
        name, value = assignment.split("=", 1)
        monkeypatch.setenv(name, value)
    load_settings({})


def test_files_that_are_linked_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
