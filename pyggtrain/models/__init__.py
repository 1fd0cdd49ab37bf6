"""The model of a file: hand-written for the architectures listed here, else llama.cpp's own graph, imported.

Both have the face of `nn.Model`, so nothing above knows the difference.
"""

import logging

import torch

from pyggtrain.errors import BridgeError, ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.models.llama import Llama
from pyggtrain.nn import Model

logger = logging.getLogger(__name__)

ARCHITECTURES: dict[str, type[Llama]] = {"llama": Llama}

IMPLEMENTATIONS = ("auto", "native", "graph")


def load(
    file: GGUFFile,
    *,
    implementation: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    compute: str = "auto",
    num_ctx: int | None = None,
    is_checked: bool = True,
    layers: range | None = None,
) -> Model:
    """Build the model of a file on top of its own blocks. On the CPU no weight is copied.

    A hand-written model checks every tensor against the metadata's shapes. An imported one is compared with llama.cpp
    on 64 tokens before it is handed out, once for each file and build.

    Args:
        file: an opened GGUF file.
        implementation: "native" (hand-written), "graph" (imported from llama.cpp), or "auto": native where there is one
            and it knows all that the file asks for, else graph.
        device: where to compute.
        dtype: of activations; None: `nn.activation_dtype(device)`.
        compute: "auto", "exact" or "ggml", see `ops.quant_linear`.
        num_ctx: context that the adapter will be served with; matters to longrope files only. None: the file's own
            `context_length`.
        is_checked: compare an imported model with llama.cpp; False where weights are not to be read.
        layers: those that this process computes, where a model is split; hand-written models only. None: all of them.

    Raises:
        ConfigError: another implementation.
        UnsupportedError: unknown architecture, or a key, tensor or operation that is not implemented.
        GGUFError: a key or tensor is missing, malformed or of another shape than its metadata says.
        ParityError: the imported model computes something else than llama.cpp.
        BridgeError: llama.cpp cannot build the graph.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation is {implementation!r}; needed: one of {', '.join(IMPLEMENTATIONS)}.")
    native = ARCHITECTURES.get(file.architecture)
    if layers is not None:
        if native is None or implementation == "graph":
            raise UnsupportedError(
                f"{file.path}: only a hand-written model can be split by layers ({', '.join(sorted(ARCHITECTURES))}), "
                f"not one from llama.cpp's graph ({file.architecture}). Set split_mode to none."
            )
        return native(file, device=device, dtype=dtype, compute=compute, num_ctx=num_ctx, layers=layers)
    if implementation != "graph":
        try:
            if native is None:
                raise UnsupportedError(
                    f"{file.path} has general.architecture '{file.architecture}', which has no hand-written model: "
                    f"there are {', '.join(sorted(ARCHITECTURES))}."
                )
            return native(file, device=device, dtype=dtype, compute=compute, num_ctx=num_ctx)
        except UnsupportedError as error:
            if implementation == "native":
                raise
            reason = str(error)
        logger.info("%s Taking the model from llama.cpp's own graph of the file.", reason)
        try:
            return _imported(
                file, device=str(device), dtype=dtype, compute=compute, num_ctx=num_ctx, is_checked=is_checked
            )
        except (BridgeError, UnsupportedError) as error:
            raise UnsupportedError(f"{reason} Nor can it be taken from llama.cpp's own graph: {error}") from error
    return _imported(file, device=str(device), dtype=dtype, compute=compute, num_ctx=num_ctx, is_checked=is_checked)


def _imported(
    file: GGUFFile, *, device: str, dtype: torch.dtype | None, compute: str, num_ctx: int | None, is_checked: bool
) -> Model:
    # Importing costs half a second of definitions that a native model does not need.
    from pyggtrain.graph.model import ImportedModel
    from pyggtrain.graph.verify import verify_once

    model = ImportedModel(file, device=device, dtype=dtype, compute=compute, num_ctx=num_ctx)
    if not is_checked:
        return model
    verified = verify_once(file, model)
    logger.info(
        "%s: model imported from llama.cpp's own graph; logits of %d tokens differ by %.1e of their size (needed: "
        "%.1e)",
        file.architecture,
        verified.num_tokens,
        verified.error,
        verified.bound,
    )
    return model


__all__ = ["ARCHITECTURES", "IMPLEMENTATIONS", "Model", "load"]
