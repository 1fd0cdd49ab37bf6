"""What was found on a tiny model of each architecture: `architectures.json`, written by tests/tiny_models/sweep.py."""

import json
from importlib import resources
from typing import Any

from pyggtrain import _bridge


def known_architectures() -> list[str]:
    """`general.architecture` of everything that the pinned llama.cpp knows, in its own order."""
    return _bridge.architectures()


def recorded() -> dict[str, dict[str, Any]]:
    """By architecture: "models", of each tiny model what is in the way ("" if nothing); and if one of them passed,
    "error", "adapter_error" and "trained" (see `tests/tiny_models/check.py`).
    """
    text = resources.files("pyggtrain.graph").joinpath("architectures.json").read_text()
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found
