"""What every kernel's text must have."""

from __future__ import annotations

import re

import pytest

from mlx_engine.attention.kernels import texts

_NEXT, _AWAIT = "QUIRE_NEXT_MAY_START();", "QUIRE_AWAIT_PREVIOUS();"
# Read their first weights, which no kernel of a step writes, before they wait.
_LATER = ("gemv", "skinny_gemm")


@pytest.mark.parametrize("name", texts.KERNELS)
def test_a_kernel_waits_before_it_touches_memory(name: str) -> None:
    text = texts.kernel_text(name, "cuda")
    assert text.count(_NEXT) == text.count(_AWAIT) == 1
    assert text.startswith(f"{_NEXT}\n" if name in _LATER else f"{_NEXT}\n{_AWAIT}\n")


@pytest.mark.parametrize("name", _LATER)
def test_before_it_waits_a_kernel_reads_weights_only(name: str) -> None:
    before = texts.kernel_text(name, "cuda").partition(_AWAIT)[0]
    _, inputs, outputs = texts.KERNELS[name]
    assert {word for word in (*inputs, *outputs) if re.search(rf"\b{word}\b", before)} <= {"weight"}


@pytest.mark.parametrize("dialect", ["cuda", "host", "metal"])
def test_each_dialect_has_the_words(dialect: texts.Dialect) -> None:
    header = texts.kernel_header("gemv", dialect)
    assert all(f"#define {word[:-1]}" in header for word in (_NEXT, _AWAIT))
