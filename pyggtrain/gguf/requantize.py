"""Write a copy of a GGUF model with other tensor types, tensor by tensor, through ggml's own quantisers.

Which tensors change follows llama.cpp's own rule: weights with two or more dimensions do; norms, biases and other
vectors, and the few small tensors that llama.cpp keeps (`KEPT`), stay as they are. Values come from decoding what the
source holds, so requantising a quantised file adds the second rounding to the first; start from an F16, BF16 or F32
file where there is one.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from pyggtrain import _bridge
from pyggtrain.errors import ConfigError, GGUFError
from pyggtrain.gguf.file import GGUFFile
from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.gguf.writer import (
    DeferredTensor,
    TypedValue,
    WritableTensor,
    quantize_tensor,
    typed_metadata,
    write_gguf,
)

if TYPE_CHECKING:
    import torch

# Small tensors whose exact values decide much: routers, state-space and position tensors (llama.cpp,
# src/llama-quant.cpp).
KEPT = (
    "*ffn_gate_inp*",
    "*ssm_conv1d*",
    "*shortconv.conv*",
    "*time_mix*",
    "*attn_rel_b*",
    "*position_embd*",
    "*token_types*",
)

# Where a row is no multiple of a type's block: the type of at least its quality that has blocks of 32, as llama.cpp
# chooses.
FALLBACKS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "IQ4_NL"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "NVFP4": "MXFP4",
}
# Rows that no block type fits stay in this one.
LAST_RESORT = "F16"


@dataclass(frozen=True)
class Change:
    """One tensor's fate: `found` in the source, `made` in the copy, and why it is not the type that was asked for (or
    "").
    """

    name: str
    found: str
    made: str
    reason: str


def plan(file: GGUFFile, type: str, tensor_types: Mapping[str, str] | None = None) -> list[Change]:
    """What `requantize` would do with each tensor.

    Args:
        type: ggml type for all weights, e.g. "Q4_K".
        tensor_types: other types by pattern ("*attn_v*": "Q6_K"); the last pattern that matches counts, and wins over
            `KEPT` too.

    Raises:
        ConfigError: an unknown type, or a pattern that matches no tensor.
    """
    overrides = dict(tensor_types or {})
    known = _bridge.quant_types()
    if unknown := sorted({type, *overrides.values()} - set(known)):
        raise ConfigError(f"Types {', '.join(unknown)} are unknown; needed: of {', '.join(known)}.")
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in file.tensor_infos):
            raise ConfigError(
                f"The pattern '{pattern}' matches no tensor of {file.path}; `pyggtrain info` lists their names."
            )
    return [_change(info.name, info.type, tuple(info.shape), type, overrides) for info in file.tensor_infos.values()]


def _change(name: str, found: str, shape: tuple[int, ...], type: str, overrides: Mapping[str, str]) -> Change:
    asked = [override for pattern, override in overrides.items() if fnmatchcase(name, pattern)]
    if not asked and (len(shape) < 2 or not name.endswith(".weight") or any(fnmatchcase(name, kept) for kept in KEPT)):
        return Change(name, found, found, "")
    wanted = made = asked[-1] if asked else type
    while shape[-1] % _bridge.quant_types()[made].block_size:
        made = FALLBACKS.get(made, LAST_RESORT)
    reason = "" if made == wanted else f"rows of {shape[-1]} are no multiple of {wanted}'s block"
    return Change(name, found, made, reason)


def requantize(
    file: GGUFFile,
    output: str | os.PathLike[str],
    type: str,
    *,
    tensor_types: Mapping[str, str] | None = None,
    imatrix: "Mapping[str, torch.Tensor] | None" = None,
    is_uniform_allowed: bool = False,
    num_threads: int = 1,
) -> list[Change]:
    """Write `file` to `output` with other tensor types; one tensor in memory at a time, replaced atomically.

    Args:
        type, tensor_types: as in `plan`.
        imatrix: importance of each column by tensor name, see `read_imatrix`.
        is_uniform_allowed: where a type needs an importance matrix and there is none, weigh all columns alike.

    Returns:
        What was done, in the order of the file.

    Raises:
        ConfigError: as in `plan`; a type needs an importance matrix; `output` is the source itself.
    """
    changes = plan(file, type, tensor_types)
    if any(os.path.exists(output) and os.path.samefile(output, path) for path in file.paths):
        raise ConfigError(f"{output} is the file to be read; needed: another name. The source is never overwritten.")
    weights = imatrix or {}
    known = _bridge.quant_types()
    missing = [c.name for c in changes if c.made != c.found and known[c.made].needs_imatrix and c.name not in weights]
    if missing and not is_uniform_allowed:
        raise ConfigError(
            f"{len(missing)} tensors shall become a type that needs an importance matrix, and none is given for them "
            f"(first: {missing[0]}). Give one made by llama-imatrix, or allow uniform weights at a cost in quality."
        )
    metadata = {key: value for key, value in typed_metadata(file).items() if not key.startswith("split.")}
    # 0 (all F32) to 26 number old mixes of types; readers that trust this key over the tensors are wrong about any mix.
    metadata["general.file_type"] = TypedValue("u32", FILE_TYPES.get(type, 0))
    tensors: list[WritableTensor] = [
        tensor
        if change.made == change.found
        else DeferredTensor(
            change.name,
            change.made,
            tensor.shape,
            partial(_blocks, tensor, change.made, weights.get(change.name), num_threads),
        )
        for tensor, change in zip(file.tensors.values(), changes, strict=True)
    ]
    write_gguf(output, metadata, tensors)
    return changes


def _blocks(tensor: QuantTensor, type: str, imatrix: "torch.Tensor | None", num_threads: int) -> "torch.Tensor":
    import torch

    values = torch.empty(tensor.num_rows, tensor.shape[-1])
    _bridge.dequantize(tensor.type, tensor.blocks.reshape(tensor.num_rows, -1), values, num_threads)
    if imatrix is None and _bridge.quant_types()[type].needs_imatrix:
        imatrix = torch.ones(tensor.shape[-1])
    return quantize_tensor(tensor.name, values, type, imatrix=imatrix, num_threads=num_threads).blocks


def read_imatrix(path: str | os.PathLike[str]) -> "dict[str, torch.Tensor]":
    """Importance of each column by tensor name, from a GGUF file made by llama.cpp's llama-imatrix: mean squared
    activation.

    Expert stacks hold one row of sums per expert; their mean is used for all experts.

    Raises:
        GGUFError: not a GGUF file, or not an importance matrix.
    """
    import torch

    file = GGUFFile(path)
    sums = [name for name in file.tensors if name.endswith(".in_sum2")]
    if not sums:
        raise GGUFError(f"{path}: holds no tensor named *.in_sum2; needed: an importance matrix made by llama-imatrix.")
    result = {}
    for name in sums:
        base = name.removesuffix(".in_sum2")
        count = file.tensors.get(f"{base}.counts")
        if count is None or file.tensors[name].type != "F32" or count.type != "F32":
            raise GGUFError(f"{path}: '{base}' lacks F32 tensors .in_sum2 and .counts; the file is damaged.")
        total = file.tensors[name].blocks.view(torch.float32).reshape(-1, file.tensors[name].shape[-1])
        counts = count.blocks.view(torch.float32).reshape(-1, 1)
        mean = (total / counts.clamp_min(1)).mean(dim=0)
        # A column that was never active still has to be stored somehow; ggml wants positive weights.
        result[base] = mean.clamp_min(float(mean[mean > 0].min()) if bool((mean > 0).any()) else 1.0)
    return result


# llama.cpp's LLAMA_FTYPE numbers of the files that are mostly one type.
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 28,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
}
