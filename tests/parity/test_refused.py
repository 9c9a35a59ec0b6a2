"""What can't run on paged K/V is refused at start, by the name of its architecture, and never run wrongly."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_engine.errors import ModelLoadError
from mlx_engine.paged_model import PagedModel
from tests.parity.tiny_models import REFUSED, TINY, build


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_does_not_fit_is_refused_by_name(name: str) -> None:
    loaded = build(REFUSED[name])
    with pytest.raises(ModelLoadError, match=f"architecture '{name}' can't be served"):
        PagedModel(loaded)


class _Recency(nn.Module):
    """An attention projection that looks at neighbouring rows: right for one dense sequence, wrong for ragged rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x + 0.5 * mx.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1])


def test_a_model_whose_rows_depend_on_each_other_outside_attention_is_refused() -> None:
    """The probe compares logits: an unknown architecture need not be known to be wrong in order to be refused."""
    loaded = build(TINY["llama_biases"])
    layer = loaded.model.layers[1].self_attn
    layer.v_proj = _Recency(layer.v_proj)
    with pytest.raises(ModelLoadError, match=r"'llama' can't be served.*logits differ"):
        PagedModel(loaded)
