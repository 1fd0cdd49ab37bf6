"""Write a copy of a GGUF model with other tensor types, tensor by tensor, through ggml's own quantisers.

Which tensors change follows llama.cpp's own rule: weights with two or more dimensions do; norms, biases and other
vectors, and the few small tensors that llama.cpp keeps (`KEPT`), stay as they are. Values come from decoding what the
source holds, so requantising a quantised file adds the second rounding to the first; start from an F16, BF16 or F32
file where there is one.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyggtrain import _bridge
from pyggtrain.errors import BridgeError, ConfigError, GGUFError
from pyggtrain.gguf.file import GGUFFile
from pyggtrain.gguf.imatrix import importance_of
from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.gguf.split import is_part_name
from pyggtrain.gguf.writer import (
    DeferredTensor,
    TypedValue,
    WritableTensor,
    row_bytes,
    typed_metadata,
    write_gguf,
)

if TYPE_CHECKING:
    import torch

# Tensors that llama.cpp never quantises: small ones whose exact values decide much, such as routers, state-space and
# position tensors, and those of projectors (llama.cpp, src/llama-quant.cpp, tensor_allows_quantization).
KEPT = (
    "*_norm.weight",
    "*ffn_gate_inp.weight",
    "*altup*",
    "*laurel*",
    "*per_layer_model_proj*",
    "*ssm_conv1d*",
    "*shortconv.conv.weight",
    "*indexer.[kq]_proj.weight",
    "*time_mix_*[0-2].weight",
    "*time_mix_first.weight",
    "*time_mix_lerp_fused.weight",
    "*attn_rel_b.weight",
    "*position_embd*",
    "*token_types*",
    "*sam.pos_embd*",
    "*sam.neck.*",
    "*sam.net_*",
    "*.rel_pos*",
    "*.patch_embd*",
    "*.patch_merger*",
    "*a.rvq.codebook*",
    "*mm.a.code_embd*",
)

# Where a row is no multiple of a type's block: a type of at least its quality with blocks of 32. llama.cpp's choices
# (tensor_type_fallback), but for Q2_K and Q3_K, which it makes Q4_0, and Q1_0 and NVFP4, for which it has none.
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
# Values decoded and encoded at a time.
_CHUNK_VALUES = 1 << 22


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
        mixes = [name for name in unknown if name[:-2] in known and name[-2:] in ("_S", "_M", "_L")]
        hint = (
            f" {mixes[0]} is a mix of types; here every weight becomes the one type {mixes[0][:-2]}, but for those "
            "that a pattern gives another."
            if mixes
            else ""
        )
        raise ConfigError(f"Types {', '.join(unknown)} are unknown; needed: of {', '.join(known)}.{hint}")
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in file.tensor_infos):
            raise ConfigError(
                f"The pattern '{pattern}' matches no tensor of {file.path}; `pyggtrain info` lists their names."
            )
    return [_change(info.name, info.type, tuple(info.shape), type, overrides) for info in file.tensor_infos.values()]


def _change(name: str, found: str, shape: tuple[int, ...], type: str, overrides: Mapping[str, str]) -> Change:
    known = _bridge.quant_types()
    asked = [override for pattern, override in overrides.items() if fnmatchcase(name, pattern)]
    is_weight = len(shape) >= 2 and name.endswith(".weight") and not any(fnmatchcase(name, kept) for kept in KEPT)
    # Integers are indices, whatever a pattern says.
    if found not in known or not (asked or is_weight):
        return Change(name, found, found, "")
    wanted = made = asked[-1] if asked else type
    while shape[-1] % known[made].block_size:
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
    is_requantize_allowed: bool = False,
    overwrite: bool = False,
    num_threads: int = 1,
    progress: Callable[[Change], None] = lambda change: None,
) -> list[Change]:
    """Write `file` to `output` with other tensor types, in one piece; the file appears complete or not at all.

    Memory: one tensor as it will be written, and 32 MiB.

    Args:
        type, tensor_types: as in `plan`.
        imatrix: importance of each column by tensor name, see `imatrix.read_imatrix`.
        is_uniform_allowed: where a type needs an importance matrix and there is none, weigh all columns alike.
        is_requantize_allowed: quantise weights that are quantised already.
        overwrite: replace an existing file.
        progress: told about each tensor before it is written.

    Returns:
        What was done, in the order of the file.

    Raises:
        ConfigError: as in `plan`; a type needs an importance matrix; a weight is quantised already; `output` exists,
            is the source itself, or is named like one part of several.
        OSError: `output` cannot be written; what was there before stays.
    """
    changes = plan(file, type, tensor_types)
    weights = imatrix or {}
    _check(file, Path(output), changes, overwrite=overwrite, is_requantize_allowed=is_requantize_allowed)
    if not is_uniform_allowed:
        _check_imatrix(changes, weights)
    tensors: list[WritableTensor] = [
        DeferredTensor(
            change.name,
            change.made,
            tensor.shape,
            partial(_produce, tensor, change, importance_of(weights, change.name, tensor.shape), num_threads, progress),
        )
        for tensor, change in zip(file.tensors.values(), changes, strict=True)
    ]
    write_gguf(output, _metadata(file, changes), tensors)
    return changes


def _check(
    file: GGUFFile, output: Path, changes: list[Change], *, overwrite: bool, is_requantize_allowed: bool
) -> None:
    if any(output.exists() and output.samefile(path) for path in file.paths):
        raise ConfigError(f"{output} is the file to be read; needed: another name. The source is never overwritten.")
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists already. Choose another name, or overwrite it explicitly.")
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: the folder {output.parent} does not exist. Make it first.")
    if is_part_name(output):
        raise ConfigError(f"{output} is named like a part of a split model; needed: a name without -00001-of-00002.")
    known = _bridge.quant_types()
    again = [c for c in changes if c.made != c.found and known[c.found].is_quantized and known[c.made].is_quantized]
    if again and not is_requantize_allowed:
        raise ConfigError(
            f"{len(again)} weights of {file.path} are quantised already (first: {again[0].name}, {again[0].found}): a "
            "second rounding falls on another grid and costs quality. Start from an F16, BF16 or F32 file, or allow "
            "it explicitly."
        )


def _check_imatrix(changes: list[Change], weights: "Mapping[str, torch.Tensor]") -> None:
    known = _bridge.quant_types()
    missing = [c.name for c in changes if c.made != c.found and known[c.made].needs_imatrix and c.name not in weights]
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors shall become a type that needs an importance matrix, and none is given for them "
            f"(first: {missing[0]}). Give one made by llama-imatrix, or allow uniform weights at a cost in quality."
        )


def _metadata(file: GGUFFile, changes: list[Change]) -> dict[str, TypedValue]:
    metadata = {key: value for key, value in typed_metadata(file).items() if not key.startswith("split.")}
    metadata["general.file_type"] = TypedValue("u32", FILE_TYPES[main_type(file, changes)])
    if any(_bridge.quant_types()[c.made].is_quantized for c in changes if c.made in _bridge.quant_types()):
        metadata["general.quantization_version"] = TypedValue("u32", QUANTIZATION_VERSION)
    return metadata


def main_type(file: GGUFFile, changes: list[Change]) -> str:
    """The type that most weights of matrices have after the changes."""
    num_weights: Counter[str] = Counter()
    for change in changes:
        shape = file.tensor_infos[change.name].shape
        if change.made in FILE_TYPES and len(shape) >= 2:
            num_weights[change.made] += math.prod(shape)
    return num_weights.most_common(1)[0][0] if num_weights else "F32"


def _produce(
    tensor: QuantTensor,
    change: Change,
    imatrix: "torch.Tensor | None",
    num_threads: int,
    progress: Callable[[Change], None],
) -> "torch.Tensor":
    import torch

    progress(change)
    if change.made == change.found:
        return tensor.blocks
    columns = tensor.shape[-1]
    if imatrix is None and _bridge.quant_types()[change.made].needs_imatrix:
        imatrix = torch.ones(1, columns)
    source = tensor.blocks.reshape(tensor.num_rows, -1)
    blocks = torch.empty(tensor.num_rows, row_bytes(change.made, columns), dtype=torch.uint8)
    # A stack of experts may have a row of importance for each of them.
    num_rows = tensor.num_rows if imatrix is None else tensor.num_rows // imatrix.shape[0]
    step = max(1, min(num_rows, _CHUNK_VALUES // columns))
    values = torch.empty(step, columns)
    for first in range(0, tensor.num_rows, num_rows):
        importance = None if imatrix is None else imatrix[first // num_rows]
        for start in range(first, first + num_rows, step):
            end = min(start + step, first + num_rows)
            decoded = values[: end - start]
            _bridge.dequantize(tensor.type, source[start:end], decoded, num_threads)
            try:
                _bridge.quantize(change.made, decoded, blocks[start:end], num_threads, importance)
            except BridgeError as error:
                raise GGUFError(f"{tensor.name}: cannot become {change.made}: {error}") from error
    return blocks


# ggml's GGML_QNT_VERSION: the layout of the block types, unchanged since 2023.
QUANTIZATION_VERSION = 2

# llama.cpp's LLAMA_FTYPE numbers of files that are mostly one type, as its own loader guesses them from the tensors.
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
