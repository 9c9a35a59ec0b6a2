"""Where files that are made once are kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """QUIRE_CACHE_DIR, or the platform's cache folder for this user."""
    return Path(os.environ.get("QUIRE_CACHE_DIR") or platformdirs.user_cache_dir("quire"))
