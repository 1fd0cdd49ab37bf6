"""Train LoRA adapters directly on an unchanged GGUF file.

    import pyggtrain
    pyggtrain.train("model.gguf", "chat.jsonl", "adapter.gguf")

Names are resolved on first use, so that `import pyggtrain` and the command line's help need neither torch nor a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyggtrain._version import __version__

if TYPE_CHECKING:
    from pyggtrain.api import TrainResult, prepare, train, verify
    from pyggtrain.errors import PyggtrainError
    from pyggtrain.model_info import info
    from pyggtrain.training.config import TrainConfig

__all__ = ["PyggtrainError", "TrainConfig", "TrainResult", "__version__", "info", "prepare", "train", "verify"]

_HOMES = {
    "PyggtrainError": "pyggtrain.errors",
    "TrainConfig": "pyggtrain.training.config",
    "TrainResult": "pyggtrain.api",
    "info": "pyggtrain.model_info",
    "prepare": "pyggtrain.api",
    "train": "pyggtrain.api",
    "verify": "pyggtrain.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pyggtrain' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
