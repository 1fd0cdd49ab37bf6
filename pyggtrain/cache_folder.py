"""Where pyggtrain keeps what it can make again: the folder that the build uses too (vendor/llama_cpp.cmake)."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $PYGGTRAIN_CACHE_DIR, else $XDG_CACHE_HOME/pyggtrain, else %LOCALAPPDATA%/pyggtrain on Windows, else
    ~/.cache/pyggtrain. Everything in it may be deleted at any time."""
    if own := os.environ.get("PYGGTRAIN_CACHE_DIR"):
        return Path(own)
    if common := os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None):
        return Path(common) / "pyggtrain"
    return Path.home() / ".cache" / "pyggtrain"
