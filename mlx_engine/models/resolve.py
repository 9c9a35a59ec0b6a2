"""From what a user wrote as `model` to a folder on this machine. Imports no MLX: the server process uses it too."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from mlx_engine.config import EMBEDDED_MODEL
from mlx_engine.errors import ModelLoadError
from mlx_engine.models.embedded import embedded_gguf
from mlx_engine.models.gguf import Progress, convert_gguf

# Everything that mlx-lm and the tokenizers read, and no other format's weights.
_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


def resolve_model(ref: str, progress: Progress | None = None) -> Path:
    """The folder of a model, in mlx-lm's layout, converted or downloaded if need be.

    ref is "embedded", a folder, a .gguf file (any part of a split one) or a Hugging Face id, tried in this order.
    progress(stage, fraction) is told of conversion ("read", "convert") and download ("download").
    Raises ModelLoadError saying what to do: nothing there, a damaged file, no such id, no network.
    """
    if ref == EMBEDDED_MODEL:
        return convert_gguf(embedded_gguf(), progress)
    path = Path(ref).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        return convert_gguf(path, progress)
    if path.exists():
        raise ModelLoadError(f"{ref} is neither a folder nor a .gguf file")
    if not _HUB_ID.match(ref):
        raise ModelLoadError(
            f"model {ref!r} isn't here: there is no such folder or file, and it isn't a Hugging Face id (owner/name)"
        )
    return _download(ref, progress)


def _download(repo: str, progress: Progress | None) -> Path:
    if progress is not None:
        progress("download", 0.0)
    try:
        folder = Path(snapshot_download(repo, allow_patterns=_PATTERNS))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"model {repo!r}: there is no such folder here, and no such model on the Hugging Face hub "
            "(or it is private: log in with `hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"model {repo!r} isn't in the local cache and the Hugging Face hub can't be reached "
            f"({_first_line(error)}). Connect to the network, or set `model` to a folder, a .gguf file or 'embedded'"
        ) from error
    if progress is not None:
        progress("download", 1.0)
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
