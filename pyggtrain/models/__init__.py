"""Hand-written models: one file per `general.architecture`, all with the face of `nn.Model`."""

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.models.llama import Llama
from pyggtrain.nn import Model

ARCHITECTURES: dict[str, type[Llama]] = {"llama": Llama}


def load(
    file: GGUFFile, *, device: torch.device | str = "cpu", compute: str = "auto", num_ctx: int | None = None
) -> Model:
    """Build the model of a file on top of its own blocks.

    Every tensor is checked against the metadata's shapes. On the CPU none is copied.

    Args:
        file: an opened GGUF file.
        device: where to compute.
        compute: "auto", "exact" or "ggml", see `ops.quant_linear`.
        num_ctx: context that the adapter will be served with; matters to longrope files only. None: the file's own
            `context_length`.

    Raises:
        UnsupportedError: unknown architecture, or a key or tensor that asks for something not implemented.
        GGUFError: a key or tensor is missing, malformed or of another shape than its metadata says.
    """
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UnsupportedError(
            f"{file.path} has general.architecture '{file.architecture}': "
            f"supported are {', '.join(sorted(ARCHITECTURES))}. Use a model of one of these."
        )
    return architecture(file, device=device, compute=compute, num_ctx=num_ctx)


__all__ = ["ARCHITECTURES", "Model", "load"]
