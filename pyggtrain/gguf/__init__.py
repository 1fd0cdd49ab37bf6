"""The GGUF file: what is in it, its tensors as torch views, its tokenizer, and how to write one."""

from typing import TYPE_CHECKING

try:
    from pyggtrain import _bridge as _bridge
except ImportError as error:
    raise ImportError(
        "pyggtrain's compiled part (pyggtrain._bridge) is missing. Either the package is not installed (type `pip "
        "install .` in the "
        "project's folder), or Python was started inside the project's folder and found the source instead of the "
        "installed package "
        f"(start it elsewhere, or type `pip install -e .`). Reason: {error}"
    ) from error

from pyggtrain.gguf.file import GGUFFile
from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.gguf.tokenizer import Tokenizer
from pyggtrain.gguf.writer import DeferredTensor, TypedValue, quantize_tensor, typed_metadata, write_gguf

if TYPE_CHECKING:
    from pyggtrain._bridge import MetadataValue

__all__ = [
    "DeferredTensor",
    "GGUFFile",
    "MetadataValue",
    "QuantTensor",
    "Tokenizer",
    "TypedValue",
    "quantize_tensor",
    "typed_metadata",
    "write_gguf",
]
